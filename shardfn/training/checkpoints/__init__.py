"""Checkpoints: trees of tensors on disk, in the file format of torch.distributed.checkpoint."""

from .load import load
from .pretrained import load_safetensors, save_safetensors
from .save import Saving, save

__all__ = ["Saving", "load", "load_safetensors", "save", "save_safetensors"]
