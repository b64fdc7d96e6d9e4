"""The automatic choice of argument placements, together with those of all ops, under a memory
limit.
"""
