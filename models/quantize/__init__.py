"""Selective low precision: which linear runs in which number format, decided by measurements on the device in hand.

``formats`` are the formats, ``measure`` times them layer by layer, ``choose`` picks under a budget of quality, ``plan``
is the file that a ranking service obeys. Norms, the heads' logits and the first pass always stay in float32.
"""
