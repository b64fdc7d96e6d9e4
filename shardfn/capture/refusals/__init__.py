"""Errors for functions that cannot be captured: the problem, the line, and what to write
instead.
"""
