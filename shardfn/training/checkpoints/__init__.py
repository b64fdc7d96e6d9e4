"""Checkpoints: trees of tensors on disk, one file of safetensors for each rank and one manifest."""

from .load import load
from .pretrained import load_safetensors, save_safetensors
from .save import Saving, save

__all__ = ["Saving", "load", "load_safetensors", "save", "save_safetensors"]
