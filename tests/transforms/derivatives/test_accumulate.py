"""accumulate: the mean over microbatches, with one reduction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from message import without_line
from torch.testing import assert_close

import shardfn as sf
from shardfn import P, Partial

WIDTH, ROWS, K = 5, 24, 4


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for layer in params:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return ((x - batch["y"]) ** 2).mean()


def with_aux(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch), {"rows": batch["x"].sum()}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def problem() -> tuple[Any, Any, Any]:
    """(parameters, batch, what value_and_grad gives)."""
    torch.manual_seed(3)
    params = [{"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for _ in range(3)]
    batch = {"x": draw(ROWS, WIDTH), "y": draw(ROWS, WIDTH)}
    return params, batch, sf.value_and_grad(loss_fn)(params, batch)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with sf.fake_world(3):
        yield sf.make_mesh((3,), ("dp",), device_type="cpu")


def same(got: Any, wanted: Any) -> None:
    sf.tree_map(lambda a, b: assert_close(a, b, rtol=1e-12, atol=1e-13), got, wanted)


def reductions(fn: Any, *args: Any) -> int:
    """How many collectives carry more than a scalar."""
    return sum(c.nbytes > 8 for c in fn.lower(*args).collectives)


@pytest.mark.parametrize("k", [1, 2, K, ROWS])
def test_a_gradient_over_microbatches_is_that_of_the_whole_batch(problem: Any, k: int) -> None:
    params, batch, wanted = problem
    same(sf.accumulate(sf.value_and_grad(loss_fn), microbatches=k)(params, batch), wanted)
    same(sf.accumulate(sf.bucketed_grad(loss_fn), microbatches=k)(params, batch), wanted)
    same(sf.accumulate(sf.grad(loss_fn), microbatches=k)(params, batch), wanted[1])


def test_a_loss_over_microbatches_can_be_differentiated(problem: Any) -> None:
    params, batch, wanted = problem
    same(sf.accumulate(loss_fn, microbatches=K)(params, batch), wanted[0])
    same(sf.bucketed_grad(sf.accumulate(loss_fn, microbatches=K))(params, batch), wanted)


def test_aux_of_the_microbatches_is_stacked(problem: Any) -> None:
    params, batch, wanted = problem
    (loss, aux), grads = sf.accumulate(sf.bucketed_grad(with_aux, has_aux=True), microbatches=K)(
        params, batch
    )
    same((loss, grads), wanted)
    assert aux["rows"].shape == (K,)
    same(aux["rows"].sum(), batch["x"].sum())


@pytest.mark.parametrize("where", [P(), P("dp")], ids=["replicated", "sharded"])
def test_gradients_are_reduced_once_whatever_the_number_of_microbatches(
    problem: Any, mesh: Any, where: P
) -> None:
    params, batch, wanted = problem
    counts = set()
    for k in (1, 2, K):
        step = sf.shard(
            sf.accumulate(sf.bucketed_grad(loss_fn), microbatches=k),
            mesh,
            (where, P("dp")),
            backend="aten",
        )
        lowered = step.lower(params, batch)
        counts.add(
            sum(
                c.kind in ("all_reduce", "reduce_scatter") and c.nbytes > 8
                for c in lowered.collectives
            )
        )
        assert lowered.schedule.holds
        same(sf.full(step(params, batch)), wanted)
    assert counts == {1}


def test_cutting_microbatches_sends_nothing(problem: Any, mesh: Any) -> None:
    params, batch, _ = problem
    step = sf.shard(
        sf.accumulate(sf.bucketed_grad(loss_fn), microbatches=K),
        mesh,
        (P(), P("dp")),
        backend="aten",
    )
    assert {c.kind for c in step.lower(params, batch).collectives} == {"all_reduce"}


def test_a_function_of_ones_own_that_adds_gradients_up_reduces_them_once_too(
    problem: Any, mesh: Any
) -> None:
    params, batch, wanted = problem

    def by_hand(params: Any, batch: Any) -> Any:
        halves = [
            sf.tree_map(lambda x, i=i: x.reshape(ROWS // 2, 2, WIDTH)[:, i], batch)
            for i in range(2)
        ]
        (a, f), (b, g) = (sf.bucketed_grad(loss_fn)(params, half) for half in halves)
        return (a + b) / 2, sf.tree_map(lambda x, y: (x + y) / 2, f, g)

    step = sf.shard(by_hand, mesh, (P(), P("dp")), backend="aten")
    assert reductions(step, params, batch) == 1
    same(sf.full(step(params, batch)), wanted)

    def inner(params: Any, batch: Any) -> Any:
        return sf.bucketed_grad(loss_fn)(params, batch)

    wrapped = sf.shard(sf.accumulate(inner, microbatches=K), mesh, (P(), P("dp")), backend="aten")
    assert reductions(wrapped, params, batch) == 1
    same(sf.full(wrapped(params, batch)), wanted)


def test_gradients_may_be_returned_unreduced_added_up_and_reduced_later(
    problem: Any, mesh: Any
) -> None:
    params, batch, wanted = problem
    pending = (P(), [Partial()])
    halves = [sf.tree_map(lambda x, i=i: x[i::2], batch) for i in range(2)]
    found = sf.shard(sf.bucketed_grad(loss_fn), mesh, (P(), P("dp")), pending, backend="aten")
    assert reductions(found, params, halves[0]) == 0
    assert "returned unreduced: params[0]['w']" in str(found.lower(params, halves[0]).plan)
    (_, f), (_, g) = (found(params, half) for half in halves)
    add = sf.shard(
        lambda f, g: sf.tree_map(lambda x, y: (x + y) / 2, f, g),
        mesh,
        None,
        [Partial()],
        backend="aten",
    )
    assert reductions(add, f, g) == 0
    reduce = sf.shard(lambda g: sf.constrain(g, P()), mesh, backend="aten")
    same(sf.full(reduce(add(f, g))), wanted[1])


def test_an_unreduced_gradient_that_is_used_as_it_is_is_refused_with_the_line(
    problem: Any, mesh: Any
) -> None:
    params, batch, _ = problem
    g = sf.shard(sf.grad(loss_fn), mesh, (P(), P("dp")), [Partial()], backend="aten")(params, batch)
    with pytest.raises(sf.PlacementError) as error:
        sf.shard(lambda p, g: sf.tree_map(lambda x, y: x - 0.1 * y, p, g), mesh, backend="aten")(
            params, g
        )
    said = str(error.value)
    assert said.startswith("shard(<lambda>), argument g[0]['")
    assert (
        "the value is an unreduced gradient (Partial sum over dp), but sub needs the reduced value"
        in said
    )
    assert f"  at: {__file__}:" in said and "sf.constrain(x, P())" in said


def test_a_gradient_that_is_reduced_cannot_be_called_unreduced(problem: Any, mesh: Any) -> None:
    params, batch, _ = problem
    twice = sf.shard(
        lambda p, b: sf.tree_map(lambda g: g * 2, sf.grad(loss_fn)(p, b)),
        mesh,
        (P(), P("dp")),
        [Partial()],
        backend="aten",
    )
    with pytest.raises(sf.PlacementError) as error:
        twice(params, batch)
    assert (
        "the value is already reduced, or was never Partial, so its placement cannot stay sum "
        "over dp"
    ) in str(error.value)
    reduced = sf.shard(sf.grad(loss_fn), mesh, (P(), P("dp")), backend="aten")(params, batch)
    with pytest.raises(
        sf.PlacementError,
        match="is placed Replicate\\(\\) on dp, but in_placements says Partial\\(sum\\) on dp",
    ):
        sf.shard(lambda g: sf.constrain(g, P()), mesh, [Partial()], backend="aten")(reduced)


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_a_number_of_microbatches_that_is_none_is_refused(k: Any) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.accumulate(loss_fn, k)
    wanted = (
        f"accumulate(loss_fn): microbatches is {k!r}\n  needed: a positive int\n"
        "  try: microbatches=1 or more"
    )
    assert without_line(error.value) == wanted


def test_a_batch_that_cannot_be_cut_evenly_is_refused(problem: Any) -> None:
    params, batch, _ = problem
    with pytest.raises(sf.TreeError) as error:
        sf.accumulate(sf.grad(loss_fn), microbatches=7)(params, batch)
    assert without_line(error.value) == "\n".join([
        "accumulate(grad(loss_fn)): the batch cannot be split into 7 equal microbatches",
        "  args[1]['x'] has 24 rows",
        "  args[1]['y'] has 24 rows",
        (
            "  try: pass a batch whose dim 0 is a multiple of microbatches; set batch_argnums "
"to the arguments that are batches"
            ),
    ])  # fmt: skip


VIEWS = {
    "flat": lambda x: x.view(-1),
    "split": lambda x: x.view(x.shape[0], 2, -1).flatten(0, 1).view(-1),
    "last channels": lambda x: x.permute(0, 2, 3, 1).view(-1, 3),
    "as other dtype": lambda x: x.view(torch.int64).view(torch.float64),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_microbatch_can_be_viewed_as_the_batch_can(name: str, mapped: bool, mesh: Any) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (VIEWS[name](x).reshape(x.shape[0], -1) * w).sin().mean()

    torch.manual_seed(0)
    w, x = draw(24), draw(6, 3, 2, 4)
    if name == "last channels":
        x = x.to(memory_format=torch.channels_last)
    fn = sf.accumulate(sf.value_and_grad(loss), microbatches=2)
    fn = sf.vmap(fn, in_axes=(0, None)) if mapped else fn
    args = (torch.stack([w, w + 1]) if mapped else w, x)
    each = [torch.func.grad_and_value(loss)(w + i, x) for i in range(2 if mapped else 1)]
    value, grad = (torch.stack([pair[i] for pair in each]) for i in (1, 0))
    wanted = (value, grad) if mapped else (value[0], grad[0])
    same(sf.jit(fn, backend="aten")(*args), wanted)
    call = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")
    same(sf.full(call(*args)), wanted)
