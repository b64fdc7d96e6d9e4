"""Loops and branches as one op of the program, ours and torch's."""
