"""The speculative-embedding cache, and the foundation worker that fills it."""
