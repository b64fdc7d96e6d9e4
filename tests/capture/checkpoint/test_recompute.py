"""recompute: a joint graph before and after, in text; what is kept of it; and that nothing else
changes.
"""

from __future__ import annotations

import operator
import textwrap
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.checkpoint.recompute import recompute, residuals
from shardfn.ops import placement

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


def same(graph: torch.fx.Graph, wanted: str) -> None:
    assert text(graph) == textwrap.dedent(wanted).strip()


def chain(policy: str = "nothing_saveable") -> torch.fx.Graph:
    """sin(exp(x)) in a checkpointed call, times g, and its backward; the call's results are
    read outside too.
    """
    j = Joint()
    e = j.forward(aten.exp.default, j.x, regions=(1,), policy=policy)
    s = j.forward(aten.sin.default, e, regions=(1,), policy=policy)
    m = j.forward(aten.mul.Tensor, s, j.g)
    b = j.backward(aten.mul.Tensor, m, s, inside=())
    c = j.backward(aten.cos.default, e, inside=(1,))
    d = j.backward(aten.mul.Tensor, b, c, inside=(1,))
    return j.out(j.backward(aten.mul.Tensor, d, e, inside=(1,)))


def test_what_is_lost_is_computed_before_its_first_reader_from_what_went_in() -> None:
    same(recompute(chain()), """
        exp_default = exp(x)
        sin_default = sin(exp_default)
        mul_tensor = mul(sin_default, g)
        < mul_tensor_1 = mul(mul_tensor, sin_default)
        < after_default = after(x, mul_tensor_1)
        < exp_default_1 = exp(after_default)
        < cos_default = cos(exp_default_1)
        < mul_tensor_2 = mul(mul_tensor_1, cos_default)
        < mul_tensor_3 = mul(mul_tensor_2, exp_default_1)
    """)  # fmt: skip


def test_a_policy_that_keeps_everything_leaves_the_graph_as_it_is() -> None:
    assert text(recompute(chain("everything_saveable"))) == text(chain())


def test_the_graph_that_is_given_is_not_changed() -> None:
    graph = chain()
    before, metas = text(graph), [dict(n.meta) for n in graph.nodes]
    recompute(graph)
    assert text(graph) == before and [n.meta for n in graph.nodes] == metas


def test_once_recomputed_a_graph_stays_as_it_is() -> None:
    once = recompute(chain())
    assert text(recompute(once)) == text(once)


def test_copies_know_their_value_phase_and_line() -> None:
    graph = chain()
    next(n for n in graph.nodes if n.name == "exp_default").meta["source"] = "model.py:3"
    copy = next(n for n in recompute(graph).nodes if n.name == "exp_default_1")
    assert (copy.meta["phase"], copy.meta["source"], tuple(copy.meta["val"].shape)) == (
        "backward",
        "model.py:3",
        (2, 2),
    )
    assert "checkpoint=1" not in copy.meta["custom"]


def test_kept_values_are_read_behind_the_barrier_too() -> None:
    j = Joint()
    m = j.forward(aten.mm.default, j.x, j.x, regions=(1,), policy="dots_saveable")
    t = j.forward(aten.tanh.default, m, regions=(1,), policy="dots_saveable")
    b = j.backward(aten.mul.Tensor, t, j.g, inside=(1,))
    same(
        recompute(j.out(t, j.backward(aten.mul.Tensor, b, m, inside=(1,)))),
        """
        mm_default = mm(x, x)
        tanh_default = tanh(mm_default)
        < tanh_default_1 = tanh(mm_default)
        < mul_tensor = mul(tanh_default_1, g)
        < mul_tensor_1 = mul(mul_tensor, mm_default)
    """,
    )  # fmt: skip  there is nothing of the backward yet to wait for
    j = Joint()
    m = j.forward(aten.mm.default, j.x, j.x, regions=(1,), policy="dots_saveable")
    t = j.forward(aten.tanh.default, m, regions=(1,), policy="dots_saveable")
    a = j.backward(aten.neg.default, j.g, inside=())
    b = j.backward(aten.mul.Tensor, t, a, inside=(1,))
    same(recompute(j.out(t, j.backward(aten.mul.Tensor, b, m, inside=(1,)))), """
        mm_default = mm(x, x)
        tanh_default = tanh(mm_default)
        < neg_default = neg(g)
        < after_default = after(mm_default, neg_default)
        < tanh_default_1 = tanh(after_default)
        < mul_tensor = mul(tanh_default_1, neg_default)
        < mul_tensor_1 = mul(mul_tensor, after_default)
    """)  # fmt: skip


def test_what_the_next_call_reads_is_kept_for_it_and_not_made_by_the_one_before() -> None:
    j = Joint()
    one = j.forward(aten.exp.default, j.x, regions=(1,))
    two = j.forward(aten.exp.default, one, regions=(2,))
    b = j.backward(aten.neg.default, j.g)
    b = j.backward(aten.mul.Tensor, b, two, inside=(2,))
    b = j.backward(aten.mul.Tensor, b, one, inside=(2,))
    same(recompute(j.out(two, j.backward(aten.mul.Tensor, b, one, inside=(1,)))), """
        exp_default = exp(x)
        exp_default_1 = exp(exp_default)
        < neg_default = neg(g)
        < after_default = after(exp_default, neg_default)
        < exp_default_2 = exp(after_default)
        < mul_tensor = mul(neg_default, exp_default_2)
        < mul_tensor_1 = mul(mul_tensor, after_default)
        < after_default_1 = after(x, mul_tensor_1)
        < exp_default_3 = exp(after_default_1)
        < mul_tensor_2 = mul(mul_tensor_1, exp_default_3)
    """)  # fmt: skip


def test_of_nested_calls_the_outer_one_makes_what_the_inner_one_starts_from() -> None:
    j = Joint()
    one = j.forward(aten.exp.default, j.x, regions=(1,))
    two = j.forward(aten.sin.default, one, regions=(1, 2))
    three = j.forward(aten.tan.default, two, regions=(1, 2))
    b = j.backward(aten.neg.default, j.g)
    b = j.backward(aten.mul.Tensor, b, two, inside=(1, 2))
    same(recompute(j.out(three, b)), """
        exp_default = exp(x)
        sin_default = sin(exp_default)
        tan_default = tan(sin_default)
        < neg_default = neg(g)
        < after_default_1 = after(x, neg_default)
        < exp_default_1 = exp(after_default_1)
        < after_default = after(exp_default_1, neg_default)
        < sin_default_1 = sin(after_default)
        < mul_tensor = mul(neg_default, sin_default_1)
    """)  # fmt: skip


def test_a_backward_node_of_which_nothing_is_known_belongs_to_every_call() -> None:
    j = Joint()
    one = j.forward(aten.exp.default, j.x, regions=(1,))
    b = j.backward(aten.mul.Tensor, j.backward(aten.neg.default, j.g), one)
    assert "exp_default_1 = exp(after_default)" in text(recompute(j.out(one, b)))


def test_random_values_and_items_of_random_ops_are_kept() -> None:
    j = Joint()
    drop = j.forward(aten.native_dropout.default, j.x, 0.5, True, regions=(1,))
    item = j.forward(operator.getitem, drop, 0, regions=(1,))
    b = j.backward(aten.mul.Tensor, j.backward(aten.neg.default, j.g), item, inside=(1,))
    graph = j.out(item, b)
    assert text(recompute(graph)) == text(graph)


def test_what_is_read_for_its_shape_alone_is_not_computed_again() -> None:
    j = Joint()
    one = j.forward(aten.exp.default, j.x, regions=(1,))
    zeros = j.backward(aten.zeros_like.default, one, inside=(1,))
    graph = j.out(one, j.backward(aten.add.Tensor, zeros, j.g, inside=(1,)))
    assert text(recompute(graph)) == text(graph)
    assert residuals(graph) == [j.g]


def test_a_constant_of_the_backward_is_nothing_to_wait_for() -> None:
    j = Joint()
    one = j.forward(aten.exp.default, j.x, regions=(1,))
    ones = j.backward(aten.full.default, [2, 2], 1, inside=())
    graph = recompute(j.out(one, j.backward(aten.mul.Tensor, ones, one, inside=(1,))))
    assert "after" not in text(graph) and "exp_default_1 = exp(x)" in text(graph)


def test_names_are_noted_and_taken_out_also_where_nothing_is_checkpointed() -> None:
    j = Joint()
    e = j.forward(aten.exp.default, j.x)
    v = j.forward(aten.view.default, e, [2, 2])
    graph = recompute(j.out(j.forward(aten.sin.default, j.forward(placement.NAME, v, "h"))))
    same(graph, """
        exp_default = exp(x)
        view_default = view(exp_default, [2, 2])
        sin_default = sin(view_default)
    """)  # fmt: skip
    assert [n.meta["custom"].get("names") for n in graph.nodes if n.op == "call_function"] == [
        ("h",),
        ("h",),
        None,
    ]


def test_residuals_are_what_owns_the_memory_once_each() -> None:
    j = Joint()
    e = j.forward(aten.exp.default, j.x)
    one, two = j.forward(aten.t.default, e), j.forward(aten.view.default, e, [4])
    b = j.backward(aten.mul.Tensor, one, j.x)
    assert residuals(j.out(j.backward(aten.mul.Tensor, b, two))) == [j.x, e]


def test_residuals_of_a_backward_that_is_differentiated_are_those_of_the_outer_one() -> None:
    j = Joint()
    e = j.forward(aten.exp.default, j.x)
    inner = j.backward(aten.mul.Tensor, e, j.g)
    outer = j.backward(aten.mul.Tensor, inner, j.g, outermost=True)
    assert residuals(j.out(outer)) == [j.g, inner]


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_a_captured_graph_computes_the_same_before_and_after(policy: str) -> None:
    generator = torch.Generator().manual_seed(3)
    w, x = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    fn = sf.checkpoint(lambda w, x: (x @ w).tanh() @ w, policy=policy)
    graph = sf.grad(lambda w, x: fn(w, fn(w, x)).square().sum()).trace(w, x).program.graph
    again = torch.fx.GraphModule(torch.nn.Module(), recompute(graph.graph))
    torch.testing.assert_close(again(w, x), graph(w, x), rtol=0, atol=0)


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
