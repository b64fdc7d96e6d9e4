"""Values on stages meet other placements on the same axis: whole, and sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import shardfn as sf
from shardfn import P
from tests.support.pipelined import difference, mlp, placements

WHOLE, ROWS, FIRST = "(Replicate(),)", "(Shard(dim=0),)", "(Stage(0),)"


def placed(function: Callable[..., Any], batch: Any = None, **options: Any) -> list[str]:
    """Run a function of (params, batch), of an MLP on two stages, and compare it with one device.

    Returns:
        The placements of its results.
    """
    model = mlp(4)
    expected = function(model.params, model.batch)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        ins = placements(model, "1f1b", 2, "alone"), batch
        sharded = sf.shard(function, mesh, ins, backend="aten", **options)
        results = sharded(model.params, model.batch)
        assert difference(sf.full(results), expected) < 1e-10
    return [str(x.placements) for x in torch.utils._pytree.tree_leaves(results)]


def test_a_constraint_that_names_no_stage_puts_a_result_on_all_coordinates() -> None:
    def whole(params: Any, batch: Any) -> Any:
        w = params[0]["w"]
        return sf.constrain(w, P()), w

    assert placed(whole) == [WHOLE, FIRST]


@pytest.mark.parametrize("method", ["redistribute", "full_tensor"])
def test_methods_of_dtensors_put_a_result_on_all_coordinates(method: str) -> None:
    model = mlp(4)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))

        def whole(params: Any) -> Any:
            w: Any = params[0]["w"]
            return (
                w.full_tensor() if method == "full_tensor" else w.redistribute(mesh, [Replicate()])
            )

        ins = placements(model, "1f1b", 2, "alone")
        params = sf.distribute(model.params, mesh, ins)
        result = sf.shard(whole, mesh, (ins,), backend="aten")(params)
        assert str(result.placements) == WHOLE
        assert torch.equal(sf.full(result), model.params[0]["w"])


def test_a_value_of_a_stage_may_be_sharded_over_the_axis_of_stages() -> None:
    def spread(params: Any, batch: Any) -> Any:
        w = sf.constrain(params[0]["w"], P("pp"))
        rows = sf.constrain(batch[0], P("pp"))
        return w, w * 2, rows, rows @ params[3]["w"].t(), params[0]["w"]

    # an op has no shards of this axis: what it reads is gathered first
    assert placed(spread) == [ROWS, WHOLE, ROWS, WHOLE, FIRST]


def test_carries_of_a_loop_may_be_sharded_over_the_axis_of_stages() -> None:
    def looped(params: Any, batch: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            return sf.constrain(h + params[0]["w"], P("pp")), x * 2

        return sf.scan(body, torch.zeros_like(params[0]["w"]), batch[0][:3])

    assert placed(looped) == [ROWS, WHOLE]


def test_results_may_be_sharded_over_the_axis_of_stages() -> None:
    double = lambda params, batch: (params[0]["w"] * 2, batch[0] * 2)
    assert placed(double, out_placements=P("pp")) == [ROWS, ROWS]


def test_a_batch_may_be_sharded_over_the_axis_of_stages() -> None:
    model = mlp(4)

    def step(params: Any, batch: Any) -> Any:
        return sf.pipelined_grad(model.loss, 3)(params, batch), batch[0], batch[1] * 2

    assert placed(step, P("pp"))[-2:] == [ROWS, WHOLE]


def test_a_value_that_is_constrained_to_a_stage_moves_its_readers_there() -> None:
    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        h = sf.constrain(torch.tanh(x @ params[0]) * 2, sf.Stage(1))
        for w in params[1:]:
            h = torch.tanh(h @ w)
        return h.square().mean()

    torch.manual_seed(0)
    params = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(6, 4, dtype=torch.float64)
    value, gradients = sf.value_and_grad(loss)(params, x)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        stages = [P(pp=0), P(pp=1), P(pp=1)]
        step = sf.shard(sf.pipelined_grad(loss, 3), mesh, (stages, None), backend="aten")
        torch.testing.assert_close(sf.full(step(params, x)), (value, gradients), rtol=0, atol=1e-14)
        sent = [c.name for c in step.lower(params, x).collectives if c.kind == "send"]
        assert len(sent) == 3 and {*sent} == {"%mul_1 to coordinate 1"}
