"""Replacements for torch's ops and functions that capture cannot trace or that have no sharding
rules.
"""
