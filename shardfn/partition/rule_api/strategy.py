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
        arguments = self.target._schema.arguments
        position = next(
            (i for i, a in enumerate(arguments) if a.name == name), None
        )
        if position is None:
            raise KeyError(
                f"{self.target} has no argument {name!r}, only "
                f"{', '.join(a.name for a in arguments)}"
            )
        return torch.fx.node.map_arg(
            self.arg(position, name, arguments[position].default_value),
            lambda n: n.meta["val"],
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shape of each tensor input."""
        return tuple(tuple(x.shape) for x in self.ins)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shape of each result."""
        return tuple(tuple(x.shape) for x in self.outs)


Rule = Callable[[OpCall], list[Choice]]


def replicated(call: OpCall) -> Choice:
    """The strategy with everything replicated. Always correct."""
    return ("R",) * len(call.ins), ("R",) * len(call.outs)


def together(call: OpCall, dims: Any) -> list[Choice]:
    """Every input and output sharded on the same dim, for each of some dims."""
    return [((d,) * len(call.ins), (d,) * len(call.outs)) for d in dims]
