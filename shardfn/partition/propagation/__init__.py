"""Sharding propagation: a placement for every value of the Program."""
