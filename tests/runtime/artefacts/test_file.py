"""The file of an artefact is written whole, and read only as it was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardfn.errors import ArtefactError
from shardfn.runtime.artefacts import file

TENSORS = {
    "a": torch.arange(6).view(2, 3).t(),
    "b": torch.tensor([1 + 2j]).conj(),
    "c": torch.zeros(0, 3),
    "d": torch.tensor(2.5),
}


def test_a_record_and_the_bytes_of_tensors_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    file.write(path, {"a": [1, None]}, TENSORS)
    record, tensors, _ = file.read(path)
    assert record == {"a": [1, None]} and tensors.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        assert torch.equal(file.filled(like, tensors[name]), x.resolve_conj())
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_equal_contents_have_equal_digests(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    digests = []
    for n in (1, 1, 2):
        file.write(path, {"n": n}, TENSORS)
        digests.append(file.read(path)[2])
    assert digests[0] == digests[1] != digests[2]


def test_a_file_of_tensors_alone_and_one_of_a_later_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ArtefactError, match="the file must be a program saved"):
        file.read(str(path))
    metadata = {"format": file.FORMAT, "version": "2", "record": "{}"}
    save_file({}, path, metadata)
    with pytest.raises(
        ArtefactError, match="the file has format version '2', but this shardfn reads version 1"
    ):
        file.read(str(path))
    metadata = {"format": file.FORMAT, "version": "1", "record": "{}", "digest": ""}
    save_file({}, path, metadata)
    with pytest.raises(ArtefactError, match="the file's digest does not match its contents"):
        file.read(str(path))


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtefactError, match="cannot be written"):
        file.write(str(tmp_path / "folder"), {}, {})
    assert os.listdir(tmp_path) == ["folder"], "no partial file stays"
