"""The files of torch.distributed.checkpoint: what is read of them, and what is refused."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

import shardfn as sf

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}
W = MetadataIndex("w", (0, 0))


class _Runs:
    """An object that runs a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def _metadata(folder: str) -> Any:
    return pickle.loads(Path(folder, ".metadata").read_bytes())


def _refused(folder: str, data: bytes, name: str = ".metadata") -> str:
    path = Path(folder, name)
    path.write_bytes(data)
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(folder, TREE)
    assert str(error.value).startswith(f"load: {path} cannot be read\n")
    return str(error.value)


def _set_on_class() -> bytes:
    """BUILD on a class of the records, with an attribute for it."""
    home = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return home + b"(NX\x01\x00\x00\x00xK\x07sdb."


DAMAGED: dict[str, tuple[bytes, str]] = {
    "garbage": (b"garbage", "UnpicklingError"),
    "empty": (b"", "EOFError"),
    "another object": (pickle.dumps([1, 2]), "AttributeError"),
    "a call": (pickle.dumps(_Runs(os.abort)), "abort instead of a record"),
    "a call of torch's": (b"ctorch\ncompile\n)R.", "'compile' instead of a dtype"),
    "a call beside records": (b"ctorch.serialization\nload\n)R.", "load instead of a record"),
    "a call in a field": (
        pickle.dumps(Metadata({}, planner_data=_Runs(os.abort))),
        "abort instead of a record",
    ),
    "a class that is changed": (_set_on_class(), "TypeError"),
    "nothing in it": (pickle.dumps(Metadata({})), "AttributeError"),
    "nested deeply": (b"(" * 100_000 + b"t" * 100_000 + b".", "AttributeError"),
    "an attribute of a dtype": (b"ctorch\nfloat32.to\n.", "instead of a dtype"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_metadata_of_something_else_is_refused_and_runs_nothing(folder: str, kind: str) -> None:
    data, why = DAMAGED[kind]
    assert why in _refused(folder, data)


def _tensor(metadata: Any, **changes: Any) -> None:
    entry: TensorStorageMetadata = metadata.state_dict_metadata["w"]
    metadata.state_dict_metadata["w"] = replace(entry, **changes)


def _chunk(metadata: Any, **changes: Any) -> None:
    entry = metadata.state_dict_metadata["w"]
    _tensor(metadata, chunks=[replace(entry.chunks[0], **changes)])


def _place(metadata: Any, **changes: Any) -> None:
    metadata.storage_data[W] = replace(metadata.storage_data[W], **changes)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negative sizes": (lambda m: _tensor(m, size=(-2, 3)), "instead of sizes"),
    "sizes of text": (lambda m: _tensor(m, size="23"), "instead of sizes"),
    "other dims": (lambda m: _chunk(m, offsets=(0,)), "a chunk"),
    "out of bounds": (lambda m: _chunk(m, offsets=(1, 0)), "out of bounds"),
    "a part": (lambda m: _chunk(m, sizes=(1, 3)), "tensor-volume"),
    "twice": (
        lambda m: _tensor(m, chunks=m.state_dict_metadata["w"].chunks * 2),
        "overlapping chunks",
    ),
    "no dtype": (
        lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "save"),
        "'save' instead of a dtype",
    ),
    "in no file": (lambda m: m.storage_data.pop(W), "is in no file"),
    "another folder": (lambda m: _place(m, relative_path="../x"), "outside of the folder"),
    "a negative place": (lambda m: _place(m, offset=-1), "instead of sizes"),
    "an extension": (lambda m: _place(m, transform_descriptors=["zstd"]), "an extension"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_metadata_that_does_not_fit_is_refused(folder: str, kind: str) -> None:
    change, why = WRONG[kind]
    metadata = _metadata(folder)
    change(metadata)
    assert why in _refused(folder, pickle.dumps(metadata))


def test_a_newer_format(folder: str) -> None:
    path = Path(folder, ".metadata")
    path.write_bytes(pickle.dumps(replace(_metadata(folder), version="99.0")))
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(folder, TREE)
    assert str(error.value) == (
        f"load: {path} has format 99.0; this version of shardfn reads 1\n"
        "  try: install a newer version of shardfn"
    )


def _in_place_of(folder: str, index: MetadataIndex, x: Any) -> str:
    """The error of a load of a folder whose item is something else."""
    metadata, stream = _metadata(folder), io.BytesIO()
    torch.save(x, stream)
    place = replace(metadata.storage_data[index], relative_path="x", offset=0)
    metadata.storage_data[index] = replace(place, length=stream.tell())
    Path(folder, ".metadata").write_bytes(pickle.dumps(metadata))
    return _refused(folder, stream.getvalue(), "x")


@pytest.mark.parametrize("index", [MetadataIndex("epoch"), W], ids=["a value", "a tensor"])
def test_items_that_would_run_code_are_refused(folder: str, index: MetadataIndex) -> None:
    assert "UnpicklingError" in _in_place_of(folder, index, _Runs(os.abort))


@pytest.mark.parametrize("x", [torch.ones(3, 3), torch.ones(2, 3).long()], ids=["shape", "dtype"])
def test_a_tensor_of_another_shape_or_dtype_is_refused(folder: str, x: torch.Tensor) -> None:
    assert f"{x.dtype} {tuple(x.shape)} in place of w" in _in_place_of(folder, W, x)


def test_strides_conjugates_and_views_are_read_as_values(tmp_path: Path) -> None:
    x = torch.complex(torch.arange(12.0), torch.ones(12)).reshape(3, 4)
    tree = {
        "turned": x.T,
        "part": x[1:, ::2],
        "conj": x.conj(),
        "neg": x.conj().imag,
        "one": x[1, 1],
    }
    sf.save(tmp_path, tree)
    loaded = sf.load(tmp_path, tree)
    for name, y in tree.items():
        assert torch.equal(loaded[name], y), name
