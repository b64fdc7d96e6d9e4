"""The capture of the body of `shard_map`: which axis names are bound, and which values vary over
which mesh axes.
"""
