"""Benchmarks of the model in one process: what sharing saves, and how much of the machine the ranking pass uses."""
