"""The files of safetensors that hold the chunks of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import CheckpointError

# The format has no name for these: they are stored as bytes, in one more dim at the end.
AS_BYTES = frozenset({torch.complex64, torch.complex128, torch.complex32})


def write(
    path: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file, and have it on disk.

    Raises:
        OSError: the disk is full, or the like.
    """
    try:
        save_file(_storable(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as the format takes them: contiguous, none sharing memory with another."""
    out: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for key, x in tensors.items():
        x = x.detach().cpu().contiguous()
        memory = x.untyped_storage().data_ptr()
        x = x.clone() if memory in taken else x
        taken.add(memory)
        is_named = x.dtype not in AS_BYTES
        out[key] = x if is_named else x.unsqueeze(-1).view(torch.uint8)
    return out


class Files:
    """The files of a folder, each opened once and read in blocks.

    Args:
        where: the function, for its errors.
        folder: of one checkpoint.
    """

    def __init__(self, where: str, folder: str) -> None:
        self.where, self.folder = where, folder
        self._opened: dict[str, Any] = {}

    def block(
        self, file: str, key: str, slices: tuple[slice, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A block of a tensor in a file; only its bytes are read.

        Args:
            file: its name in the folder.
            key: the name of the tensor in the file.
            slices: one for each dim.
            dtype: of the tensor, if `write` may have stored it as bytes.

        Raises:
            CheckpointError: the file is missing, incomplete or damaged.
        """
        try:
            stored = self._file(file)
            whole = not slices  # of a tensor without dims
            block = stored.get_tensor(key) if whole else stored.get_slice(key)[slices]
        except (SafetensorError, OSError) as error:
            got = f"{os.path.join(self.folder, file)} cannot be read"
            fix = "another step: the file is damaged, or was not written to its end"
            raise CheckpointError.of(self.where, got, str(error), fix=fix) from None
        if dtype not in AS_BYTES:
            return block
        # the file is aligned to 8 bytes, and torch's copy of complex128 crashes at less than 16
        return block.clone().view(dtype).squeeze(-1)

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            path = os.path.join(self.folder, name)
            self._opened[name] = safe_open(path, framework="pt")
        return self._opened[name]
