"""Manifests: what is read back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def _refused(path: Any, like: Any = TREE) -> str:
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(path, like)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("garbage", "Expecting value"),
        ("[1, 2]", "TypeError"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "KeyError"),
        ('{"format": 1, "step": 0, "tensors": {}, "constants": 3}', "format and"),
        (
            '{"format": 1, "step": 0, "constants": {}, "tensors": {"x": {"shape": '
            '[1], "dtype": "save", "chunks": []}}}',
            "'save' in place of a dtype",
        ),
        (
            '{"format": 1, "step": 0, "constants": {}, "tensors": {"x": {"shape": '
            '[-1], "dtype": "float32", "chunks": []}}}',
            "in place of sizes",
        ),
    ],
)
def test_a_damaged_manifest(folder: str, text: str, why: str) -> None:
    Path(folder, "shardfn.json").write_text(text)
    said = _refused(folder)
    assert said.startswith(f"load: {folder}/shardfn.json cannot be read\n")
    assert why in said


def test_a_newer_format(folder: str) -> None:
    path = Path(folder, "shardfn.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert _refused(folder) == (
        f"load: {path} has format 99; this version of shardfn reads up to 1\n"
        "  try: a newer version of shardfn"
    )
