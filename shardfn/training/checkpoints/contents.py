"""The leaves of a tree by name, and what a checkpoint holds of them: tensors, and constants as
JSON.

An object with `state_dict` and `load_state_dict`, such as a scheduler, is a leaf. Its state is a
constant that names the tensors in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ... import _compat, _tree
from ...eager.checkpoint import has_gaps
from ...errors import CheckpointError
from ...types import ShapeDtype

MOST_LINES = 20  # of one error
CONSTANTS = (int, float, str, bool, type(None))


@attrs.frozen
class Contents:
    """The tensors and constants of a tree.

    Args:
        tensors: by name.
        constants: JSON by name.
    """

    tensors: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]


def named(where: str, tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, such as `params.w1`.

    Raises:
        CheckpointError: two leaves have one name.
    """
    _tree.learn(tree)
    _tree.learn_registered(tree)
    leaves = _tree.named_leaves(tree)
    names = [name for name, _ in leaves]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        got = [f"two leaves are called {name}" for name in twice]
        fix = "keys without a dot, where dicts are nested"
        raise CheckpointError.of(where, *got, fix=fix)
    return dict(leaves)


def listed(mismatches: list[str]) -> list[str]:
    """Mismatches as the lines of an error, which does not list more than fit on a page."""
    more = len(mismatches) - MOST_LINES
    rest = [f"and {more} more"] if more > 0 else []
    return mismatches[:MOST_LINES] + rest


def is_stateful(x: Any) -> bool:
    """Whether a leaf saves and loads its state by itself."""
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def contents(tree: Any) -> Contents:
    """The tensors and constants of a tree.

    Raises:
        CheckpointError: a leaf that is neither a tensor, a constant nor an object with a state;
            a placement that cannot be saved.
    """
    tensors: dict[str, torch.Tensor] = {}
    constants: dict[str, Any] = {}
    wrong: list[str] = []
    for name, x in named("save", tree).items():
        if isinstance(x, torch.Tensor):
            wrong += unsaved(name, x)
            _add(tensors, name, x)
        elif is_stateful(x):
            constants[name] = {"state": _skeleton(name, x.state_dict(), tensors)}
        elif isinstance(x, CONSTANTS):
            constants[name] = {"value": x}
        else:
            wrong.append(f"{name} is a {type(x).__name__}")
    if wrong:
        needed = (
            "tensors, sharded or replicated, numbers, text, None, or objects with "
            "state_dict and load_state_dict"
        )
        raise CheckpointError.of("save", *wrong, needed=needed)
    return Contents(tensors, constants)


def unsaved(name: str, x: torch.Tensor) -> list[str]:
    """Why a tensor cannot be saved; empty if it can."""
    kinds = {
        "is on the meta device, without values": x.is_meta,
        f"is {x.layout}": x.layout is not torch.strided,
        f"is quantized, {x.dtype}": x.is_quantized,
    }
    wrong = [f"{name} {kind}" for kind, is_one in kinds.items() if is_one]
    placements = _unsaved_placements(x) if isinstance(x, DTensor) else []
    return wrong + [f"{name} is placed as {p}" for p in placements]


def _unsaved_placements(x: DTensor) -> list[Placement]:
    """The placements with which a DTensor cannot be saved."""
    strange = [p for p in x.placements if type(p) not in (Shard, Replicate)]
    are_strided = all(map(_compat.split_factor, strange))
    is_saved = not strange or (are_strided and not has_gaps(x))
    return [] if is_saved else strange


def _add(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> None:
    """Add a tensor to those of a checkpoint.

    Raises:
        CheckpointError: there is one of this name.
    """
    if name in tensors:
        got = f"two tensors are called {name}"
        fix = "keys without a dot, where dicts are nested"
        raise CheckpointError.of("save", got, fix=fix)
    tensors[name] = x.detach()


def _skeleton(path: str, x: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """An object's state as JSON; its tensors are added to those of the checkpoint.

    Raises:
        CheckpointError: a part that is not a dict, a list, a tuple, a plain tensor or a constant;
            a name that another tensor has.
    """
    if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
        if wrong := unsaved(path, x):
            raise CheckpointError.of("save", *wrong, needed="strided tensors")
        _add(tensors, path, x)
        return {"tensor": path}
    if isinstance(x, dict) and all(type(key) in (str, int) for key in x):
        return {
            "dict": [[key, _skeleton(f"{path}.{key}", part, tensors)] for key, part in x.items()]
        }
    if type(x) in (list, tuple):
        kind = type(x).__name__
        parts = enumerate(x)
        return {kind: [_skeleton(f"{path}.{i}", p, tensors) for i, p in parts]}
    if isinstance(x, CONSTANTS):
        return {"value": x}
    needed = "dicts with keys of text or numbers, lists, tuples, plain tensors, constants"
    fix = "sf.optim, whose state is a tree, for an optimizer of DTensors"
    got = f"{path}, in an object's state, is a {type(x).__name__}"
    raise CheckpointError.of("save", got, needed=needed, fix=fix)


def state_names(skeleton: Any) -> list[str]:
    """The names of the tensors in an object's state."""
    ((kind, x),) = skeleton.items()
    if kind == "tensor":
        return [x]
    parts = {"dict": lambda: [part for _, part in x], "value": list}
    children = parts.get(kind, lambda: x)()
    return [name for part in children for name in state_names(part)]


def rebuilt(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """An object's state from JSON and the tensors that it names."""
    ((kind, x),) = skeleton.items()
    return REBUILD[kind](x, tensors)


REBUILD = {
    "tensor": lambda name, tensors: tensors[name],
    "value": lambda value, _: value,
    "list": lambda parts, tensors: [rebuilt(part, tensors) for part in parts],
    "tuple": lambda parts, tensors: tuple(rebuilt(part, tensors) for part in parts),
    "dict": lambda parts, tensors: {key: rebuilt(part, tensors) for key, part in parts},
}


def shape_of(x: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """The global shape and dtype of a leaf that stands for a tensor."""
    is_tensor = isinstance(x, torch.Tensor | ShapeDtype)
    return (tuple(x.shape), x.dtype) if is_tensor else None
