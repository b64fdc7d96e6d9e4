"""The leaves of a tree by name, and what a checkpoint holds of them: tensors and other values.

An object with `state_dict` and `load_state_dict`, such as a scheduler, is a leaf. Its state is a
value, with tensors on the meta device for the tensors in it, which have names of their own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ... import _compat, _tree
from ...eager.checkpoint import has_gaps
from ...errors import CheckpointError
from ...placement import Stage, Zigzag
from ...types import ShapeDtype

MOST_LINES = 20  # of one error
CONSTANTS = (int, float, str, bool, type(None))


def named(where: str, tree: Any) -> dict[str, Any]:
    """Flatten a tree into leaves by dotted name, such as `params.w1`.

    Raises:
        CheckpointError: two leaves have one name.
    """
    _tree.learn(tree)
    _tree.learn_registered(tree)
    leaves = _tree.named_leaves(tree)
    names = [name for name, _ in leaves]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        got = [f"two leaves are called {name}" for name in twice]
        fix = "use keys without a dot in nested dicts"
        raise CheckpointError.of(where, *got, fix=fix)
    return dict(leaves)


def listed(mismatches: list[str]) -> list[str]:
    """Limit a list of mismatches to what fits on a page."""
    more = len(mismatches) - MOST_LINES
    rest = [f"and {more} more"] if more > 0 else []
    return mismatches[:MOST_LINES] + rest


def is_stateful(x: Any) -> bool:
    """Return whether a leaf has `state_dict` and `load_state_dict`."""
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def contents(tree: Any) -> dict[str, Any]:
    """Flatten a tree into the tensors and other values that a checkpoint holds, by name.

    Raises:
        CheckpointError: a leaf that is neither a tensor, a constant nor an object with a state;
            a placement that cannot be saved; two leaves of one name.
    """
    out: dict[str, Any] = {}
    wrong: list[str] = []
    for name, x in named("save", tree).items():
        if isinstance(x, torch.Tensor):
            wrong += unsaved(name, x)
            _add(out, name, x.detach())
        elif is_stateful(x):
            state = x.state_dict()
            if isinstance(state, CONSTANTS):
                wrong.append(f"the state_dict of {name} must be a dict; got {state!r}")
                continue
            _add(out, name, _state(name, state, out))
        elif isinstance(x, CONSTANTS):
            _add(out, name, _plain(x))
        else:
            wrong.append(f"{name} is a {type(x).__name__}")
    if wrong:
        needed = (
            "tensors (sharded, replicated or on a pipeline stage), numbers, text, None, or "
            "objects with state_dict and load_state_dict"
        )
        raise CheckpointError.of("save", *wrong, needed=needed)
    return out


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Select the tensors of a checkpoint's contents."""
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}


def _plain(x: Any) -> Any:
    """Turn a constant into Python's own type: numpy's float64, an enum of ints."""
    return json.loads(json.dumps(x))


def unsaved(name: str, x: torch.Tensor) -> list[str]:
    """Say why a tensor cannot be saved; [] if it can."""
    kinds = {
        "is on the meta device, without values": x.is_meta,
        f"is {x.layout}": x.layout is not torch.strided,
        f"is quantized, {x.dtype}": x.is_quantized,
    }
    wrong = [f"{name} {kind}" for kind, is_one in kinds.items() if is_one]
    placements = _unsaved_placements(x) if isinstance(x, DTensor) else []
    return wrong + [f"{name} is placed as {p}" for p in placements]


def _unsaved_placements(x: DTensor) -> list[Placement]:
    """List the placements with which a DTensor cannot be saved."""
    strange = [p for p in x.placements if type(p) not in (Shard, Replicate, Stage, Zigzag)]
    are_strided = all(map(_compat.split_factor, strange))
    is_saved = not strange or (are_strided and not has_gaps(x))
    return [] if is_saved else strange


def _add(state: dict[str, Any], name: str, x: Any) -> None:
    """Add a tensor or a value to those of a checkpoint.

    Raises:
        CheckpointError: there is one of this name.
    """
    if name in state:
        kind = "tensors" if isinstance(x, torch.Tensor) else "values"
        fix = "use keys without a dot in nested dicts"
        raise CheckpointError.of("save", f"two {kind} are called {name}", fix=fix)
    state[name] = x


def _state(path: str, state: Any, out: dict[str, Any]) -> Any:
    """Move the tensors out of an object's state, and return the rest.

    Raises:
        CheckpointError: a part that is not a dict, a list, a tuple, a plain tensor or a constant;
            a name that another tensor has.
    """

    def saved(name: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            if wrong := unsaved(name, x):
                raise CheckpointError.of("save", *wrong, needed="dense (strided) tensors")
            _add(out, name, x.detach())
            return torch.empty_like(x, device="meta")
        if isinstance(x, CONSTANTS):
            return _plain(x)
        needed = "dicts with keys of text or numbers, lists, tuples, plain tensors, constants"
        fix = "use sf.optim, whose state is a tree, in place of an optimizer of DTensors"
        got = f"{name}, in an object's state, is a {type(x).__name__}"
        raise CheckpointError.of("save", got, needed=needed, fix=fix)

    return replaced(path, state, saved)


def replaced(path: str, x: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """Map a function over the leaves of an object's state.

    Args:
        path: its name.
        x: the state, or a part of it: dicts, lists and tuples of leaves.
        leaf: makes the other value from a name and a leaf.
    """
    if isinstance(x, dict) and all(type(key) in (str, int) for key in x):
        return {key: replaced(f"{path}.{key}", part, leaf) for key, part in x.items()}
    if type(x) in (list, tuple):
        return type(x)(replaced(f"{path}.{i}", part, leaf) for i, part in enumerate(x))
    return leaf(path, x)


def names_in(path: str, state: Any) -> list[str]:
    """List the names of the tensors in an object's saved state."""
    names: list[str] = []
    replaced(path, state, lambda name, x: names.append(name) if is_away(x) else None)
    return names


def is_away(x: Any) -> bool:
    """Return whether a leaf of an object's state stands for a tensor of the checkpoint."""
    return isinstance(x, torch.Tensor) and x.is_meta


def shape_of(x: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the global shape and dtype of a leaf that stands for a tensor; None for
    other leaves.
    """
    is_tensor = isinstance(x, torch.Tensor | ShapeDtype)
    return (tuple(x.shape), x.dtype) if is_tensor else None
