"""Measurement and verification of a mesh: every figure is a row with its spread, configuration, seed, commit, device.

``registry`` names the benchmarks, ``harness`` and ``load`` run them, ``record`` keeps the rows, ``verify`` compares a
mesh with the oracle, ``compare`` puts two result files side by side, ``cli`` is what the command line calls.
"""
