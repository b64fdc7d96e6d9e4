"""The custom ops of shardfn, one family per file: placements, primitives of shard_map, loops,
packing, and communication with neighbours.
"""
