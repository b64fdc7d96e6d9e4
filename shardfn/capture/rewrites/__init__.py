"""Replacements of torch's ops and functions by ones that capture can trace or that have
sharding rules.
"""
