"""Sharding rules of ops that read or write elements by index."""
