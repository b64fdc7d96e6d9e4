"""The ops of shardfn, one family per file: placements, per-rank prims, loops, packing, and
communication with neighbours.
"""
