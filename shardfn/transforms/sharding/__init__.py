"""Transforms and functions with arguments for meshes, placements or mesh axes."""
