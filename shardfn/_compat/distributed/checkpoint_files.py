"""The files of torch.distributed.checkpoint (DCP), read without running what they hold.

DCP's own reader unpickles `.metadata`, and loads each chunk whole to copy a block of it. This one
takes nothing but DCP's records from the pickle, checks them, and reads the bytes of a block only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import CheckpointError
from .checkpoint_plans import dtype_of, global_save, sizes_of

METADATA = ".metadata"
FORMAT = "1"  # of what DCP writes; older ones have none
HOME = "torch.distributed.checkpoint"
RECORDS = {  # what the pickle of `.metadata`, or of a tensor, may name besides sizes and dtypes
    f"{HOME}.metadata.Metadata",
    f"{HOME}.metadata.MetadataIndex",
    f"{HOME}.metadata.StorageMeta",
    f"{HOME}.metadata.TensorStorageMetadata",
    f"{HOME}.metadata.BytesStorageMetadata",
    f"{HOME}.metadata.ChunkStorageMetadata",
    f"{HOME}.metadata.TensorProperties",
    f"{HOME}.metadata._MEM_FORMAT_ENCODING",
    f"{HOME}.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
}


class _Record:
    """Stands for any record. A pickle makes it and gives it a state, and can change nothing else:
    `__setstate__` is what BUILD calls, also on this class.
    """

    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a pickle of records, sizes and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None  # the record names the dtype itself
        if module == "torch" and name.endswith("Storage"):
            return getattr(getattr(torch, name), "_dtype", None)
        if module == "torch":
            return dtype_of(name)
        if f"{module}.{name}" in RECORDS:
            return _Record
        raise pickle.UnpicklingError(f"{module}.{name} instead of a record")

    def persistent_load(self, pid: Any) -> Any:
        return pid


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """A context in which a file is read, which may hold anything.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        yield
    except Exception as error:  # pickle and torch.load raise many kinds for damaged files
        lines = f"{type(error).__name__}: {error}".split("\n")[:2]
        fix = "load another step: the checkpoint file is damaged or incomplete"
        raise CheckpointError.of("load", f"{path} cannot be read", *lines, fix=fix) from None


def read_metadata(folder: str) -> Any:
    """DCP's record of a checkpoint.

    Raises:
        CheckpointError: the file is damaged, something else, or of a newer format.
    """
    path = os.path.join(folder, METADATA)
    with _readable(path), open(path, "rb") as file:
        record = _Reader(file).load().state
        rows = [row for name, x in record["state_dict_metadata"].items() for row in _rows(name, x)]
        whole = global_save([rows, []])
        places = dict(map(_place, record["storage_data"].items()))
        if lost := [index for index in whole.indices[0] if index not in places]:
            raise ValueError(f"{lost[0]} is in no file")
        version = str(record.get("version") or FORMAT)
    if version.split(".", maxsplit=1)[0] != FORMAT:
        got = f"{path} has format {version}; this version of shardfn reads {FORMAT}"
        raise CheckpointError.of("load", got, fix="install a newer version of shardfn")
    whole.metadata.storage_data = places
    return whole.metadata


def _rows(name: Any, record: Any) -> list[Any]:
    """The items of a tensor or a value, in the form in which ranks exchange them."""
    entry = record.state or {}
    if "chunks" not in entry:
        return [[name]]
    dtype, *_ = entry["properties"].state
    chunks = [x.state for x in entry["chunks"]]
    return [[name, x["offsets"], x["sizes"], entry["size"], str(dtype)] for x in chunks]


def _place(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """DCP's name of an item, and its place in a file of the folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    name, place = pair[0].state, pair[1].state
    offset, file = name.get("offset"), place["relative_path"]
    if os.path.basename(file) != file:
        raise ValueError(f"{file!r} outside of the folder")
    if place.get("transform_descriptors"):
        raise ValueError(f"{file!r} is compressed or encrypted by an extension")
    index = MetadataIndex(name["fqn"], None if offset is None else sizes_of(offset))
    start, length = sizes_of([place["offset"], place["length"]])
    return index, _StorageInfo(file, start, length)


class Items:
    """The items in the files of a checkpoint.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.metadata = folder, read_metadata(folder)
        self._chunk = functools.cache(self._chunk)
        self._bytes = functools.cache(self._bytes)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
        """The global shape and the dtype of each tensor, and None for other values, by name."""
        entries = self.metadata.state_dict_metadata
        return {
            name: (tuple(x.size), x.properties.dtype) if hasattr(x, "size") else None
            for name, x in entries.items()
        }

    def value(self, name: str) -> Any:
        """A value that is not a tensor: a constant, or a dict, list or tuple of these.

        Raises:
            CheckpointError: the file is damaged, or would run code.
        """
        from torch.distributed.checkpoint.metadata import MetadataIndex

        path, place = self._place(MetadataIndex(name))
        with _readable(path), open(path, "rb") as file:
            file.seek(place.offset)
            stream = io.BytesIO(file.read(place.length))
            return torch.load(stream, map_location="cpu", weights_only=True)

    def fill(self, index: Any, slices: tuple[slice, ...], target: torch.Tensor) -> None:
        """Copy a block of a chunk; only its bytes are read.

        Args:
            index: DCP's name of the chunk.
            slices: one for each dim.
            target: a tensor of the shape of the block and the dtype of the chunk.

        Raises:
            CheckpointError: the file is damaged.
        """
        path, _ = self._place(index)
        with _readable(path):
            raw, signs = self._chunk(index)
        target.unsqueeze(-1).view(torch.uint8).copy_(raw[slices])
        if signs.get("conj"):
            target.conj_physical_()
        if signs.get("neg"):
            target.neg_()

    def _place(self, index: Any) -> tuple[str, Any]:
        """The file of an item, and its place there."""
        place = self.metadata.storage_data[index]
        return os.path.join(self.folder, place.relative_path), place

    def _chunk(self, index: Any) -> tuple[torch.Tensor, dict[str, bool]]:
        """The bytes of a chunk, which has a dim more for those of an element, and whether its
        values are their conjugates ("conj") or their negatives ("neg").
        """
        from torch.distributed.checkpoint.utils import _create_file_view

        path, place = self._place(index)
        with open(path, "rb") as file:
            view: Any = _create_file_view(file, place.offset, place.length)
            archive: Any = torch._C.PyTorchFileReader(view)
            tensor = _Reader(io.BytesIO(archive.get_record("data.pkl"))).load()
            storage, first, shape, strides, *rest = tensor.args
            start = place.offset + archive.get_record_offset(f"data/{storage[2]}")
        (dtype,) = (x for x in (storage[1], *rest) if isinstance(x, torch.dtype))
        entry = self.metadata.state_dict_metadata[index.fqn]
        sizes = next(c.sizes for c in entry.chunks if c.offsets == index.offset)
        if (dtype, shape) != (entry.properties.dtype, sizes):
            raise ValueError(f"{dtype} {shape} in place of {index.fqn}")
        size = dtype.itemsize
        places = [n * size for n in (*sizes_of(strides), *sizes_of([first]))]
        raw = self._bytes(path).as_strided((*sizes, size), (*places[:-1], 1), start + places[-1])
        return raw, next((x for x in rest if isinstance(x, dict)), {})

    def _bytes(self, path: str) -> torch.Tensor:
        """The bytes of a file, which are read where they are used."""
        mapped: Any = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        return torch.empty(0, dtype=torch.uint8).set_(mapped)
