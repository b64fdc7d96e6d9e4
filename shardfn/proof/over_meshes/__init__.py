"""Tests over many meshes, placements and sizes."""
