"""Raw candidates to a FeatureBatch."""
