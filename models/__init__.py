"""The ranker and its parts: torch modules, numpy halves that the services call, and the oracle.

No Ray, and no input or output besides what a weight source gives. Shape letters: B requests, C candidates, L history
length, T encoded tokens (summaries and history), F candidate features, D width, H heads, O objectives, E speculative
width, R request tokens, N candidate tokens.
"""

from shared.settings import export

# Before the first product: on Intel's own processors MKL otherwise takes another kernel for another number of rows, and
# the bits of a candidate's score would depend on how many candidates there are.
export({"MKL_CBWR": "AUTO,STRICT"})
