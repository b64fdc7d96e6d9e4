"""Conversion of data batches to DTensors."""

from .loader import Loader, loader

__all__ = ["Loader", "loader"]
