"""Benchmarks of services in one process, without Ray."""
