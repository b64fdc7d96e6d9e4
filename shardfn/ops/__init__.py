"""Ops of our own, one family per file: placements, per-rank prims, loops, packing and exchanges."""
