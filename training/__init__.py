"""Data, training, evaluation and publication of the models that the mesh serves."""
