"""Proofs: a sharded function against the plain one, a sharding rule against its op."""
