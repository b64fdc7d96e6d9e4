"""Errors for functions that cannot be captured. An error names the problem, the source line, and
the code to write instead.
"""
