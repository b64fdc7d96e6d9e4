"""Compilations on disk, which the processes of a user share."""

from .folder import Folder, folder
from .once import compiled_once, key_of

__all__ = ["Folder", "compiled_once", "folder", "key_of"]
