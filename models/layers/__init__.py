"""Layers of the ranker.

None has a bias unless the configuration asks for one. Token tensors are token-major, [tokens, rows, D], so that a
linear map on the token axis is one matrix product over all rows.
"""
