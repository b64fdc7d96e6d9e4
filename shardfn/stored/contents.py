"""One compilation as bytes: a header of JSON, then tensors by safetensors."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from .. import _compat
from .json_text import parsed

FORMAT = "shardfn compilation 1"


def to_bytes(made: _compat.Generated) -> bytes:
    """Serialize a compilation.

    Raises:
        ValueError: the format has no name for the dtype of a constant.
    """
    header = {
        "format": FORMAT,
        "code": made.code,
        "to_align": made.to_align,
        "written": made.written,
    }
    constants = {name: x.contiguous() for name, x in made.constants.items()}
    devices = {name: str(x.device) for name, x in made.constants.items()}
    strides = {name: x.stride() for name, x in made.constants.items()}
    if any(x.stride() != strides[name] for name, x in constants.items()):
        raise ValueError("a constant tensor is not contiguous")
    text = json.dumps({**header, "devices": devices}).encode()
    try:
        tensors = save(constants) if constants else b""
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise ValueError(str(error)) from error
    return len(text).to_bytes(8, "little") + text + tensors


def from_bytes(found: bytes) -> _compat.Generated:
    """Parse a serialized compilation.

    Raises:
        ValueError: they are none of this version.
    """
    length = int.from_bytes(found[:8], "little")
    header: Any = parsed(found[8 : 8 + length])
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it has another format")
    rest = found[8 + length :]
    constants = load(rest) if rest else {}
    placed = {name: x.to(header["devices"][name]) for name, x in constants.items()}
    return _compat.Generated(
        header["code"], tuple(header["to_align"]), tuple(header["written"]), placed
    )
