"""A compilation as bytes: JSON and safetensors, which come back as they were."""

from __future__ import annotations

import pickle

import pytest
import torch

from shardfn import _compat
from shardfn.stored import contents


def test_a_compilation_comes_back() -> None:
    constants = {"a": torch.arange(3), "b": torch.tensor(0.5, dtype=torch.bfloat16)}
    made = _compat.Generated("def call(x): ...", (1,), (0, 2), constants)
    back = contents.from_bytes(contents.to_bytes(made))
    assert (back.code, back.to_align, back.written) == (made.code, (1,), (0, 2))
    for name, x in constants.items():
        found = back.constants[name]
        assert torch.equal(found, x) and found.dtype == x.dtype
    plain = contents.from_bytes(contents.to_bytes(_compat.Generated("x = 1")))
    assert plain.constants == {}


def test_a_constant_that_the_format_cannot_hold_is_refused() -> None:
    made = _compat.Generated("", constants={"a": torch.ones(2, 3).t()})
    with pytest.raises(ValueError, match="not contiguous"):
        contents.to_bytes(made)


@pytest.mark.parametrize(
    "found", [b"", b"\0" * 8, pickle.dumps([1]), b"\2\0\0\0\0\0\0\0[]", b"\xff" * 40]
)
def test_other_bytes_are_refused(found: bytes) -> None:
    with pytest.raises(ValueError):
        contents.from_bytes(found)
