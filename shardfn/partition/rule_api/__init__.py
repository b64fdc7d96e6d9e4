"""Sharding rules: their input, their strategies, einsum notation, and the registry of users'
rules.
"""
