"""Replacements of DTensor's methods and torch's collectives that Dynamo reads in a captured
function.
"""
