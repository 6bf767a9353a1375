"""Kernel search: of several ways to compute one thing, find the fastest that is right, and keep the evidence.

For each (operator, shape, dtype, device) every variant is first held against the plain reference, on several inputs and
with poisoned outputs; only variants that pass are timed, in interleaved repeats. The winner is stored on disk with what
was measured and with why the others lost, so that the next process takes it without a search.
"""

from kernels.search.problem import Problem, UnavailableVariantError, Variant
from kernels.search.run import Outcome, SearchResult, search
from kernels.search.store import SearchStore

__all__ = ["Outcome", "Problem", "SearchResult", "SearchStore", "UnavailableVariantError", "Variant", "search"]
