"""Benchmarks of single operators, each against the form that it replaces."""
