"""dynamic= and mark_dynamic: a function is captured once for all sizes of a dim."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from stagings import counts
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.export import Dim
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

D = torch.float64
W = torch.randn(3, 2, dtype=D, generator=torch.Generator().manual_seed(0))


def batch(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, dtype=D, generator=torch.Generator().manual_seed(seed))


def captures(fn: Callable[[], Any]) -> int:
    """How often Python is read in a call."""
    before = counts["captures"]
    fn()
    return counts["captures"] - before


def leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def check_equal(got: Any, wanted: Any) -> None:
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        assert_close(a, b) if isinstance(b, Tensor) else None
        assert isinstance(b, Tensor) or a == b


def mean_loss(w: Tensor, x: Tensor) -> Tensor:
    return ((x @ w).sin() ** 2).mean()


def masked(w: Tensor, x: Tensor) -> Tensor:
    n = x.shape[0]
    place = torch.arange(n)
    mask = (place[:, None] >= place[None, :]).to(x.dtype)  # (n, n)
    return (mask @ (x @ w)).reshape(-1).sum() / n


def scanned(w: Tensor, x: Tensor) -> Tensor:
    step = lambda c, row: (c + torch.sin(row @ w), c * 2)
    carry, ys = sf.scan(step, torch.zeros(2, dtype=D), x)
    return carry.sum() + ys.mean()


def mapped(w: Tensor, x: Tensor) -> Tensor:
    return sf.vmap(lambda a, b: (a @ w).sum() * (b @ w).sum())(x, x.flip(0)).mean()


def checkpointed(w: Tensor, x: Tensor) -> Tensor:
    return sf.checkpoint(lambda y: torch.tanh(y @ w))(x).mean()


def branched(w: Tensor, x: Tensor) -> Tensor:
    return sf.cond(x.sum() > 0, lambda: (x @ w).mean(), lambda: (x @ w).sum())


def normed(w: Tensor, x: Tensor) -> Tensor:
    labels = torch.zeros(x.shape[0], dtype=torch.long)
    y = F.layer_norm(x @ w, (2,))
    return y.pow(3).mean() + F.cross_entropy(x @ w, labels)


def attended(w: Tensor, x: Tensor) -> Tensor:
    q = (x @ w)[None, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).mean()


def of_module(w: Tensor, x: Tensor) -> Tensor:
    y, _ = MODULE({"weight": w.t()}, {}, x[None])  # (1, n, 2)
    return y.pow(2).mean()


MODULE, *_ = sf.functionalize(torch.nn.Linear(3, 2, bias=False))
LOSSES = [of_module, mean_loss, masked, scanned, mapped, checkpointed, branched, normed, attended]
AROUND = {"value": lambda fn: fn, "bucketed_grad": lambda fn: sf.bucketed_grad(fn)}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("around", AROUND)
def test_a_function_is_captured_once_for_even_and_uneven_sizes(
    loss: Callable[..., Any], around: str
) -> None:
    with simulated(dp=3) as mesh:
        placed = (None, P("dp"))
        fn = AROUND[around](loss)
        own = lambda w, x: fn(w, x)
        step = sf.shard(own, mesh, placed, backend="aten", dynamic=(None, 0))
        added = []
        for n in (6, 4, 2):
            x = batch(n)
            added.append(captures(lambda x=x: step(W, x)))
            wanted = AROUND[around](loss)(W, x)
            check_equal(sf.full(step(W, x)), wanted)
        assert added == [1, 0, 0]


@pytest.mark.parametrize("shape", [(2,), (8,), (2, 4)])
def test_gradients_are_right_on_other_worlds_and_meshes(shape: tuple[int, ...]) -> None:
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, ("dp", "tp")[: len(shape)])
        weights = P(None, "tp") if len(shape) == 2 else P()
        step = sf.shard(
            sf.bucketed_grad(mean_loss), mesh, (weights, P("dp")), backend="aten", dynamic=(None, 0)
        )
        step(W, batch(8))
        for n in (5, 16, 7):
            assert not captures(lambda n=n: step(W, batch(n)))
            wanted = sf.value_and_grad(mean_loss)(W, batch(n))
            check_equal(sf.full(step(W, batch(n))), wanted)


def test_backward_from_outside() -> None:
    with simulated(dp=3) as mesh:
        loss_fn = sf.shard(masked, mesh, (None, P("dp")), backend="aten", dynamic=(None, 0))
        added = []
        for n in (6, 4, 9):
            w = W.clone().requires_grad_()
            added.append(captures(lambda w=w, n=n: loss_fn(w, batch(n))))
            loss_fn(w, batch(n)).backward()
            check_equal(w.grad, sf.grad(masked)(W, batch(n)))
        assert added == [1, 0, 0]


def test_a_mark_on_a_tensor_and_on_a_dtensor() -> None:
    with simulated(dp=2) as mesh:
        mean = sf.jit(lambda x: x.sum(0) / x.shape[0], backend="aten")
        mean(sf.mark_dynamic(batch(4), 0))
        assert not captures(lambda: mean(batch(6)))  # whether marked or not
        place = lambda n: sf.distribute(batch(n), mesh, P("dp"))
        assert captures(lambda: mean(sf.mark_dynamic(place(4), 0))) <= 1
        assert not captures(lambda: mean(place(7)))
        check_equal(sf.full(mean(place(7))), batch(7).mean(0))


def test_code_of_one_rank_with_dtensors_inside() -> None:
    with simulated(dp=2, tp=2) as mesh:
        everywhere = [Replicate(), Replicate()]

        def mean(x: Tensor, scale: int) -> Tensor:
            y = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
            y = y.redistribute(mesh, everywhere)
            return y.to_local().sum(0) / y.shape[0] * scale

        fn = sf.jit(mean, backend="aten", dynamic={"x": 0})
        fn(batch(4), 2)
        for n in (6, 5):
            assert not captures(lambda n=n: fn(batch(n), 2))
            check_equal(sf.full(fn(batch(n), 2)), batch(n).mean(0) * 2)


def test_other_transforms_and_worlds_without_values() -> None:
    fn = sf.grad(lambda w, x: mean_loss(w, x))
    fn(W, sf.mark_dynamic(batch(4), 0))
    assert not captures(lambda: fn(W, batch(5)))
    check_equal(fn(W, batch(5)), sf.grad(mean_loss)(W, batch(5)))
    with sf.fake_world(1024, numerics=False):
        mesh = sf.make_mesh((1024,), ("dp",))
        step = sf.shard(fn, mesh, (None, P("dp")), backend="aten", dynamic=(None, 0))
        step.lower(W, sf.ShapeDtype((2048, 3), D))
        lower = lambda: step.lower(W, sf.ShapeDtype((4099, 3), D))
        assert not captures(lower) and "4099" in lower().traced.text()


def test_torchs_own_marks_count() -> None:
    x = batch(4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    fn = sf.jit(lambda x: x.sum() / x.shape[0], backend="aten")
    fn(x)
    assert not captures(lambda: fn(batch(5)))


def test_without_a_mark_sizes_are_constants() -> None:
    fn = sf.jit(lambda x: x.sum() / x.shape[0], backend="aten")
    assert [captures(lambda n=n: fn(batch(n))) for n in (4, 5, 4)] == [1, 1, 0]


def by_size(x: Tensor) -> Tensor:
    if x.shape[0] > 4:
        return x.sum() * 2
    return x.sum()


def test_a_size_that_breaks_a_branch_is_captured_again_and_named() -> None:
    fn = sf.jit(by_size, backend="aten", dynamic=0)
    added = []
    for n in (3, 4, 5, 7, 2):
        added.append(captures(lambda n=n: fn(batch(n))))
        check_equal(fn(batch(n)), by_size(batch(n)))
    assert added == [1, 0, 1, 0, 0]
    line = by_size.__code__.co_firstlineno + 1
    fresh = sf.jit(lambda x: by_size(x), backend="aten", dynamic=0)
    fresh(batch(3))
    assert fresh.explain_retrace(batch(5)).splitlines()[1:] == [
        "  x: f64[5, 3], was f64[3, 3]",
        "  shardfn captures again, because the captured function needs x.shape[0] <= 4, at "
        f"{__file__}:{line}",
    ]
    assert fresh.explain_retrace(batch(4)).splitlines()[2:] == [
        "  only sizes differ: shardfn partitions again without a new capture"
    ]


def test_sizes_0_and_1_are_captured_by_themselves() -> None:
    fn = sf.jit(lambda x: x.sum(0) + x.shape[0], backend="aten", dynamic=0)
    added = []
    for n in (1, 0, 4, 5, 1, 0):
        added.append(captures(lambda n=n: fn(batch(n))))
        check_equal(fn(batch(n)), batch(n).sum(0) + n)
    assert added == [1, 1, 1, 0, 0, 0]


def said(x: Tensor) -> Any:
    return x * int(x.shape[0]), f"{x.shape[0]} rows", x.shape[0]


def test_a_size_that_is_a_python_number_or_a_text_is_guarded() -> None:
    fn = sf.jit(said, backend="aten", dynamic=0)
    for n in (4, 5, 4, 6):
        check_equal(fn(batch(n)), said(batch(n)))


def test_two_dims_of_equal_and_unequal_sizes() -> None:
    outer = sf.jit(lambda a, b: a[:, 0, None] * b[:, 0], backend="aten", dynamic=0)
    outer(batch(4), batch(4))
    for n, m in ((4, 5), (5, 4), (6, 6)):
        assert not captures(lambda n=n, m=m: outer(batch(n), batch(m)))
        check_equal(outer(batch(n), batch(m)), batch(n)[:, 0, None] * batch(m)[:, 0])
    added = sf.jit(lambda a, b: a + b, backend="aten", dynamic=0)
    added(batch(4), batch(4))
    assert not captures(lambda: added(batch(5), batch(5, 2)))
    with pytest.raises(RuntimeError, match="must match the size"):
        added(batch(4), batch(5))
    check_equal(added(batch(4), batch(1)), batch(4) + batch(1))


def test_both_dims_of_one_tensor_and_a_transposed_argument() -> None:
    fn = sf.jit(lambda x: x.t().reshape(-1) * x.numel(), backend="aten", dynamic=True)
    fn(torch.arange(12.0).reshape(3, 4))
    for x in (torch.arange(10.0).reshape(5, 2), torch.arange(12.0).reshape(3, 4).t()):
        check_equal(fn(x), x.t().reshape(-1) * x.numel())
    assert not captures(lambda: fn(torch.arange(14.0).reshape(7, 2)))


def test_a_tree_of_arguments_by_position_by_name_and_with_hints() -> None:
    total = lambda tree, n, *, y: sum(x.sum() for x in tree.values()) * n + y.sum()
    tree = lambda n: {"a": batch(n), "b": batch(3)}
    for dynamic in (
        {"tree": {"a": 0, "b": None}, "y": {0, 1}},
        {"tree": {"a": {0: Dim.AUTO}, "b": {0: Dim.STATIC}}, "y": True},
    ):
        own = lambda tree, n, *, y: total(tree, n, y=y)
        fn = sf.jit(own, backend="aten", dynamic=dynamic)
        fn(tree(4), 2, y=batch(4))
        assert not captures(lambda fn=fn: fn(tree(5), 2, y=batch(6)))
        check_equal(fn(tree(5), 2, y=batch(6)), total(tree(5), 2, y=batch(6)))


def test_vmap_and_shard_map_around() -> None:
    with simulated(dp=2, tp=2) as mesh:
        many = sf.jit(sf.vmap(lambda r: (r * r).sum()), backend="aten", dynamic=0)
        mean = sf.shard_map(
            lambda x: (sf.pmean(x.mean(0), "dp"), x * x.shape[0]),
            mesh,
            P("dp"),
            (P(), P("dp")),
            backend="aten",
            dynamic=0,
        )
        many(batch(4)), mean(batch(4))
        for n in (6, 8, 10):
            assert not captures(lambda n=n: (many(batch(n)), mean(batch(n))))
            check_equal(many(batch(n)), (batch(n) ** 2).sum(1))
            check_equal(sf.full(mean(batch(n))), (batch(n).mean(0), batch(n) * (n // 2)))
        with pytest.raises(sf.PlacementError, match="dim 0 has size 7"):
            mean(batch(7))


def test_a_closed_over_tensor_with_a_mark_is_followed() -> None:
    held = {"x": sf.mark_dynamic(batch(4), 0)}
    fn = sf.jit(lambda w: (held["x"] @ w).sum() / held["x"].shape[0], backend="aten")
    for n in (4, 5, 6):
        held["x"] = sf.mark_dynamic(batch(n), 0)
        check_equal(fn(W), (batch(n) @ W).sum() / n)
    torch._dynamo.maybe_mark_dynamic(held["x"], 0)
    check_equal(fn(W), (batch(6) @ W).sum() / 6)


def test_another_value_that_the_function_closes_over_is_read_again() -> None:
    scale = {"by": 2.0}
    fn = sf.jit(lambda x: x.sum() * scale["by"], backend="aten", dynamic=0)
    fn(batch(4))
    scale["by"] = 3.0
    check_equal(fn(batch(5)), batch(5).sum() * 3)


def test_random_numbers_are_those_of_a_capture_of_the_size() -> None:
    draw = lambda key, x: x * sf.random.normal(key, (x.shape[0], 3))
    fn = sf.jit(draw, backend="aten", dynamic=(None, 0))
    own = sf.jit(lambda key, x: draw(key, x), backend="aten")
    for n in (4, 6, 5):
        key = sf.random.key(n)
        check_equal(fn(key, batch(n)), own(key, batch(n)))


def constant(x: Tensor) -> Tensor:
    return sum(x[i] for i in range(x.shape[0]))


def test_a_strict_dim_that_must_be_constant_is_named_with_its_line() -> None:
    line = constant.__code__.co_firstlineno + 1
    fn = sf.jit(constant, backend="aten")
    with pytest.raises(sf.CaptureError) as caught:
        fn(sf.mark_dynamic(batch(4), 0, strict=True))
    assert str(caught.value) == (
        "jit(constant), argument x: the function needs a constant size of dim 0: 4\n  at: "
        f"{__file__}:{line}\n  needed: a size that may change between calls\n  try: "
        "strict=False, with which shardfn captures the function again for each size"
    )
    hinted = sf.jit(constant, backend="aten", dynamic={"x": {0: Dim.DYNAMIC}})
    with pytest.raises(sf.CaptureError, match="needs a constant size of dim 0: 5"):
        hinted(batch(5))


def summed(x: Tensor) -> Tensor:
    return sf.vmap(lambda row: sf.psum(row, "i"), axis_name="i")(x)


def test_what_cannot_be_read_with_symbols_is_captured_for_each_size() -> None:
    fn = sf.jit(summed, backend="aten", dynamic=0)
    added = []
    for n in (4, 5, 4):
        added.append(captures(lambda n=n: fn(batch(n))))
        check_equal(fn(batch(n)), batch(n).sum(0).expand(n, 3))
    assert added == [1, 1, 0]
    line = "sizes are constants, because the function cannot be captured with symbolic sizes: "
    assert line in fn.explain_retrace(batch(7))
    with pytest.raises(sf.CaptureError, match="dim 0 cannot be read as a symbol"):
        sf.jit(summed)(sf.mark_dynamic(batch(6), 0, strict=True))


BAD_MARKS = {
    "a number": (lambda: sf.mark_dynamic(3, 0), "mark_dynamic: a int"),
    "a list": (lambda: sf.mark_dynamic([batch(2)], 0), "mark_dynamic: a list"),
    "a dim": (lambda: sf.mark_dynamic(batch(2), 2), "the tensor has no dim 2: its shape is (2, 3)"),
    "no dims": (
        lambda: sf.mark_dynamic(torch.ones(()), 0),
        "the tensor has no dim 0: its shape is ()",
    ),
    "not a dim": (lambda: sf.mark_dynamic(batch(2), "x"), "the tensor has no dim 'x'"),
    "strict": (lambda: sf.mark_dynamic(batch(2), 0, strict=1), "strict is 1"),
}
BAD_OPTIONS = {
    "an argument": ({"z": 0}, "there is no argument 'z'"),
    "more": ((0, None, None), "3 entries for 2 positional arguments"),
    "a dim": ((2, None), "x: the tensor has no dim 2: its shape is (2, 3)"),
    "a number": ((None, 0), "n: a int has no dims"),
    "a text": ("x", "a str"),
    "no dim": (({"x"}, None), "x: 'x' is not a dim"),
    "a tree": (({"a": 0}, None), "dynamic"),
    "no hint": (({0: Dim.AUTO, 1: 3}, None), "x: 3 is not a hint for dim 1"),
}


@pytest.mark.parametrize("case", BAD_MARKS)
def test_a_bad_mark_is_refused_by_name(case: str) -> None:
    mark, said = BAD_MARKS[case]
    with pytest.raises(sf.ShardError, match=re.escape(said)):
        mark()


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_refused_by_name(case: str) -> None:
    dynamic, said = BAD_OPTIONS[case]
    fn = sf.jit(lambda x, n: x * n, backend="aten", dynamic=dynamic)
    with pytest.raises(sf.TreeError, match=re.escape(said)) as caught:
        fn(batch(2), 3)
    assert str(caught.value).startswith("jit(<lambda>), dynamic: ")
    assert "try: a prefix tree over the arguments" in str(caught.value)


def test_all_bad_dims_are_listed_at_once() -> None:
    fn = sf.jit(lambda x, y: x + y, backend="aten", dynamic=(5, 7))
    with pytest.raises(sf.TreeError, match=r"no dim 5(.|\n)*no dim 7"):
        fn(batch(2), batch(2))


def on_two_ranks() -> list[Any]:
    """Results, gradients and the number of captures on a real rank."""
    mesh = sf.make_mesh((2,), ("dp",))
    step = sf.shard(
        sf.bucketed_grad(mean_loss), mesh, (None, P("dp")), backend="aten", dynamic=(None, 0)
    )
    outs = [sf.full(step(W, batch(n))) for n in (4, 7, 6, 3)]
    return [outs, counts["captures"]]


def test_two_real_ranks() -> None:
    wanted = [sf.value_and_grad(mean_loss)(W, batch(n)) for n in (4, 7, 6, 3)]
    for outs, count in run_ranks(2, on_two_ranks):
        check_equal(outs, wanted)
        assert count == 1


def halves(x: Tensor) -> Tensor:
    return x.reshape(2, -1)


def test_a_size_that_the_function_refuses_has_the_users_error() -> None:
    fn = sf.jit(halves, backend="aten", dynamic=0)
    fn(batch(4))
    assert not captures(lambda: fn(batch(6)))
    for n in (3, 5):
        with pytest.raises(RuntimeError, match="is invalid for input of size") as caught:
            sf.jit(lambda x: x.reshape(4, -1, 3), backend="aten", dynamic=0)(batch(n))
        assert "jit(<lambda>)" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        sf.jit(lambda x: x.reshape(2, 6), backend="aten", dynamic=0)(batch(5))
