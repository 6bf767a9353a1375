"""Measurements of the embedding plane: table schemes by budget, and look-up rates."""
