"""Stored compilations on disk, which all processes of a user share."""

from . import contents
from .folder import Folder, limit, own_folder, place

__all__ = ["Folder", "contents", "limit", "own_folder", "place"]
