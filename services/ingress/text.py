"""How a client's value is shown in a message: short, and free of what JSON or a log line cannot hold."""

from __future__ import annotations

SHOWN_MAX = 100
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Return a value as text of at most ``SHOWN_MAX`` characters; containers and huge integers by their size."""
    if isinstance(value, (dict, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = (value if isinstance(value, str) else repr(value)).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
