"""Ops that read or write by index."""
