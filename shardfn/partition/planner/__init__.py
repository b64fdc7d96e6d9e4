"""Placements chosen over the whole program: one integer program for each mesh axis."""
