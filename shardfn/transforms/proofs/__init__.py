"""Checks of sharded functions against plain functions, and of sharding rules against ops."""
