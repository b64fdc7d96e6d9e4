"""The body of shard_map: which axis names are bound, which values vary over which mesh axes."""
