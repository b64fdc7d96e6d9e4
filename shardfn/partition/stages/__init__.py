"""Stages of a pipeline: which coordinate runs which step, and the messages between them."""
