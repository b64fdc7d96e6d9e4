"""Reading of safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import CheckpointError


def write(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file as from_pretrained reads it, and have it on disk.

    Raises:
        OSError: the disk is full, or the like.
    """
    copies: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()  # the format has no strides, and no memory shared by two
        memory = x.untyped_storage().data_ptr()
        copies[name] = x.clone() if memory in taken else x
        taken.add(memory)
    try:
        save_file(copies, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class Files:
    """The files of a folder, each opened once and read in blocks.

    Args:
        folder: of `.safetensors` files.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in a file, by name.

        Raises:
            CheckpointError: the file is missing, incomplete or damaged.
        """
        opened = self._open(file)
        names = list(opened.keys())
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}

    def block(self, file: str, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A block of a tensor in a file; only its bytes are read.

        Args:
            file: its name in the folder.
            name: of the tensor.
            slices: one for each dim.

        Raises:
            CheckpointError: the file is missing, incomplete or damaged.
        """
        opened = self._open(file)
        return opened.get_slice(name)[slices] if slices else opened.get_tensor(name)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = os.path.join(self.folder, file)
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                fix = "use another copy, because the file is damaged, incomplete or missing"
                got = f"{path} cannot be read"
                raise CheckpointError.of("load_safetensors", got, str(error), fix=fix) from None
        return self._opened[file]
