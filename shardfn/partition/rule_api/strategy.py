"""The input of a sharding rule (`OpCall`), and its strategies (`Choice`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from ...types import AxisPlacement

# A strategy: how to place an op on ONE mesh axis, with a placement for each tensor input and for
# each tensor output. A placement (d, scale) shards dim d in runs of `scale` elements for each
# element of the sharded factor. "*" for an input: its values are not read.
Choice = tuple[tuple[AxisPlacement, ...], tuple[AxisPlacement, ...]]


@attrs.frozen(eq=False)
class OpCall:
    """One call of an ATen op on global values: the input of a sharding rule."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: tuple[torch.Tensor, ...]  # fake, global, in the order of the arguments
    outs: tuple[torch.Tensor, ...]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its schema name, or its default; tensors are fake."""
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
        """The global shapes of the tensor inputs."""
        return tuple(tuple(x.shape) for x in self.ins)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shapes of the results."""
        return tuple(tuple(x.shape) for x in self.outs)


def arguments_of(target: Any) -> Any:
    """Return the arguments in an op's schema."""
    return target._schema.arguments


def named(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by schema name, defaults included."""
    arguments = arguments_of(target)
    values = {a.name: a.default_value for a in arguments}
    names = [a.name for a in arguments]
    given = zip(names, args, strict=False)
    return {**values, **dict(given), **kwargs}


Rule = Callable[[OpCall], list[Choice]]


def arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """List the tensor arguments of a node, in order, with repetitions."""
    read: list[torch.fx.Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), read.append)
    return read


def tensors(value: object) -> tuple[torch.Tensor, ...]:
    """List the tensors of a result."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(x for x in several if isinstance(x, torch.Tensor))


def call_of(node: torch.fx.Node) -> OpCall | None:
    """Make the OpCall of a node; None if it is not an op of tensors."""
    read = arguments(node)
    ins = tensors([x.meta.get("val") for x in read])
    outs = tensors(node.meta.get("val"))
    if len(ins) != len(read) or not outs:
        return None
    return OpCall(node.target, node.args, dict(node.kwargs), ins, outs)


def replicated(call: OpCall) -> Choice:
    """Return the strategy that replicates everything, which is always correct."""
    return ("R",) * len(call.ins), ("R",) * len(call.outs)


def together(call: OpCall, dims: Any) -> list[Choice]:
    """List the strategies that shard all inputs and results on the same dim."""
    return [((d,) * len(call.ins), (d,) * len(call.outs)) for d in dims]
