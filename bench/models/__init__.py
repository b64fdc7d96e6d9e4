"""Models that people use, as their documentation calls them: which train, and what they send."""

from .torchvision_ops import importable

importable()
