"""The manifest of a checkpoint: its tensors, with the file and the place of each chunk, and its
constants, as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from ..._compat.distributed.checkpoint_plans import Chunk
from ...errors import CheckpointError
from ...stored.json_text import parsed
from .folders import MANIFEST, sync

FORMAT = 1  # of what this version writes


@attrs.frozen
class Stored:
    """One tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()


@attrs.frozen
class Manifest:
    """The tensors and constants of a checkpoint.

    Args:
        tensors: by name.
        constants: JSON by name: a number, text, None, or the state of an object.
        step: its number.
    """

    tensors: Mapping[str, Stored]
    constants: Mapping[str, Any]
    step: int


def file_of(part: int) -> str:
    """The name of the file that a rank writes."""
    return f"part-{part:05d}.safetensors"


def key_of(chunk: Chunk) -> str:
    """The name of a chunk in its file."""
    return f"{chunk.name}@{','.join(map(str, chunk.offsets))}"


def write(folder: str, manifest: Manifest) -> None:
    """Write a manifest, so that it is on disk with all its text or not at all."""
    path = os.path.join(folder, MANIFEST)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(_as_json(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".part", path)
    sync(folder)


def _as_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": manifest.step,
        "tensors": {
            name: {
                "shape": x.shape,
                "dtype": name_of(x.dtype),
                "chunks": [[c.offsets, c.sizes, c.part] for c in x.chunks],
            }
            for name, x in manifest.tensors.items()
        },
        "constants": dict(manifest.constants),
    }


def read(where: str, folder: str) -> Manifest:
    """The manifest of a folder.

    Args:
        where: the function, for its errors.
        folder: of one step.

    Raises:
        CheckpointError: it is not the manifest of a checkpoint, or of a newer format.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            found = parsed(file.read())
    except (OSError, ValueError) as error:
        raise _unreadable(where, path, str(error)) from None
    number = found.get("format") if isinstance(found, dict) else None
    if isinstance(number, int) and number > FORMAT:
        got = f"{path} has format {number}; this version of shardfn reads up to {FORMAT}"
        raise CheckpointError.of(where, got, fix="a newer version of shardfn")
    try:
        return _from_json(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(where, path, f"{type(error).__name__}: {error}") from None


def _unreadable(where: str, path: str, why: str) -> CheckpointError:
    fix = "another step: it is damaged, or something else than a checkpoint"
    return CheckpointError.of(where, f"{path} cannot be read", why, fix=fix)


def _from_json(found: Any) -> Manifest:
    tensors = {str(name): _stored(str(name), x) for name, x in found["tensors"].items()}
    if found["format"] != FORMAT or not isinstance(found["constants"], dict):
        raise ValueError("format and constants")
    return Manifest(tensors, found["constants"], int(found["step"]))


def _stored(name: str, x: Any) -> Stored:
    chunks = tuple(
        Chunk(name, sizes_of(offsets), sizes_of(sizes), int(part))
        for offsets, sizes, part in x["chunks"]
    )
    return Stored(sizes_of(x["shape"]), dtype_of(x["dtype"]), chunks)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as text."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a text.

    Raises:
        ValueError: the text is the name of something else.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} in place of a dtype")
    return dtype


def sizes_of(x: Any) -> tuple[int, ...]:
    """Numbers that are not negative.

    Raises:
        TypeError, ValueError: something else.
    """
    if not all(type(n) is int and n >= 0 for n in x):
        raise ValueError(f"{x!r} in place of sizes")
    return tuple(x)
