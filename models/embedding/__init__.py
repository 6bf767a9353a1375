"""The sparse half: vocabularies, the item catalog, tables, shard placement and pooling."""
