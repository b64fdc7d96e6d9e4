"""Placements chosen over all ops of a program: one integer program for each mesh axis."""
