"""Loops and branches: the placements of their carries, and of all that is inside."""
