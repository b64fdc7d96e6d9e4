"""Torch's optimizers, gradient clipping and moving averages as pure functions."""
