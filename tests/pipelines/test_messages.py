"""Every edge of a pipeline carries the bytes of the textbook, and a coordinate keeps no value for
longer than its schedule says.
"""

from __future__ import annotations

import collections
import itertools
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn.ops.loops import drive_loop
from shardfn.ops.messages import Receive, Send
from shardfn.ops.pipeline import Free, Pipeline, Run, doing
from tests.support.pipelined import Model, gpt, late_parameters, placements, randn

ROWS, WIDTH = 24, 4
WHOLE = ROWS * WIDTH * 8  # bytes of the activations of all microbatches


def blocks(count: int) -> Model:
    """A chain of residual blocks."""
    torch.manual_seed(0)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y = batch
        for up, down in params:
            h = h + torch.tanh(h @ up) @ down
        return F.mse_loss(h, y)

    params = [(randn(WIDTH, 6), randn(6, WIDTH)) for _ in range(count)]
    return Model(loss, params, (randn(ROWS, 4), randn(ROWS, 4)), [(k, k) for k in range(count)])


def pipelines(model: Model, schedule: str, coordinates: int, microbatches: int) -> list[Pipeline]:
    """The pipeline of each coordinate."""
    with sf.fake_world(coordinates):
        places = placements(model, schedule, coordinates, "alone")
        step = sf.shard(
            sf.pipelined_grad(model.loss, microbatches, schedule=schedule),
            sf.make_mesh((coordinates,), ("pp",)),
            in_placements=(places, None),
            backend="aten",
        )
        programs = step.lower(model.params, model.batch).programs
    nodes = [node for program in programs.values() for node in program.graph.nodes]
    return [node.target for node in nodes if isinstance(node.target, Pipeline)]


def sent(parts: list[Pipeline]) -> dict[tuple[int, int], int]:
    """The bytes of each edge: source and target."""
    edges: dict[tuple[int, int], int] = collections.Counter()
    for part in parts:
        for message in part.messages:
            edges[message.source, message.target] += message.aval.nbytes
    return dict(edges)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_activations_go_up_and_cotangents_down_once_a_microbatch(schedule: str) -> None:
    edges = sent(pipelines(blocks(6), schedule, 3, 4))
    assert edges == dict.fromkeys([(0, 1), (1, 2), (2, 1), (1, 0)], WHOLE)


def test_tied_weights_go_up_once_and_their_gradient_comes_down_once() -> None:
    model = gpt(dropout=0.0)
    parts = pipelines(model, "1f1b", 2, 4)
    embedding = model.params["embedding"]
    once = [m for part in parts for m in part.messages if m.action is None]
    assert [(m.source, m.target, m.aval.nbytes) for m in once] == [
        (0, 1, embedding.nbytes),
        (1, 0, embedding.nbytes),
    ]
    activations = 24 * 5 * 8 * 8
    whole = activations + embedding.nbytes
    assert sent(parts) == {(0, 1): whole, (1, 0): whole}


def test_a_parameter_of_an_earlier_stage_goes_up_once_and_its_gradient_comes_home() -> None:
    model = late_parameters()
    once = [m for part in pipelines(model, "1f1b", 4, 3) for m in part.messages if m.action is None]
    sent_up = [(m.source, m.target, m.aval.shape) for m in once if m.source < m.target]
    sent_home = [(m.source, m.target, m.aval.shape) for m in once if m.source > m.target]
    layers = zip(model.params, model.layers, strict=True)
    wanted = [(home, 3, tuple(w.shape)) for w, home in [*layers][4:]]
    assert sorted(sent_up) == sorted(wanted)
    assert sorted(sent_home) == sorted((target, source, shape) for source, target, shape in wanted)


def _is_kept(ref: Any, results: set[Any]) -> bool:
    """Whether a value is kept for the backward only."""
    return ref[0] == "value" and ref[1] not in results


def most_alive(part: Pipeline) -> int:
    """The most microbatches of whose forward a coordinate keeps values at the same time."""
    results = {number for _, number in part.results}  # one scalar a microbatch, the loss
    alive: set[Any] = set()
    most = 0
    for x in part.instructions:
        if isinstance(x, Run):
            alive.update(ref for ref in x.makes if _is_kept(ref, results))
        if isinstance(x, Free):
            alive.difference_update(x.values)
        if isinstance(x, Run) and x.kind == "F":
            most = max(most, len({ref[-1] for ref in alive}))
    return most


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_later_stages(microbatches: int) -> None:
    gpipe = pipelines(blocks(3), "gpipe", 3, microbatches)
    assert [most_alive(part) for part in gpipe] == [microbatches] * 3
    one = pipelines(blocks(3), "1f1b", 3, microbatches)
    assert [most_alive(part) for part in one] == [min(microbatches, 3 - s) for s in range(3)]


class LostError(Exception):
    """Raised in the place of an instruction."""


def seen(part: Pipeline, at: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What `doing` says where the at-th action or message of a coordinate fails."""
    steps = [x for x in part.instructions if isinstance(x, (Run, Send, Receive))]
    count = itertools.count()

    def run(*_: Any) -> list[Any]:
        number = next(count)
        if number == at:
            raise LostError
        step = steps[number]
        return [torch.zeros(())] * (len(step.makes) if isinstance(step, Run) else 1)

    monkeypatch.setattr(Pipeline, "exchange", lambda _: run)
    try:
        drive_loop(part, [torch.zeros(9)] * 9, run)
    except LostError as error:
        return doing(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return None


def test_a_rank_names_its_action_or_the_message_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = pipelines(blocks(2), "1f1b", 2, 1)
    assert seen(first, 0, monkeypatch) == "F of stage 0, microbatch 0"
    sending, _, h = (seen(first, 1, monkeypatch) or "").partition(" ")
    assert sending == "sending" and __file__ in h
    assert "of F of stage 0, microbatch 0, (24, 4) torch.float64 from coordinate 0 to 1" in h
    assert seen(last, 0, monkeypatch) == f"F of stage 1, microbatch 0, waiting for {h}"
    text = seen(first, 2, monkeypatch) or ""
    assert text.startswith("BW of stage 0, microbatch 0, waiting for %")
    assert "of BW of stage 1, microbatch 0, (24, 4) torch.float64 from coordinate 1 to 0" in text


def test_code_without_a_pipeline_names_none() -> None:
    try:
        raise LostError
    except LostError as error:
        assert doing(frame for frame, _ in traceback.walk_tb(error.__traceback__)) is None
