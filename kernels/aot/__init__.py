"""Compiles every Triton kernel ahead of time for sm_90 and reads what it uses; no GPU and no driver are needed.

``python -m kernels.aot`` prints one JSON object; ``python -m kernels.aot --update`` writes the golden file that the
tests compare with.
"""
