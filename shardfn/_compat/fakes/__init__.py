"""Fake tensors: known sizes of results, zero tangents, and a cache of op results."""
