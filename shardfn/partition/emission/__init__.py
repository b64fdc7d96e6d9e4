"""Emission of the graph of one rank, with explicit collectives, from a placement plan."""
