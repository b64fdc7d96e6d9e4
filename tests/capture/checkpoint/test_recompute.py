"""recompute: a joint graph before and after, in text; what is kept of it; and that nothing else
changes.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.checkpoint.recompute import recompute

aten = torch.ops.aten


class Joint:
    """A joint graph, written by hand: inputs x and g, then a line for each op."""

    def __init__(self) -> None:
        self.graph, self.number = torch.fx.Graph(), 0
        self.x, self.g = (self.made(self.graph.placeholder(name), "forward") for name in "xg")

    def made(self, node: torch.fx.Node, phase: str, **noted: Any) -> torch.fx.Node:
        node.meta = {
            "val": torch.empty(2, 2, device="meta"),
            "phase": phase,
            "source": None,
            "custom": {"phase": phase, **noted},
        }
        return node

    def forward(
        self, op: Any, *args: Any, regions: tuple[int, ...] = (), policy: str = "nothing_saveable"
    ) -> torch.fx.Node:
        return self.made(
            self.graph.call_function(op, args),
            "forward",
            **{f"checkpoint={n}": policy for n in regions},
        )

    def backward(
        self, op: Any, *args: Any, inside: tuple[int, ...] | None = None, **noted: Any
    ) -> torch.fx.Node:
        known = {} if inside is None else {"inside": tuple(f"checkpoint={n}" for n in inside)}
        return self.made(self.graph.call_function(op, args), "backward", **known, **noted)

    def out(self, *nodes: torch.fx.Node) -> torch.fx.Graph:
        self.graph.output(list(nodes))
        return self.graph


def text(graph: torch.fx.Graph) -> str:
    """`name = op(arguments)` for each op, with < before those of the backward."""
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "_opname", node.target.__name__)
            mark = "< " if node.meta["phase"] == "backward" else ""
            lines.append(f"{mark}{node.name} = {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


def tower(depth: int) -> torch.fx.Graph:
    j = Joint()
    forward = [j.x]
    for n in range(depth):
        forward += [j.forward(aten.exp.default, forward[-1], regions=(n,))]
        forward += [j.forward(aten.sin.default, forward[-1], regions=(n,))]
    b = j.backward(aten.neg.default, j.g)
    for n in reversed(range(depth)):
        b = j.backward(aten.mul.Tensor, b, forward[2 * n + 1], inside=(n,))
    return j.out(forward[-1], b)


def test_a_tower_of_thousands_of_calls_computes_each_once_more() -> None:
    ops = [
        line.partition("= ")[2].partition("(")[0]
        for line in text(recompute(tower(2000))).split("\n")
    ]
    assert (ops.count("exp"), ops.count("sin"), ops.count("after")) == (4000, 2000, 2000)


def test_a_call_of_thousands_of_ops_is_computed_again_as_one() -> None:
    j = Joint()
    values = [j.x]
    for _ in range(2000):
        values.append(j.forward(aten.exp.default, values[-1], regions=(1,)))
    b = j.backward(aten.mul.Tensor, j.backward(aten.neg.default, j.g), values[-1], inside=(1,))
    assert text(recompute(j.out(values[-1], b))).count("= exp(") == 4000
