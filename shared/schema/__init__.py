"""The messages that stations pass to one another and to clients.

``api``: what crosses the trust border, validated by pydantic. The rest: frozen dataclasses of numpy arrays that
travel between processes as object references. Shape letters: C candidates of one request, K returned candidates,
L history events, T jagged items, U distinct table rows, D embedding width, O objectives, E speculative width.
"""
