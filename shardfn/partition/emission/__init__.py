"""Emission: a plan written out as the graph of one rank, with explicit collectives."""
