"""Batches of the host as DTensors."""

from .loader import Loader, loader

__all__ = ["Loader", "loader"]
