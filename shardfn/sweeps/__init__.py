"""Predictions that compare one step on several meshes, with several strategies, options and
hardware.
"""
