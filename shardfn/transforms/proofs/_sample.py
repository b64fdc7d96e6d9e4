"""A sample call of an op, with its true results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import _compat
from ...errors import RuleError
from ...partition.rule_api.check_strategies import strategies_of
from ...partition.rule_api.strategy import Choice, OpCall, Rule
from ...types import TENSOR


class Sample:
    """One call of an op as rules see it, with its true results.

    Raises:
        RuleError: the op does not run on such arguments, or has no fake implementation.
    """

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mode = _compat.FakeTensorMode()
        self.tensors: list[torch.Tensor] = []
        self.graph = torch.fx.Graph()
        replaced = mapped((args, kwargs), self._holder)
        self.node = self.graph.call_function(target, *replaced)
        fake = torch.fx.node.map_arg(replaced, lambda n: n.meta["val"])
        try:
            with torch.no_grad():
                self.results = tensors_of(target(*args, **kwargs))
            with self.mode:
                self.node.meta.update(val=target(*fake[0], **fake[1]), phase="forward", source=None)
        except Exception as error:
            fix = (
                "give arguments that the op accepts, and a fake implementation by "
                "torch.library.register_fake"
            )
            first = str(error).strip().split("\n", maxsplit=1)[0]
            raise RuleError.of(
                f"rule({target}), example", f"the op fails on the example: {first}", fix=fix
            ) from error
        ins = tuple(n.meta["val"] for n in self.graph.find_nodes(op="placeholder"))
        self.call = OpCall(
            target,
            self.node.args,
            dict(self.node.kwargs),
            ins,
            tuple(tensors_of(self.node.meta["val"])),
        )

    def choices(self, rule: Rule) -> list[Choice]:
        """Ask a sharding rule for its strategies on this sample call."""
        return strategies_of(rule, self.call, f"rule({self.call.target})", self.node)

    def _holder(self, x: torch.Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{len(self.tensors)}")
        node.meta["val"] = self.mode.from_tensor(x)
        self.tensors.append(x.detach())
        return node


def tensors_of(result: Any) -> list[torch.Tensor]:
    return (
        [result]
        if isinstance(result, torch.Tensor)
        else [r for r in result if isinstance(r, torch.Tensor)]
    )


def mapped(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Map a function over the tensors in an op's arguments."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([mapped(x, fn) for x in tree])
    return {k: mapped(x, fn) for k, x in tree.items()} if isinstance(tree, dict) else tree


def filled(tree: Any, feed: Iterator[torch.Tensor]) -> Any:
    """Fill the TENSOR slots of an op's arguments from an iterator of tensors."""
    if tree is TENSOR:
        return next(feed)
    if isinstance(tree, tuple | list):
        return type(tree)([filled(x, feed) for x in tree])
    return {k: filled(x, feed) for k, x in tree.items()} if isinstance(tree, dict) else tree
