"""Placements of arguments that are chosen with those of all ops, under a limit of memory."""
