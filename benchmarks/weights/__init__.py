"""Benchmarks of the life of weights: loading, in-place updates, freshness."""
