"""Sharding rules of scaled dot-product attention, for shards of the batch, the heads or the
sequence.
"""
