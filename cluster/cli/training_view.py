"""Says in a few words what weights are and how good they are."""

from __future__ import annotations

from cluster.weights import Choice


def in_words(choice: Choice) -> str:
    """Return version and test quality in one line."""
    quality = choice.quality()
    words = [choice.version if choice.is_new else f"{choice.version}, reused"]
    if quality:
        words.append(f"click AUC {quality['auc']:.3f}, NE {quality['ne']:.3f}")
    return "; ".join(words)
