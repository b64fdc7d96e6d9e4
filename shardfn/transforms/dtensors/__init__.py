"""Replacements for DTensor methods and torch collectives, which Dynamo traces in a captured
function.
"""
