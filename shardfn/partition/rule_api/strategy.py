"""The input of a sharding rule (`OpCall`), and its strategies (`Choice`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from ...types import Mark

# A strategy: how to place an op on ONE mesh axis, with a placement for each tensor input and for
# each tensor output. A placement (d, scale) shards dim d in runs of `scale` elements for each
# element of the sharded factor. "*" for an input: its values are not read.
Choice = tuple[tuple[Mark, ...], tuple[Mark, ...]]


@attrs.frozen(eq=False)
class OpCall:
    """One call of an ATen op on global values."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: tuple[torch.Tensor, ...]  # fake, global, in the order of the arguments
    outs: tuple[torch.Tensor, ...]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the op's schema, or its default. Tensors are fake."""
        arguments = arguments_of(self.target)
        position = next((i for i, a in enumerate(arguments) if a.name == name), None)
        if position is None:
            raise KeyError(
                f"{self.target} has no argument {name!r}, only "
                f"{', '.join(a.name for a in arguments)}"
            )
        return torch.fx.node.map_arg(
            self.arg(position, name, arguments[position].default_value), lambda n: n.meta["val"]
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shape of each tensor input."""
        return tuple(tuple(x.shape) for x in self.ins)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shape of each result."""
        return tuple(tuple(x.shape) for x in self.outs)


def arguments_of(target: Any) -> Any:
    """The arguments of an op, as its schema describes them."""
    return target._schema.arguments


def named(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name."""
    arguments = arguments_of(target)
    values = {a.name: a.default_value for a in arguments}
    names = [a.name for a in arguments]
    given = zip(names, args, strict=False)
    return {**values, **dict(given), **kwargs}


Rule = Callable[[OpCall], list[Choice]]


def arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensor arguments of a node, in order; one that it takes twice is there twice."""
    read: list[torch.fx.Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), read.append)
    return read


def tensors(value: object) -> tuple[torch.Tensor, ...]:
    """The tensors of a result: of a tensor itself, of a tuple its tensors, of None none."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(x for x in several if isinstance(x, torch.Tensor))


def call_of(node: torch.fx.Node) -> OpCall | None:
    """The call of a node. None where an argument or each of its results is no tensor."""
    read = arguments(node)
    ins = tensors([x.meta.get("val") for x in read])
    outs = tensors(node.meta.get("val"))
    if len(ins) != len(read) or not outs:
        return None
    return OpCall(node.target, node.args, dict(node.kwargs), ins, outs)


def replicated(call: OpCall) -> Choice:
    """The strategy with everything replicated. Always correct."""
    return ("R",) * len(call.ins), ("R",) * len(call.outs)


def together(call: OpCall, dims: Any) -> list[Choice]:
    """Every input and output sharded on the same dim, for each of some dims."""
    return [((d,) * len(call.ins), (d,) * len(call.outs)) for d in dims]
