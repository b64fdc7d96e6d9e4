"""Which values of per-rank code vary, as the Program shows it: `vary` stands where an invariant
value meets a varying one, in loops, branches and functions with a rule too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import shardfn as sf
from shardfn import P

X, W = torch.ones(4, 4), torch.ones(4, 4)


def ops(body: Any, ins: Any = None, outs: Any = None) -> list[str]:
    """The prims of a Program with their axes, those in bodies of loops and branches in brackets."""
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        mapped = sf.shard_map(
            body, mesh, ins or (P(), P("dp")), P("dp") if outs is None else outs, backend="aten"
        )
        return prims(mapped.trace(W, X).program.graph.graph)


def prims(graph: torch.fx.Graph) -> list[str]:
    found: list[str] = []
    for node in graph.nodes:
        for inner in getattr(node.target, "graphs", ()):
            found += [f"[{text}]" for text in prims(inner)]
        name = getattr(node.target, "_opname", "prim_")
        if getattr(node.target, "namespace", "") == "shardfn" and not name.startswith("prim_"):
            found.append(f"{name} {node.args[1]}")
    return found


def test_what_all_share_meets_a_ranks_own_once() -> None:
    assert ops(lambda w, x: x @ w + x * w.sum()) == ["vary dp", "vary dp"]
    assert ops(lambda w, x: (x @ w) @ w) == ["vary dp"]


def test_what_all_share_stays_so_among_itself() -> None:
    assert ops(lambda w, x: (w @ w).sin(), outs=P()) == []
    assert ops(lambda w, x: w @ w + sf.psum(x.sum(), "dp"), outs=P()) == ["psum dp"]


def test_a_view_of_what_varies_anyhow_shares_its_sum() -> None:
    assert ops(lambda w, x: (x @ w) @ w.T) == ["vary dp"]
    assert ops(lambda w, x: (x @ w) * w[0]) == ["vary dp"]
    assert ops(lambda w, x: x * w[0]) == ["vary dp"]  # of the row alone


def test_axes_are_told_apart() -> None:
    body = lambda w, x: sf.psum(x @ w, "tp")
    assert ops(body, (P("tp", None), P("dp", "tp")), P("dp"))[-1] == "psum tp"
    assert ops(lambda w, x: x @ w, (P(None, "tp"), P("dp")), P("dp", "tp")) == [
        "vary dp",
        "vary tp",
    ]


def test_the_transpose_of_vary_is_a_sum_and_of_a_sum_vary() -> None:
    assert ops(sf.grad(lambda w, x: (x @ w).sum()), outs=P()) == ["vary dp", "psum dp"]
    assert ops(sf.grad(lambda w, x: sf.psum((x @ w).sum(), "dp")), outs=P()) == [
        "vary dp",
        "psum dp",
        "vary dp",
        "psum dp",
    ]


def test_a_checkpointed_part_is_read_too() -> None:
    body = lambda w, x: torch.utils.checkpoint.checkpoint(
        lambda w, x: (x @ w).sin() @ w, w, x, use_reentrant=False
    )
    assert ops(body) == ["vary dp"]


def test_a_program_without_per_rank_code_is_left_alone() -> None:
    traced = sf.grad(lambda w: (w @ w).sum()).trace(W)
    assert "vary(" not in str(traced)


VIEWS: dict[str, Any] = {
    "ravel": lambda y: y.ravel(),
    "adjoint": lambda y: y.adjoint(),
    "moveaxis": lambda y: y.moveaxis(0, 1),
    "swapdims": lambda y: y.swapdims(0, 1),
    "broadcast_to": lambda y: y.broadcast_to(4, 3),
    "as_strided": lambda y: y.as_strided((2, 2), (3, 1)),
    "view of a dtype": lambda y: y.view(torch.int64).view(torch.float64),
    "atleast_3d": torch.atleast_3d,
    "real": lambda y: y.real,
    "cpu": lambda y: y.cpu(),
    "conj": lambda y: y.conj(),
    "getitem": lambda y: y[1:],
    "flatten": torch.nn.Flatten(0),
}
OF_SEVERAL: dict[str, Any] = {
    "tensor_split": lambda y: y.tensor_split(2)[0],
    "hsplit": lambda y: y.hsplit(3)[1],
    "vsplit": lambda y: y.vsplit(2)[1],
    "split_with_sizes": lambda y: y.split_with_sizes([1, 3])[1],
    "unbind": lambda y: torch.unbind(y)[2],
}
COPIES: dict[str, Any] = {
    "to": lambda y: y.to(torch.float32),
    "contiguous": lambda y: y.t().contiguous(),
    "reshape": lambda y: y.t().reshape(12),
    "type_as": lambda y: y.type_as(y.float()),
}


def written(ways: dict[str, Any], x: torch.Tensor) -> list[torch.Tensor]:
    """What is read of a tensor that all ranks have, after a write through each view of it."""
    found = []
    for way in ways.values():
        y = torch.ones(4, 3, dtype=torch.float64)
        way(y).mul_(x.sum())
        found.append(y.square().sum())
    return found


def test_a_write_through_any_view_reaches_the_tensor() -> None:
    xs = torch.arange(1.0, 5.0, dtype=torch.float64)
    ways = VIEWS | OF_SEVERAL | COPIES
    loss = lambda x: torch.stack(written(VIEWS | COPIES, x))
    total = lambda x: sf.psum(loss(x).sum(), ("dp", "tp"))
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        own = P(("dp", "tp"))
        each = lambda x: torch.stack(written(ways, x))[:, None]
        wanted = torch.stack([each(x)[:, 0] for x in xs], 1)
        mapped = sf.shard_map(each, mesh, own, P(None, ("dp", "tp")), backend="aten")
        torch.testing.assert_close(sf.full(mapped(xs)), wanted)
        gradient = sf.grad(sf.shard_map(total, mesh, own, P(), backend="aten"))
        wanted = torch.stack([torch.func.grad(lambda x: loss(x).sum())(x) for x in xs])
        torch.testing.assert_close(sf.full(gradient(xs)), wanted)


def carried(step: Any) -> Any:
    """A scan of two steps from an invariant carry, over the rows of a varying value."""
    return lambda w, x: sf.scan(lambda c, row: step(c, row, w), w[0] * 0, x)[0]


def branch(truth: Any, yes: Any, no: Any) -> Any:
    return lambda w, x: sf.cond(truth(w, x), lambda: yes(w, x), lambda: no(w, x))


def loop(limit: Any, step: Any) -> Any:
    go_on = lambda w, x: lambda c: c.sum() < limit(w, x)
    return lambda w, x: sf.while_loop(go_on(w, x), lambda c: step(c, w, x), w * 1)


def three_carries(w: Any, x: Any) -> Any:
    zero = w[0] * 0
    step = lambda c, row: ((c[1], c[2], row + c[2]), None)
    return sf.scan(step, (zero, zero + 1, zero + 2), x)[0][0]


def same(w: Any, x: Any) -> bool:
    return w.sum() > 0


def differs(w: Any, x: Any) -> bool:
    return x.sum() > 0


CONTROL_FLOW: dict[str, tuple[Any, list[str]]] = {
    "a carry varies as what is added to it": (
        carried(lambda c, row, w: (c + row, None)),
        ["vary dp"],
    ),
    "a closed-over value is made varying outside of the body": (
        lambda w, x: sf.scan(lambda c, row: (c + row @ w, None), x[0] * 0, x)[0],
        ["vary dp"],
    ),
    "a closed-over value that meets none stays invariant": (
        lambda w, x: sf.scan(lambda c, row: (c + row, w[0].sin()), x[0] * 0, x)[0],
        [],
    ),
    "axes go around the loop until they stay": (three_carries, ["vary dp"] * 3),
    "a branch varies if either side does": (
        branch(same, lambda w, x: w[:2] + 1, lambda w, x: x.cos()),
        ["[vary dp]"],
    ),
    "under a varying condition all that is read varies": (
        branch(differs, lambda w, x: w.sin(), lambda w, x: w.cos()),
        ["vary dp"],
    ),
    "a loop whose condition varies varies": (
        loop(lambda w, x: x.sum(), lambda c, w, x: c + 1),
        ["vary dp"],
    ),
}


@pytest.mark.parametrize("case", CONTROL_FLOW)
def test_the_axes_of_loops_and_branches(case: str) -> None:
    body, wanted = CONTROL_FLOW[case]
    assert ops(body, outs=P("dp")) == wanted


def test_loops_and_branches_of_invariant_values_are_invariant() -> None:
    assert ops(branch(same, lambda w, x: w.sin(), lambda w, x: w.cos()), outs=P()) == []
    assert ops(loop(lambda w, x: w.sum(), lambda c, w, x: c + 1), outs=P()) == []


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (branch(differs, lambda w, x: sf.psum(x, "dp"), lambda w, x: x * 1), "cond"),
        (loop(lambda w, x: x.sum(), lambda c, w, x: sf.psum(x.sum(), "dp") + c), "while_loop"),
    ],
)
def test_a_collective_that_not_all_ranks_reach_is_refused(body: Any, where: str) -> None:
    with pytest.raises(
        sf.CaptureError, match=f"{where}: the body calls psum, and the condition"
    ) as e:
        ops(body, outs=P())
    assert "by psum or pmax" in str(e.value)


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_if_any_value_of_a_function_with_a_rule_varies_all_do(is_closed_over: bool) -> None:
    def body(w: Any, x: Any) -> Any:
        y = x.sum()
        fn = sf.custom_jvp(lambda w, z: w * (y if is_closed_over else z))
        fn.defjvp(lambda xs, ts: (fn(*xs), ts[0] * xs[1]))
        return fn(w, w.sum() if is_closed_over else y)

    assert ops(body, outs=P("dp")) == ["vary dp"]


INPUT = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)
WEIGHT = torch.linspace(0.5, 1, 12, dtype=torch.float64).view(3, 4)


def with_summed_cotangent() -> Any:
    """The identity, whose cotangent is summed."""
    fn = sf.custom_vjp(lambda x: x * 1)
    fn.defvjp(lambda x: (x * 1, None), lambda _, g: (sf.psum(g, "tp"),))
    return fn


def with_equal_cotangent() -> Any:
    """The sum, whose cotangent is that of each."""
    fn = sf.custom_vjp(lambda x: sf.psum(x, "tp"))
    fn.defvjp(lambda x: (sf.psum(x, "tp"), None), lambda _, g: (g,))
    return fn


def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (with_equal_cotangent()(torch.tanh(with_summed_cotangent()(x) @ w) @ w.T) ** 2).sum()


def plain_mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ w) @ w.T) ** 2).sum()


def test_a_rule_with_collectives_is_the_derivative() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(mlp, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped, (0, 1))(INPUT, WEIGHT)
    wanted = torch.func.grad(plain_mlp, (0, 1))(INPUT, WEIGHT)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(sf.full(a), b)


def test_an_argument_without_awith_summed_cotangent_cotangent_iswith_summed_cotangent() -> None:
    """What all ranks have has one gradient, as of any op."""
    fn = sf.custom_vjp(lambda x, w: sf.psum(x @ w, "tp"))
    forward = lambda x, w: (sf.psum(x @ w, "tp"), (x, w))
    fn.defvjp(forward, lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        loss = lambda x, w: fn(x, w).sin().sum()
        mapped = sf.shard_map(loss, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped)(INPUT, WEIGHT)
    plain = lambda x: (x @ WEIGHT[:, :2] + x @ WEIGHT[:, 2:]).sin().sum()
    torch.testing.assert_close(sf.full(found), torch.func.grad(plain)(INPUT))


def test_a_reduced_result_that_is_reduced_again_is_not_each_ranks() -> None:
    """A cotangent that has met a shard is a term already: its sum says nothing of the result."""
    fn = sf.custom_vjp(lambda x, w: sf.psum(x @ w, "tp"))

    def back(kept: Any, g: torch.Tensor) -> Any:
        x, w = kept
        return sf.psum(g @ w.T, "tp"), x.T @ g

    fn.defvjp(lambda x, w: (sf.psum(x @ w, "tp"), (x, w)), back)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        loss = lambda x, w: fn(x, w).sin().sum()
        mapped = sf.shard_map(loss, mesh, (P(), P(None, "tp")), P())
        found = sf.grad(mapped)(INPUT, WEIGHT)
    plain = lambda x: (x @ WEIGHT[:, :2] + x @ WEIGHT[:, 2:]).sin().sum()
    torch.testing.assert_close(sf.full(found), torch.func.grad(plain)(INPUT))


def test_a_shard_that_a_backward_closes_over_counts_as_an_argument() -> None:
    """The cotangent has met a shard, so its sum says nothing of the result."""

    def loss(x: Any, w: Any) -> Any:
        fn = sf.custom_vjp(lambda x: sf.psum(x @ w, "tp"))
        back = lambda _, g: (sf.psum(g @ w.T, "tp"),)
        fn.defvjp(lambda x: (sf.psum(x @ w, "tp"), None), back)
        return fn(x).sin().sum()

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(loss, mesh, (P(), P(None, "tp")), P())
        gradient = sf.full(sf.grad(mapped)(INPUT, WEIGHT))
    plain = lambda x: (x @ WEIGHT[:, :2] + x @ WEIGHT[:, 2:]).sin().sum()
    torch.testing.assert_close(gradient, torch.func.grad(plain)(INPUT))


def test_a_collective_in_a_rule_for_forward_mode_is_refused() -> None:
    fn = sf.custom_jvp(lambda x: x * 2)
    fn.defjvp(lambda xs, ts: (xs[0] * 2, sf.psum(ts[0], "tp")))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        mapped = sf.shard_map(lambda x: fn(x).sum(), mesh, P(), P())
        with pytest.raises(sf.CaptureError, match="the function calls psum"):
            sf.grad(mapped)(INPUT)
