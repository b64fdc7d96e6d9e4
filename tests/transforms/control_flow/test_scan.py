"""scan, map, cond and while_loop: equal to the loop written out in Python, under every
transform, sharded and not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from stagings import counts
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.ops.loops import Scan

F64 = torch.float64
G = torch.Generator().manual_seed(7)
W, V = (torch.randn(3, 3, generator=G, dtype=F64) for _ in range(2))
XS = torch.randn(5, 4, 3, generator=G, dtype=F64)
Q = torch.randn(5, 3, generator=G, dtype=F64)
WORLDS: dict[str, Any] = {
    "2": ((2,), (P(), P(None, "a"))),
    "3": ((3,), (P(None, "a"), P())),
    "2 x 2": ((2, 2), (P("a", "b"), P(None, "b", "a"))),
    "rows": ((2,), (P("a"), P("a"))),
}


def close(got: Any, wanted: Any) -> None:
    assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def written_out(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
) -> Any:
    count = length if xs is None else len(xs)
    carry, ys = init, []
    for i in reversed(range(count)) if reverse else range(count):
        carry, y = f(carry, None if xs is None else xs[i])
        ys.append(y)
    return carry, torch.stack(ys[::-1] if reverse else ys)


def choosing(truth: Any, yes: Any, no: Any, *operands: Any) -> Any:
    return torch.where(truth, yes(*operands), no(*operands))


def growing(w: Tensor, xs: Tensor) -> Tensor:
    """A loop that runs as often as the values say."""
    return sf.while_loop(lambda c: c.abs().sum() < 50, lambda c: c * 1.7 + w[0], xs)


def grown(w: Tensor, xs: Tensor) -> Tensor:
    c = xs
    for _ in range(60):
        c = torch.where(c.abs().sum() < 50, c * 1.7 + w[0], c)
    return c


# name -> (ours, the same in plain torch); functions of (3, 3) and (5, 4, 3)
Two = Callable[[Tensor, Tensor], Any]
FUNCTIONS: dict[str, Callable[..., Two]] = {
    "scan": lambda scan, cond: (
        lambda w, xs: scan(
            lambda c, x: (torch.tanh(c @ w + x), (c * 2).sum(-1)), torch.zeros(4, 3, dtype=F64), xs
        )
    ),
    "reverse": lambda scan, cond: (
        lambda w, xs: scan(lambda c, x: (c.T @ x + w, c.sum()), w, xs[:, :3], reverse=True)
    ),
    "counted": lambda scan, cond: (
        lambda w, xs: scan(lambda c, _: (c @ w / 3, c[0, 0]), xs[0], length=3)
    ),
    "cond": lambda scan, cond: (
        lambda w, xs: cond(xs.sum() > 0, lambda: torch.sin(xs @ w), lambda: xs * 2 + w.sum())
    ),
    "cond of operands": lambda scan, cond: (
        lambda w, xs: cond(xs.sum() < 0, lambda a: torch.sin(a @ w), lambda a: a * a, xs)
    ),
    "cond in scan": lambda scan, cond: (
        lambda w, xs: scan(
            lambda c, x: (cond(x.sum() > 0, lambda: c @ w / 3, lambda: c + x), x[0]),
            torch.ones(4, 3, dtype=F64),
            xs,
        )
    ),
    "scan in scan": lambda scan, cond: (
        lambda w, xs: scan(
            lambda c, x: (scan(lambda d, r: (torch.sin(d @ w) + r, d[0]), c, x)[0], c[1]), w[0], xs
        )
    ),
    "grad in scan": lambda scan, cond: (
        lambda w, xs: scan(
            lambda c, x: (c - 0.1 * torch.func.grad(lambda c: ((x @ c).sin() ** 2).sum())(c), c[0]),
            w,
            xs,
        )
    ),
    "jvp in scan": lambda scan, cond: (
        lambda w, xs: scan(
            lambda c, x: (
                torch.func.jvp(lambda c: (x.T @ x @ c / 9).sin(), (c,), (w / 9,))[1],
                c[0],
            ),
            w,
            xs,
        )
    ),
    "vmap in cond": lambda scan, cond: (
        lambda w, xs: cond(
            xs.sum() > 0,
            lambda: torch.func.vmap(lambda x: x @ w)(xs),
            lambda: torch.func.vmap(torch.func.grad(lambda x: (x @ w).sin().sum()))(xs),
        )
    ),
}
OURS: dict[str, Two] = {name: made(sf.scan, sf.cond) for name, made in FUNCTIONS.items()} | {
    "while": growing
}
PLAIN: dict[str, Two] = {name: made(written_out, choosing) for name, made in FUNCTIONS.items()} | {
    "while": grown
}


def summed(f: Two) -> Callable[..., Tensor]:
    def loss(w: Tensor, xs: Tensor) -> Tensor:
        out = f(w, xs)
        return sum(x.sin().sum() for x in out) if isinstance(out, tuple) else (out**2).sum()

    return loss


def over(m: Any, f: Any, axes: Any) -> Any:
    return m.vmap(f, **{"in_axes" if m is sf else "in_dims": axes})


TRANSFORMS: dict[str, Callable[[Any, Two], Any]] = {
    "plain": lambda m, f: f,
    "grad": lambda m, f: m.grad(summed(f), argnums=(0, 1)),
    "jvp": lambda m, f: lambda w, xs: m.jvp(f, (w, xs), (w.cos(), xs.sin())),
    "vmap": lambda m, f: lambda w, xs: over(m, f, (None, 1))(w, torch.stack([xs, -xs], 1)),
    "vmap of grad": lambda m, f: (
        lambda w, xs: over(m, m.grad(summed(f)), (0, None))(torch.stack([w, w.T]), xs)
    ),
    "vmap of jvp": lambda m, f: (
        lambda w, xs: over(m, lambda w: m.jvp(f, (w, xs), (w.cos(), xs.sin())), 2)(
            torch.stack([w, -w], 2)
        )
    ),
    "grad of grad": lambda m, f: m.grad(
        lambda w, xs: m.grad(summed(f))(w, xs).sin().sum(), argnums=(0, 1)
    ),
    "hessian": lambda m, f: m.hessian(summed(f)),
    "jacrev": lambda m, f: m.jacrev(f),
    "jacfwd": lambda m, f: m.jacfwd(f, argnums=1),
}
REVERSE = ("grad", "vmap of grad", "grad of grad", "hessian", "jacrev")
CASES = [(f, t) for f in OURS for t in TRANSFORMS if not (f == "while" and t in REVERSE)]


@pytest.mark.parametrize(("function", "transform"), CASES)
def test_a_loop_equals_itself_written_out_under_every_transform(
    function: str, transform: str
) -> None:
    wanted = TRANSFORMS[transform](torch.func, PLAIN[function])(W, XS)
    ours = TRANSFORMS[transform](sf, OURS[function])
    sizes, placements = list(WORLDS.values())[CASES.index((function, transform)) % len(WORLDS)]
    with sf.fake_world(torch.Size(sizes).numel()):
        mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
        close(sf.full(sf.shard(ours, mesh, placements, backend="aten")(W, XS)), wanted)


@pytest.mark.parametrize("function", OURS)
def test_alone_a_loop_equals_itself_written_out(function: str) -> None:
    for transform in ("plain", "vmap", "jacfwd") + (
        () if function == "while" else ("grad", "hessian")
    ):
        ours, plain = (
            TRANSFORMS[transform](sf, OURS[function]),
            TRANSFORMS[transform](torch.func, PLAIN[function]),
        )
        close(ours(W, XS), plain(W, XS))


def test_a_map_applies_a_function_to_each_row() -> None:
    close(
        sf.map(lambda x: {"n": x.sum(), "k": 3}, XS),
        {"n": XS.sum((1, 2)), "k": torch.full((len(XS),), 3)},
    )
    close(sf.grad(lambda x: sf.map(lambda r: (r**3).sum(), x).sum())(XS), 3 * XS**2)


def test_carries_and_rows_are_trees_and_integers_may_be_among_them() -> None:
    def step(c: Any, x: Any) -> Any:
        return {"n": c["n"] + 1, "v": c["v"] * x["a"] + x["k"]}, (c["n"], None, "text")

    xs = {"a": Q, "k": torch.arange(5)}
    carry, (counted, none, text) = sf.scan(
        step, {"n": torch.tensor(0), "v": torch.ones(3, dtype=F64)}, xs
    )
    close(counted, torch.arange(5))
    assert (none, text, int(carry["n"])) == (None, "text", 5)
    loss = lambda q: sf.scan(
        step, {"n": torch.tensor(0), "v": torch.ones(3, dtype=F64)}, {"a": q, "k": xs["k"]}
    )[0]["v"].sum()

    def plain(q: Tensor) -> Tensor:
        v = torch.ones(3, dtype=F64)
        for i in range(5):
            v = v * q[i] + i
        return v.sum()

    close(sf.grad(loss)(Q), torch.func.grad(plain)(Q))
    close(sf.jvp(loss, (Q,), (Q,)), torch.func.jvp(plain, (Q,), (Q,)))


def number() -> Tensor:
    return torch.tensor(0)


# loops whose results are integers: of an argument, and of constants alone
INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "carries": lambda x: sf.scan(lambda c, r: (c + (r > 0).sum(), None), number(), x)[0],
    "rows": lambda x: sf.map(lambda r: (r > 0).long(), x),
    "branches": lambda x: sf.cond(x.sum() > 0, lambda x: (x > 0).sum(), lambda x: (x < 0).sum(), x),
    "steps": lambda x: sf.while_loop(lambda c: c < x.abs().sum(), lambda c: c + 1, number()),
    "scan of constants": lambda x: sf.scan(lambda c, _: (c + 1, c), number(), None, length=3)[0],
    "floats of constants": lambda x: sf.scan(
        lambda c, _: (c + 1.5, c), torch.tensor(0.0), None, length=3
    )[0],
    "while of constants": lambda x: sf.while_loop(lambda c: c < 3, lambda c: c + 1, number()),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_loops_of_integers_under_every_transform(name: str) -> None:
    loop = INTEGERS[name]
    count = loop(Q)
    fn = lambda x: x**2 * loop(x)
    tangent = torch.ones_like(Q)
    (value, of_value), (alone, of_alone) = (sf.jvp(f, (Q,), (tangent,)) for f in (fn, loop))
    assert_close((value, of_value), (Q**2 * count, 2 * Q * count))
    assert_close((alone, of_alone), (count, torch.zeros_like(count)))
    slope = 2 * Q * count
    assert_close(sf.grad(lambda x: fn(x).sum())(Q), slope)
    assert_close(sf.jacfwd(lambda x: fn(x).sum())(Q), slope)
    wanted = torch.diag((2 * torch.ones_like(Q) * count).flatten())
    assert_close(sf.hessian(lambda x: fn(x).sum())(Q).reshape(15, 15), wanted)
    assert_close(sf.vmap(fn)(Q.expand(2, 5, 3)), value.expand(2, 5, 3))
    with sf.fake_world(2):
        push = lambda x, t: sf.jvp(fn, (x,), (t,))
        by_rows = sf.shard(push, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")
        assert_close(sf.full(by_rows(Q, tangent)), (value, of_value))


def test_a_scan_of_no_rows_returns_what_it_was_given() -> None:
    carry, ys = sf.scan(lambda c, x: (c + x.sum(), c @ c), W, torch.zeros(0, 3, dtype=F64))
    close(carry, W)
    assert ys.shape == (0, 3, 3)


def test_a_python_bool_chooses_at_once() -> None:
    close(sf.cond(True, torch.sin, torch.cos, W), W.sin())


def test_under_a_transform_that_is_not_captured_a_loop_runs_as_python() -> None:
    for name in ("scan", "cond", "cond in scan"):
        close(
            torch.func.grad(summed(OURS[name]))(W, XS), torch.func.grad(summed(PLAIN[name]))(W, XS)
        )
    close(
        torch.func.jvp(lambda x: growing(W, x), (XS,), (XS,)),
        torch.func.jvp(lambda x: grown(W, x), (XS,), (XS,)),
    )
    close(torch.func.jvp(lambda x: sf.map(torch.sin, x), (XS,), (XS,)), (XS.sin(), XS.cos() * XS))


def with_gradient(m: Any, name: str, f: Two) -> Any:
    """The value of a function and its gradient, if it has one, as one program."""
    kinds = ("plain",) if name == "while" else ("plain", "grad")
    made = [TRANSFORMS[kind](m, f) for kind in kinds]
    return lambda w, xs: [fn(w, xs) for fn in made]


PLACED = {
    "aten": (P(None, "a"), P(None, "a")),  # of w, whose chunks differ, and of xs
    "inductor": (P(), P(None, "a")),  # even chunks: the ranks share kernels
}


def on_ranks(name: str, backend: str) -> Any:
    """(the results for two arguments, how many programs were compiled for both)."""
    before = counts["compilations"]
    fn = sf.shard(
        with_gradient(sf, name, OURS[name]),
        sf.make_mesh((2,), ("a",)),
        PLACED[backend],
        backend=backend,
    )
    results = [sf.full(fn(W, xs)) for xs in (XS, -XS)]
    return results, counts["compilations"] - before


REAL = {
    "aten": ("scan", "cond", "while", "cond in scan"),
    "inductor": ("while", "cond in scan"),  # one of each kind
}


def every_function(backend: str) -> Any:
    return {name: on_ranks(name, backend) for name in REAL[backend]}


def right_on_ranks(backend: str) -> None:
    for found in run_ranks(2, every_function, backend):
        for name, (results, compilations) in found.items():
            wanted = with_gradient(torch.func, name, PLAIN[name])
            for xs, got in zip((XS, -XS), results, strict=True):
                close(got, wanted(W, xs))
            assert compilations == (backend == "inductor")


def test_on_two_gloo_processes_it_is_right() -> None:
    right_on_ranks("aten")


def test_on_two_gloo_processes_it_is_compiled_once() -> None:
    right_on_ranks("inductor")


def layers(params: Any, x: Tensor) -> Tensor:
    return sf.scan(lambda h, p: (h + torch.tanh(h @ p["w"] + p["b"]), None), x, params)[0]


def stacked(depth: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "w": torch.randn(depth, 4, 4, generator=g, dtype=F64) / 4,
        "b": torch.randn(depth, 4, generator=g, dtype=F64),
    }


def lowered(fn: Any, placements: Any, *args: Any, n: int = 2) -> Any:
    with simulated(dp=n) as mesh:
        return sf.shard(fn, mesh, placements, backend="aten").lower(*args)


def test_a_scan_over_layers_is_one_program_whatever_the_depth() -> None:
    loss = lambda p, x: (layers(p, x) ** 2).sum()
    x = torch.ones(6, 4, dtype=F64)
    sizes = {
        len(lowered(sf.grad(loss), (P(), P("dp")), stacked(depth), x).program.graph.nodes)
        for depth in (2, 16)
    }
    assert len(sizes) == 1


def test_nothing_of_a_layer_is_computed_twice_in_the_backward() -> None:
    traced = sf.grad(lambda p, x: (layers(p, x) ** 2).sum()).trace(
        stacked(3), torch.ones(6, 4, dtype=F64)
    )
    scans = [n.target for n in traced.program.graph.graph.nodes if isinstance(n.target, Scan)]
    ops = [[getattr(n.target, "_opname", "") for n in scan.graphs[0].nodes] for scan in scans]
    assert [(names.count("mm"), names.count("tanh")) for names in ops] == [(1, 1), (2, 0)]


def test_a_microbatch_scan_reduces_once_behind_the_loop() -> None:
    def step(w: Tensor, batches: Tensor) -> Tensor:
        gradient = sf.grad(lambda w, x: ((x @ w) ** 2).sum())
        return sf.scan(lambda g, x: (g + gradient(w, x), None), torch.zeros_like(w), batches)[0]

    def loss(w: Tensor, batches: Tensor) -> Tensor:
        return sf.scan(
            lambda total, x: (total + ((x @ w) ** 2).sum(), None),
            torch.zeros((), dtype=F64),
            batches,
        )[0]

    batches = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    sent = lowered(sf.grad(loss), (P(), P(None, "dp")), W, batches).collectives
    assert [(c.kind, c.nbytes) for c in sent] == [("all_reduce", 72)]
    with simulated(dp=2) as mesh:
        wanted = torch.func.grad(lambda w: sum(((x @ w) ** 2).sum() for x in batches))(W)
        for fn in (step, sf.grad(loss)):
            close(
                sf.full(sf.shard(fn, mesh, (P(), P(None, "dp")), backend="aten")(W, batches)),
                wanted,
            )


def test_fully_sharded_layers_are_gathered_in_every_run_and_their_gradients_scattered() -> None:
    loss = lambda p, x: (layers(p, x) ** 2).sum()
    params, x = stacked(3), torch.ones(6, 4, dtype=F64)
    placed = {"w": P(None, "dp"), "b": P()}
    low = lowered(sf.grad(loss), (placed, P("dp")), params, x)
    kinds = [c.kind for c in low.collectives]
    assert (
        kinds.count("all_gather"),
        kinds.count("reduce_scatter"),
        kinds.count("all_reduce"),
    ) == (6, 3, 1)
    assert "all_gather[dp]" in low.text() and "steps of body:" in low.verbose()
    assert "6 all_gather over dp" in str(low)


def test_a_carry_that_is_constrained_otherwise_than_it_enters_is_refused_with_the_fix() -> None:
    def fn(x: Tensor) -> Tensor:
        return sf.scan(
            lambda c, _: (sf.constrain(c * 2, P(None, "dp")), None),
            sf.constrain(x, P("dp")),
            length=2,
        )[0]

    with pytest.raises(sf.PlacementError) as error:
        lowered(fn, (P("dp"),), torch.ones(4, 4))
    assert str(error.value).splitlines()[0] == (
        "shard(fn), scan: carry 0 enters a step placed Shard(dim=0) on dp and leaves it "
        "placed Shard(dim=1) on dp"
    )
    assert "needed: the same placement of the carry in every step" in str(error.value)
    assert "try: constrain the initial carry to the placement of the returned carry" in str(
        error.value
    )


def products(wrap: Any) -> list[tuple[int, int]]:
    """How many matrix products and tanh the two scans of a gradient over layers compute in each
    run; its value is checked.
    """

    def loss(p: Tensor, x: Tensor, scan: Any = sf.scan, wrap: Any = wrap) -> Tensor:
        layer = wrap(lambda h, w: h + torch.tanh(torch.tanh(h @ w) @ w.T))
        return (scan(lambda h, w: (layer(h, w), h[0]), x, p)[0] ** 2).sum()

    p, x = stacked(3)["w"], torch.ones(6, 4, dtype=F64)
    fn = sf.grad(loss)
    close(fn(p, x), torch.func.grad(lambda p: loss(p, x, written_out, lambda f: f))(p))
    scans = [
        n.target.graphs[0]
        for n in fn.trace(p, x).program.graph.graph.nodes
        if isinstance(n.target, Scan)
    ]
    ops = [[getattr(n.target, "_opname", "") for n in graph.nodes] for graph in scans]
    return [(names.count("mm"), names.count("tanh")) for names in ops]


def test_a_checkpointed_layer_of_a_scan_is_computed_again_in_the_backward() -> None:
    assert products(lambda f: f) == [(2, 2), (4, 0)]
    assert products(sf.checkpoint) == [(2, 2), (6, 2)]
    policy = sf.checkpoint_policies.dots_saveable
    assert products(lambda f: sf.checkpoint(f, policy=policy)) == [(2, 2), (4, 2)]
