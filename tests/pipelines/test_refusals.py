"""What a pipeline cannot run is refused by name before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from tests.support.pipelined import randn


def loss(params: Any, batch: Any) -> torch.Tensor:
    h, y = batch
    for w in params:
        h = torch.tanh(h @ w)
    return F.mse_loss(h, y)


def refused(
    places: Any,
    *,
    rows: int = 12,
    mesh: tuple[tuple[int, ...], tuple[str, ...]] = ((2,), ("pp",)),
    make: Callable[[Any], Any] = lambda step: step,
    **options: Any,
) -> str:
    """The error of a step."""
    torch.manual_seed(0)
    params, batch = [randn(4, 4) for _ in range(2)], (randn(rows, 4), randn(rows, 4))
    size = torch.Size(mesh[0]).numel()
    with sf.fake_world(size), pytest.raises(sf.ShardError) as error:
        step = make(sf.pipelined_grad(loss, 3, **options))
        sharded = sf.shard(step, sf.make_mesh(*mesh), in_placements=(places, None), backend="aten")
        sharded(params, batch)
    return str(error.value)


FIRST, LAST = sf.P(pp=0), sf.P(pp=1)


def test_a_parameter_on_no_stage() -> None:
    text = refused([FIRST, None])
    assert "params[1] is on no stage" in text and "sf.strategy('pipeline', params, mesh)" in text


def test_a_value_that_would_go_back_names_its_parameter_and_line() -> None:
    text = refused([LAST, FIRST])
    assert "params[1] is on stage 0, but is first read on stage 1, at " in text
    assert "test_refusals.py" in text


def refused_loss(loss_fn: Callable[..., Any], places: Any, mesh: Any = ((2,), ("pp",))) -> str:
    """The error of a loss of a batch, whose parameters are 4 x 4."""
    torch.manual_seed(0)
    params, batch = [randn(4, 4) for _ in places], (randn(12, 4), randn(12, 4))
    with sf.fake_world(torch.Size(mesh[0]).numel()), pytest.raises(sf.PlacementError) as error:
        step = sf.pipelined_grad(loss_fn, 3)
        sf.shard(step, sf.make_mesh(*mesh), (places, None), backend="aten")(params, batch)
    return str(error.value)


def joined(params: Any, batch: Any) -> torch.Tensor:
    """A product with two parameters that one op joins."""
    return F.mse_loss(batch[0] @ torch.cat(params, 1), batch[1].repeat(1, 2))


def normed(params: Any, batch: Any) -> torch.Tensor:
    """A norm whose weight is a row of one parameter, and its bias a row of another."""
    h = F.group_norm(batch[0].unsqueeze(2), 2, params[0][0], params[1][0])
    return F.mse_loss(h.squeeze(2), batch[1])


@pytest.mark.parametrize("loss_fn", [joined, normed])
@pytest.mark.parametrize("dp", [False, True])
def test_an_op_that_reads_parameters_of_two_stages_names_both(
    loss_fn: Callable[..., Any], dp: bool
) -> None:
    if dp:
        places, mesh = [sf.P("dp", pp=0), sf.P("dp", pp=1)], ((2, 2), ("dp", "pp"))
    else:
        places, mesh = [FIRST, LAST], ((2,), ("pp",))
    text = refused_loss(loss_fn, places, mesh)
    assert "params[0] is on stage 0, but is first read on stage 1, at " in text
    assert "test_refusals.py" in text and "with params[1] of that stage" in text
    assert (
        "try: place each parameter on the stage that reads it first: stages follow the order"
        in text
    )


def test_a_value_of_a_microbatch_that_is_sharded_over_the_axis_of_stages() -> None:
    def spread(params: Any, batch: Any) -> torch.Tensor:
        h = sf.constrain(torch.tanh(batch[0] @ params[0]), sf.P("pp"))
        return F.mse_loss(h @ params[1], batch[1])

    text = refused_loss(spread, [FIRST, LAST])
    assert "a value is sharded over 'pp', at " in text and "test_refusals.py" in text
    assert "try: shard over other axes, since 'pp' is the axis of the stages" in text


def test_a_parameter_that_a_microbatch_shards_over_the_axis_of_stages() -> None:
    def spread(params: Any, batch: Any) -> torch.Tensor:
        return loss([sf.constrain(w, sf.P("pp")) for w in params], batch)

    assert "params[1] is sharded over 'pp'" in refused_loss(spread, [FIRST, LAST])


def test_a_batch_that_cannot_be_split_evenly() -> None:
    assert "pipelined_grad(loss)" in refused([FIRST, LAST], rows=11)


def test_an_axis_that_the_mesh_does_not_have() -> None:
    assert "'stages'" in refused([FIRST, LAST], axis="stages")


def test_stages_on_two_axes() -> None:
    text = refused([FIRST, sf.P(other=1)], mesh=((2, 2), ("pp", "other")))
    assert "values are on stages of 'pp' and 'other'" in text
    assert "needed: stages of one axis" in text


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (
            sf.schedules.one_f_one_b(4, 3),
            "the schedule is for 4 pipeline ranks, but the axis has 2 ranks",
        ),
        (sf.schedules.one_f_one_b(2, 5), "the schedule has 5 microbatches, but the call has 3"),
    ],
)
def test_a_schedule_of_another_size(schedule: sf.Schedule, problem: str) -> None:
    assert problem in refused([FIRST, LAST], schedule=schedule)


def test_a_chunk_that_the_schedule_does_not_have() -> None:
    text = refused([FIRST, sf.P(pp=sf.Stage(0, 1))], schedule="1f1b")
    assert "the schedule has 1 stages on pipeline rank 0, but a parameter is on stage 1" in text


def with_aux(number: int) -> Callable[[Any], Any]:
    """Makes a step whose aux is one of the arguments of its loss."""

    def both(params: Any, batch: Any) -> Any:
        return loss(params, batch), (params, batch)[number][0]

    return lambda _: sf.pipelined_grad(both, 3, has_aux=True)


@pytest.mark.parametrize("number", [0, 1])
def test_aux_may_be_an_argument(number: int) -> None:
    torch.manual_seed(0)
    params, batch = [randn(4, 4) for _ in range(2)], (randn(12, 4), randn(12, 4))
    step = with_aux(number)(None)
    (value, aux), gradients = step(params, batch)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        sharded = sf.shard(step, mesh, in_placements=([FIRST, LAST], None), backend="aten")
        found = sf.full(sharded(params, batch))
    torch.testing.assert_close(found, ((value, aux), gradients), rtol=0, atol=1e-10)


def test_autograd_does_not_follow_a_derivative_of_a_pipelined_gradient() -> None:
    def norm(params: Any, batch: Any) -> torch.Tensor:
        return sum((g**2).sum() for g in sf.pipelined_grad(loss, 3)(params, batch)[1])

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        params = sf.distribute([randn(4, 4) for _ in range(2)], mesh, [FIRST, LAST])
        followed = [x.detach().requires_grad_() for x in params]
        step = sf.value_and_grad(norm)
        sharded = sf.shard(step, mesh, in_placements=([FIRST, LAST], None), backend="aten")
        batch = randn(12, 4), randn(12, 4)
        with pytest.raises(sf.PlacementError) as error:
            sharded(followed, batch)
        with torch.no_grad():
            sharded(followed, batch)
    text = str(error.value)
    assert (
        "autograd records the call, and would differentiate the pipelined_grad in the function"
        in text
    )
    assert "try: call under torch.no_grad()" in text
