"""The interface of sharding rules: the input of a rule, strategies, einsum notation, and the
registry of users' rules.
"""
