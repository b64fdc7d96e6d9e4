"""Compilations of Inductor as values: what they depend on, and how one is run again."""
