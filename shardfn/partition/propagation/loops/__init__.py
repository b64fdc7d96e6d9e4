"""Sharding propagation in loops and branches: the placements of the carries, and of all values in
the body.
"""
