"""Scores and order, one deployment a tier."""
