"""Ops and functions of torch replaced by ones that capture can read or that have sharding rules."""
