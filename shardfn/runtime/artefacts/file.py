"""The file of an artefact: safetensors, with a record as JSON among its metadata, and a digest of
both. It holds no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ...errors import ArtefactError, call_site
from ...stored import complete_files
from ...stored.json_text import parsed

FORMAT = "shardfn artefact"
VERSION = 1
LENGTH = 8  # bytes that say how long the header is
DAMAGED = (
    "use another copy, or save the program again: the file is damaged, or is not a saved program"
)


def write(path: str, record: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write an artefact so that the file appears complete, or not at all.

    Raises:
        ArtefactError: it cannot be written there.
    """
    stored = {name: as_bytes(x) for name, x in tensors.items()}
    text = json.dumps(record)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "record": text,
        "digest": _digest(text, stored),
    }
    try:
        complete_files.write(path, save(stored, metadata))
    except OSError as error:
        fix = "give a path that can be written"
        got = f"{path} cannot be written"
        raise ArtefactError.of("save", got, str(error), fix=fix) from None


def read(path: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Read the record, the tensors as bytes, and the digest of an artefact.

    Raises:
        ArtefactError: it is damaged, incomplete, or something else.
    """
    try:
        with open(path, "rb") as file:
            found = file.read()
        metadata = _metadata(found)
        tensors = load(found)
        text = str(metadata["record"])
        if _digest(text, tensors) != metadata["digest"]:
            raise ValueError("the file's digest does not match its contents")
        record = parsed(text)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, error) from None
    return record, tensors, str(metadata["digest"])


def damaged(path: str, why: Exception) -> ArtefactError:
    """Build the error for an artefact that cannot be read."""
    where, got = "load_compiled, path", f"{path} cannot be read as a saved program"
    text = f"{type(why).__name__}: {why}"
    return ArtefactError.of(where, got, text, fix=DAMAGED, source=call_site())


def _metadata(found: bytes) -> dict[str, Any]:
    """Parse the metadata header of a safetensors file.

    Raises:
        ValueError: it is none of ours.
    """
    length = int.from_bytes(found[:LENGTH], "little")
    if len(found) < LENGTH + length:
        raise ValueError("the file ends too early, or is not a program saved by Compiled.save")
    header = parsed(found[LENGTH : LENGTH + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise ValueError("the file must be a program saved by Compiled.save")
    if metadata.get("version") != str(VERSION):
        said = metadata.get("version")
        raise ValueError(
            f"the file has format version {said!r}, but this shardfn reads version {VERSION}"
        )
    return metadata


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"\0{name}\0".encode())
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in logical order, as bytes."""
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).clone()


def filled(like: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Make a tensor of a given layout from bytes.

    Raises:
        RuntimeError: they are too many, or too few.
    """
    values = found.view(like.dtype).view(like.shape).to(like.device)
    return like.copy_(values)
