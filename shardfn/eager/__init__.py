"""Eager DTensor ops and collectives of scripts that run in a fake world, outside of captured
functions.
"""
