"""Transforms that differentiate, and those that say what a backward saves or sends."""
