"""Fake tensors: known result sizes, zero tangents, and a cache of op results."""
