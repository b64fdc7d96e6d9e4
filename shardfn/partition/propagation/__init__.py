"""Sharding propagation, which chooses a placement for every value of a Program."""
