"""Scaled dot-product attention on shards of batch, heads or sequence."""
