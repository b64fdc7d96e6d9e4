"""Reading and writing of safetensors folders in the format of model hubs, shard by shard."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from ... import _compat
from ..._compat.distributed.checkpoint_plans import metadata_of
from ...accepted import accept
from ...byte_sizes import bytes_of
from ...errors import CheckpointError
from ...stored.json_text import parsed
from ...transforms import full
from ...world import current_world
from . import agreed, files
from .contents import listed, named, shape_of, unsaved
from .targets import device_of, empty, placed_leaves, refilled, refuse_without_values

INDEX = "model.safetensors.index.json"
ENDING = ".safetensors"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@attrs.frozen
class Entry:
    """A tensor of a folder: its file and its shape."""

    file: str
    shape: tuple[int, ...]


@_compat.outside_only
def load_safetensors(
    path: str | os.PathLike[str],
    like: Any,
    mesh: Any = None,
    placements: Any = None,
    *,
    strict: bool = True,
) -> Any:
    """Read a folder of safetensors, such as a Hugging Face model. Each rank reads only its shards
    of the tensors.

    Args:
        path: a folder of `.safetensors` files, with their index if there is one.
        like: a dict of tensors, DTensors or `ShapeDtype`s (global shape) by their names in the
            files, or a tree of dicts whose keys, joined with dots, are these names. Values are
            converted to the dtypes of `like`.
        mesh: a DeviceMesh, as in `load`.
        placements: a prefix tree of placements over `like`, as in `load`.
        strict: whether to raise an error if the files have tensors that `like` does not have.

    Returns:
        A tree with the structure of `like`, in newly allocated memory.

    Raises:
        CheckpointError: the files do not exist; tensors are missing, extra or of another shape (the
            error lists all of them); or a file is damaged.
        TreeError, PlacementError: the placements do not fit the tree or the mesh.
        FakeValueError: the simulated world computes no values (`numerics=False`).

    Source: transformers' from_pretrained; torch.distributed.checkpoint's Hugging Face reader.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> with sf.fake_world(2), tempfile.TemporaryDirectory() as folder:
        ...     sf.save_safetensors(folder, {"fc.weight": torch.eye(4)})
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     like = {"fc.weight": sf.ShapeDtype((4, 4), torch.float64)}
        ...     x = sf.load_safetensors(folder, like, mesh, sf.P("dp"))["fc.weight"]
        ...     x.to_local().shape, x.dtype
        (torch.Size([2, 4]), torch.float64)
    """
    accept("load_safetensors", path=path, strict=strict)
    refuse_without_values("load_safetensors")
    placed = placed_leaves("load_safetensors", like, mesh, placements)
    leaves = named("load_safetensors", like)
    folder = os.path.abspath(os.fspath(path))
    opened = files.Files(folder)
    entries = _entries(opened)
    _check(folder, leaves, entries, strict)
    targets = {
        name: empty(tuple(x.shape), x.dtype, device_of(x), placed[name])
        for name, x in leaves.items()
    }

    def fill(index: Any, slices: tuple[slice, ...], target: torch.Tensor) -> None:
        target.copy_(opened.block(entries[index.fqn].file, index.fqn, slices))

    agreed.read("load_safetensors", targets, metadata_of(targets), fill)
    return refilled(like, targets)


def _entries(opened: files.Files) -> dict[str, Entry]:
    """The tensors of a folder by name.

    Raises:
        CheckpointError: it has none, or one of its files cannot be read; two files have a
            tensor of one name.
    """
    out: dict[str, Entry] = {}
    wrong: list[str] = []
    for file in _files(opened.folder):
        for name, shape in opened.shapes(file).items():
            if name in out:
                wrong.append(f"{name}: in {out[name].file} and in {file}")
            out[name] = Entry(file, shape)
    if wrong:
        got = f"{opened.folder} has tensors twice"
        fix = f"give a folder with the files of one model, or with their {INDEX}"
        raise CheckpointError.of("load_safetensors", got, *listed(wrong), fix=fix)
    return out


def _files(folder: str) -> list[str]:
    """The files of a folder: those of its index, or all.

    Raises:
        CheckpointError: it has no index and no files, or an index that cannot be read.
    """
    index = os.path.join(folder, INDEX)
    try:
        if os.path.isfile(index):
            with open(index, encoding="utf-8") as file:
                names = sorted(set(parsed(file.read())["weight_map"].values()))
            if any(os.path.basename(name) != name for name in names):
                raise ValueError("the index names files outside of the folder")
            return names
        names = sorted(name for name in os.listdir(folder) if name.endswith(ENDING))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{index if os.path.isfile(index) else folder} cannot be read"
        raise CheckpointError.of("load_safetensors", got, str(error)) from None
    if not names:
        got = f"{folder} has no {ENDING} files"
        raise CheckpointError.of("load_safetensors", got, fix="use another folder")
    return names


def _check(
    folder: str, leaves: Mapping[str, Any], entries: Mapping[str, Entry], strict: bool
) -> None:
    """Check that a folder holds the tensors of a tree.

    Raises:
        CheckpointError: it does not; all mismatches.
    """
    wrong = [
        f"{name}: the tree has a {type(x).__name__} in place of a tensor"
        for name, x in leaves.items()
        if shape_of(x) is None
    ]
    wrong += [
        f"{name}: in the given tree, but not in the files" for name in leaves if name not in entries
    ]
    extra = [name for name in entries if name not in leaves] if strict else []
    wrong += [f"{name}: in the files, but not in the given tree" for name in extra]
    for name, x in leaves.items():
        shape = shape_of(x)
        if name in entries and shape and shape[0] != entries[name].shape:
            wrong.append(f"{name}: {entries[name].shape} in the files, {shape[0]} in the tree")
    if wrong:
        fix = (
            "pass a tree with the names in the files; strict=False ignores other names in the files"
        )
        raise CheckpointError.of(
            "load_safetensors", f"{folder} holds other tensors", *listed(wrong), fix=fix
        )


@_compat.outside_only
def save_safetensors(
    path: str | os.PathLike[str], tree: Any, *, max_bytes: int | str = "5GB"
) -> None:
    """Write tensors as a folder of safetensors, which `from_pretrained` of Hugging Face can read.

    `save_safetensors` unshards one tensor after the other, and one rank writes all files, with only
    one file in memory at a time. Older `model*.safetensors` files in the folder that are not part
    of the model are deleted.

    Args:
        path: the folder, which is created if it does not exist.
        tree: a dict of tensors or DTensors by name, or a tree of dicts whose keys, joined with
            dots, are the names.
        max_bytes: the largest size of a file, in bytes or as text such as "5GB". A tensor that is
            larger than `max_bytes` gets a file of its own.

    Raises:
        CheckpointError: a leaf is not a tensor, or the folder cannot be written.
        FakeValueError: the simulated world computes no values (`numerics=False`).

    Source: transformers' save_pretrained.

    Example:
        >>> import os, tempfile, torch, shardfn as sf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sf.save_safetensors(folder, {"fc.weight": torch.eye(4)})
        ...     os.listdir(folder)
        ['model.safetensors']
    """
    accept("save_safetensors", path=path, max_bytes=max_bytes)
    refuse_without_values("save_safetensors")
    leaves = named("save_safetensors", tree)
    wrong = [line for name, x in leaves.items() for line in _unsaved(name, x)]
    if wrong:
        raise CheckpointError.of("save_safetensors", *listed(wrong), needed="tensors and DTensors")
    groups = _groups(leaves, bytes_of(max_bytes))
    folder = os.path.abspath(os.fspath(path))
    world = current_world()
    is_writer = world.kind == "simulated" or world.rank == 0
    names = [_file(i, len(groups)) for i in range(len(groups))]
    try:
        for file, group in zip(names, groups, strict=True):
            tensors = {name: full(leaves[name].detach()) for name in group}
            if is_writer:
                os.makedirs(folder, exist_ok=True)
                files.write(os.path.join(folder, file), tensors)
        if is_writer and len(groups) > 1:
            _write_index(folder, leaves, dict(zip(names, groups, strict=True)))
        if is_writer:
            _remove_others(folder, names)
    except OSError as error:
        got = f"{folder} cannot be written"
        fix = "free disk space, or use another folder"
        raise CheckpointError.of("save_safetensors", got, str(error), fix=fix) from None


def _unsaved(name: str, x: Any) -> list[str]:
    """Why a leaf cannot be written; empty if it can."""
    if not isinstance(x, torch.Tensor):
        return [f"{name} is a {type(x).__name__}"]
    if x.dtype.is_complex:
        return [f"{name} is {x.dtype}, but the file format has no complex numbers"]
    return unsaved(name, x)


def _remove_others(folder: str, names: list[str]) -> None:
    """Remove what an earlier call has written of a model of more or fewer files."""
    for name in os.listdir(folder):
        is_ours = OURS.fullmatch(name) is not None
        is_stale = is_ours and name not in names
        is_index = name == INDEX and len(names) == 1
        if is_stale or is_index:
            os.remove(os.path.join(folder, name))


def _groups(leaves: Mapping[str, torch.Tensor], most: int) -> list[list[str]]:
    """The names of the tensors of each file."""
    out: list[list[str]] = [[]]
    size = 0
    for name, x in leaves.items():
        nbytes = x.numel() * x.element_size()
        if out[-1] and size + nbytes > most:
            out.append([])
            size = 0
        out[-1].append(name)
        size += nbytes
    return out


def _file(number: int, count: int) -> str:
    if count == 1:
        return f"model{ENDING}"
    return f"model-{number + 1:05d}-of-{count:05d}{ENDING}"


def _write_index(
    folder: str, leaves: Mapping[str, torch.Tensor], groups: Mapping[str, list[str]]
) -> None:
    total = sum(x.numel() * x.element_size() for x in leaves.values())
    where = {name: file for file, group in groups.items() for name in group}
    text = {"metadata": {"total_size": total}, "weight_map": where}
    with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as file:
        json.dump(text, file, indent=2)
