"""Table shards: a FeatureBatch to the rows this shard owns."""
