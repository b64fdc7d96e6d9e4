"""The passes: each takes a local graph and returns a new one."""
