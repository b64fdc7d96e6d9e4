"""The placements of an optimizer's state, which follow from those of the parameters."""

from __future__ import annotations

from typing import Any

import torch

from ... import _tree
from ...errors import TreeError
from ...placement import P, is_spec
from ...tree_pairs import broadcast_prefix
from ...types import ShapeDtype
from .step import Step
from .trees import dotted_paths


def placed_like(name: str, step: Step, placements: Any, params: Any) -> dict[str, Any]:
    """The placements of a state: a `P` for each of its tensors.

    Raises:
        TreeError: placements that are not a prefix of the parameters, or other than `P`s.
    """
    leaves = _tree.leaves(params)
    try:
        specs = broadcast_prefix(placements, params, is_spec)
    except ValueError as error:
        raise refused_placements(name, list(map(str, error.args))) from error
    strange = [repr(x) for x in specs if not (x is None or isinstance(x, P))]
    if strange:
        raise refused_placements(name, [f"{text} is not a P" for text in strange])
    others = [repr(x) for x in leaves if not isinstance(x, torch.Tensor | ShapeDtype)]
    if others:
        raise TreeError.of(
            f"{name}.state_placements",
            *[f"a parameter is {text}" for text in others],
            needed="tensors or ShapeDtypes",
            fix="pass the params that init takes",
            arg_path="params",
        )
    shapes = [(tuple(x.shape), x.dtype) for x in leaves]
    stand_ins = [torch.empty((), device="meta") for _ in leaves]
    like = _tree.unflatten(_tree.flatten(params)[1], stand_ins)
    state = step.shapes(dotted_paths(like), shapes)
    return {
        path: {key: like_parameter(spec, x, entry) for key, entry in own.items()}
        for (path, own), spec, x in zip(state.items(), specs, leaves, strict=True)
    }


def refused_placements(name: str, lines: list[str]) -> TreeError:
    """The error for placements that do not fit."""
    return TreeError.of(
        f"{name}.state_placements",
        *lines,
        needed="a prefix tree whose leaves are P",
        fix="pass the in_placements of the parameters",
        arg_path="placements",
    )


def like_parameter(spec: P | None, param: Any, entry: Any) -> P:
    """The placement of a state's tensor: of each dim of the parameter's size, and its stage."""
    if spec is None or len(entry.shape) != len(param.shape):
        return P()
    parts = [
        part if entry.shape[dim] == param.shape[dim] else None
        for dim, part in enumerate(spec.parts)
    ]
    return P(*parts, **spec.stages)
