"""Rematerialization: which residuals the backward saves, and which it recomputes."""
