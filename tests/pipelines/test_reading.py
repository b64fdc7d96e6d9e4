"""What a lowered pipeline says of itself: its stages, messages, memory, time and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.support.pipelined import randn

LAYERS, MICROBATCHES, ROWS, WIDTH = 4, 4, 16, 8
ACTIVATION = ROWS // MICROBATCHES * WIDTH * 8  # bytes of one microbatch


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return (x - y).square().mean()


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return [randn(WIDTH, WIDTH) for _ in range(LAYERS)], randn(ROWS, WIDTH), randn(ROWS, WIDTH)


def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    value, grads = sf.pipelined_grad(loss, MICROBATCHES)(params, x, y)
    return value, sf.tree_map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.fixture
def sharded() -> Iterator[Any]:
    """The step on 2 stages, in a world of 2 ranks."""
    with sf.fake_world(2):
        stages = [P(pp=0), P(pp=0), P(pp=1), P(pp=1)]
        mesh = sf.make_mesh((2,), ("pp",))
        yield sf.shard(step, mesh, in_placements=(stages, None, None), backend="aten")


def test_updated_parameters_stay_on_their_stages(sharded: Any) -> None:
    _, new = sharded(*arguments())
    assert [x.placements for x in new] == [(sf.Stage(k // 2),) for k in range(LAYERS)]


def test_a_gradient_without_a_pipeline_is_on_the_stage_of_its_parameter() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        specs = [P(pp=0), P(pp=1)]
        params, x, y = arguments()
        update = lambda p: sf.tree_map(lambda a, b: a - b, p, sf.grad(loss)(p, x, y))
        new = sf.shard(update, mesh, in_placements=(specs,), backend="aten")(params[:2])
    assert [x.placements for x in new] == [(sf.Stage(0),), (sf.Stage(1),)]
    torch.testing.assert_close(sf.full(new), update(params[:2]), rtol=0, atol=1e-10)


def test_messages_are_listed_with_their_bytes_and_lines(sharded: Any) -> None:
    lowered = sharded.lower(*arguments())
    sends = [c for c in lowered.collectives if c.kind == "send"]
    assert [c.nbytes for c in sends] == [ACTIVATION] * MICROBATCHES
    assert all(c.axis == "pp" and "test_reading.py" in c.source for c in sends)
    assert f"{MICROBATCHES} send over pp" in str(sf.explain(sharded, *arguments()))


def test_every_stage_lists_its_messages(sharded: Any) -> None:
    lowered = sharded.lower(*arguments())
    assert lowered.stage(0).collectives == lowered.collectives
    back = [c for c in lowered.stage(1).collectives if c.kind == "send"]
    assert [c.nbytes for c in back] == [ACTIVATION] * MICROBATCHES
    assert all(c.name.endswith("to coordinate 0") for c in back)


def test_a_stage_prints_its_actions(sharded: Any) -> None:
    lowered = sharded.lower(*arguments())
    text = lowered.stage(1).show(lowered.stage(1), full=True)
    assert "F of stage 1(" in text
    assert "BW of stage 1(" in text
    assert "stage 0(" not in text
    with pytest.raises(sf.ShardError, match="k is 2, but the axis has 2 ranks"):
        lowered.stage(2)


def pinned(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(x @ params[0])
    x = sf.constrain(x, P(pp=1)).sin()
    return (x @ params[1] - y).square().mean()


def test_a_constraint_puts_a_value_on_a_stage() -> None:
    params, x, y = arguments()
    args = params[:2], x, y
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("pp",))
        grad = sf.pipelined_grad(pinned, MICROBATCHES)
        run = sf.shard(grad, mesh, in_placements=([P(pp=0), P(pp=2)], None, None), backend="aten")
        text = run.lower(*args).stage(1).show(run.lower(*args).stage(1), full=True)
        found = sf.full(run(*args))
    assert " = sin(" in text and " = tanh(" not in text and " = mm(" not in text
    wanted = sf.accumulate(sf.value_and_grad(pinned), MICROBATCHES)(*args)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_a_constraint_to_an_earlier_stage_is_refused() -> None:
    params, x, y = arguments()
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("pp",))
        specs = ([P(pp=2), P(pp=2)], None, None)
        run = sf.shard(sf.pipelined_grad(pinned, MICROBATCHES), mesh, in_placements=specs)
        with pytest.raises(sf.PlacementError) as error:
            run.lower(params[:2], x, y)
    assert "a value of stage 2 would have to be sent back to stage 1" in str(error.value)
    assert "test_reading.py" in str(error.value)


def test_only_programs_with_stages_have_stages() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        plain = sf.shard(loss, mesh, backend="aten").lower(*arguments())
        with pytest.raises(sf.ShardError, match="no parameter is placed on a pipeline stage"):
            plain.stage(0)


def test_memory_counts_the_microbatches_on_their_way() -> None:
    peaks = {}
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("pp",))
        stages = [P(pp=0), P(pp=0), P(pp=1), P(pp=1)]
        for name in ("gpipe", "1f1b"):
            grad = sf.pipelined_grad(loss, 8, schedule=name)
            run = sf.shard(grad, mesh, in_placements=(stages, None, None), backend="aten")
            peaks[name] = run.lower(*arguments()).memory.peak
    saved = 2 * ROWS // 8 * WIDTH * 8  # of one microbatch: the results of two layers
    assert peaks["gpipe"] - peaks["1f1b"] == 6 * saved


def test_time_has_the_bubble_of_the_schedule(sharded: Any) -> None:
    lowered = sharded.lower(*arguments())
    fast = sf.Link(latency=0.0, bandwidth=1e30)
    time = lowered.time("H100", links={"pp": fast})
    assert 0 < time.bubble < time.total
    assert "bubble" in str(time)


def test_the_certificate_and_the_verbose_text_hold(sharded: Any) -> None:
    lowered = sharded.lower(*arguments())
    assert "BROKEN" not in str(lowered.schedule)
    assert "4 steps of body" in lowered.verbose()
