"""Stored compilations of Inductor: what a compilation depends on, and how to run it again."""
