"""Benchmarks of a whole mesh; the only ones that may start Ray."""
