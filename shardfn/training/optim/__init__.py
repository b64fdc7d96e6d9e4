"""Optimizers as pure functions: torch's, gradient clipping, moving averages."""
