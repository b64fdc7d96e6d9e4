"""The inputs of a capture: fake tensors for the tensor arguments. Objects are closed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import _compat, _tree
from ..types import CONSTANTS, ShapeDtype
from .reading import objects
from .rewrites import strides


class Inputs(NamedTuple):
    """The inputs of the capture of a function."""

    name: str  # of the function
    leaves: list[Any]  # of (args, kwargs)
    treedef: _tree.TreeDef
    fakes: list[Any]  # the leaves, with fake tensors for tensors
    tensor_paths: list[str]
    paths: list[str]  # of the leaves

    @classmethod
    def like(
        cls,
        args: Any,
        kwargs: Any,
        paths: list[str],
        device: str,
        mode: _compat.FakeTensorMode,
        name: str,
    ) -> Inputs:
        """The inputs for arguments like these.

        Raises:
            CaptureError: a tensor without strides.
        """
        leaves, treedef = _tree.flatten((args, kwargs))
        strides.refuse_unstrided(name, leaves, paths)
        fakes = [_fake(mode, leaf, device) for leaf in leaves]
        pairs = zip(paths, fakes, strict=True)
        tensor_paths = [p for p, x in pairs if isinstance(x, torch.Tensor)]
        return cls(name, leaves, treedef, fakes, tensor_paths, paths)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The fake tensors."""
        return [x for x in self.fakes if isinstance(x, torch.Tensor)]

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The path of each tensor, and its fake tensor."""
        return list(zip(self.tensor_paths, self.tensors, strict=True))

    @property
    def tensor_names(self) -> dict[int, str]:
        """The paths of the tensors, by leaf."""
        pairs = enumerate(zip(self.paths, self.fakes, strict=True))
        return {i: path for i, (path, x) in pairs if isinstance(x, torch.Tensor)}

    @property
    def positional(self) -> Any:
        """(args, kwargs), of fake tensors, with a row in place of each object."""
        return objects.opened(_tree.unflatten(self.treedef, self.fakes))[0]

    @property
    def objects(self) -> Any:
        """How `objects.made` makes these objects."""
        return objects.opened(_tree.unflatten(self.treedef, self.fakes))[1]


def _fake(mode: _compat.FakeTensorMode, leaf: Any, device: str) -> Any:
    if isinstance(leaf, ShapeDtype):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    place = device if leaf.is_meta else leaf.device
    with mode:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=place)


def holding(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """A function that closes over its object arguments, since Dynamo accepts objects only
    there.
    """
    odd = {i: x for i, x in enumerate(args) if _is_object(x)}
    named = {key: x for key, x in kwargs.items() if _is_object(x)}
    if not odd and not named:
        return fn, args, kwargs

    def held(*given: Any, **others: Any) -> Any:
        return fn(*[odd.get(i, x) for i, x in enumerate(given)], **{**others, **named})

    return (
        held,
        tuple(None if i in odd else x for i, x in enumerate(args)),
        {**kwargs, **dict.fromkeys(named)},
    )


def _is_object(x: Any) -> bool:
    (leaf, *more), _ = _tree.flatten((x, None))
    return (
        leaf is x and len(more) == 1 and not isinstance(x, (torch.Tensor, ShapeDtype, *CONSTANTS))
    )
