"""Fake tensors: sizes that they know, zeros of theirs, and results that are remembered."""
