"""Checks of a sharded function against the plain function, and of a sharding rule against its op.
"""
