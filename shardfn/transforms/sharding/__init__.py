"""Transforms and functions that name meshes, placements and axes."""
