"""Operators: one folder each, with a plain PyTorch reference beside every kernel. Imports torch, triton and numpy only."""
