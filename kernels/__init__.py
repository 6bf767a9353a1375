"""Operators: one folder each, with a plain PyTorch reference beside every kernel.

Imports torch, triton, numpy and the standard library only, so that it also runs where nothing else of ours is.
"""
