"""A pipeline that was saved runs as it did before: on simulated ranks, and on processes. A file
whose pipelines cannot run is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stagings import counts
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from shardfn.errors import ArtefactError
from shardfn.runtime.artefacts import file as artefact_file
from tests.support.pipelined import MESHES, MODELS, Model, placements, randn, updated
from tests.support.ranks import run_ranks

CASES = [
    ("mlp", "1f1b", "alone"),
    ("gpt", "zero_bubble", "dp"),
    ("gpt", "interleaved", "zero3"),
    ("late_parameters", "zbv", "tp"),
    ("scanned", "gpipe", "alone"),
]


def step_of(model: Model, schedule: str, mesh: str) -> Any:
    """A training step on two coordinates of stages, in the world of the caller."""
    names, rows = MESHES[mesh]
    over = sf.make_mesh((2,) * len(names), names, device_type="cpu")
    derivative = sf.pipelined_grad(model.loss, 3, schedule=schedule)

    def step(params: Any, batch: Any) -> Any:
        value, gradients = derivative(params, batch)
        return value, updated(params, gradients)

    places = placements(model, schedule, 2, mesh), None if rows is None else P(rows)
    return sf.shard(step, over, in_placements=places, backend="aten")


def bits(results: Any) -> list[torch.Tensor]:
    return [sf.full(x) for x in tree_leaves(results)]


@pytest.mark.parametrize(("name", "schedule", "mesh"), CASES)
def test_a_loaded_pipeline_has_the_bits_of_the_saved_one(
    name: str, schedule: str, mesh: str, tmp_path: Path
) -> None:
    model, path = MODELS[name](), tmp_path / "step.sf"
    ranks = math.prod(2 for _ in MESHES[mesh][0])
    with sf.fake_world(ranks, numerics=False):
        step_of(model, schedule, mesh).compile(model.params, model.batch).save(path)
    with sf.fake_world(ranks):
        step = step_of(model, schedule, mesh)
        sf.random.state.seed(7)
        expected = step(model.params, model.batch)
        before = dict(counts)
        loaded = sf.load_compiled(path)
        sf.random.state.seed(7)
        found = loaded(model.params, model.batch)
        assert dict(counts) == before, "nothing is captured, or partitioned"
        for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert x.placements == y.placements
        assert all(map(torch.equal, bits(found), bits(expected)))
        loaded.save(tmp_path / "again.sf")
        again = sf.load_compiled(tmp_path / "again.sf")
        sf.random.state.seed(7)
        assert all(map(torch.equal, bits(again(model.params, model.batch)), bits(expected)))


@pytest.mark.parametrize("mesh", ["alone", "zero3"])
def test_a_loaded_pipeline_prints_as_the_saved_one(mesh: str, tmp_path: Path) -> None:
    model = MODELS["mlp"]()
    with sf.fake_world(2 ** len(MESHES[mesh][0])):
        compiled = step_of(model, "1f1b", mesh).compile(model.params, model.batch)
        compiled.save(tmp_path / "step.sf")
        loaded = sf.load_compiled(tmp_path / "step.sf")
        assert str(loaded) == str(compiled)
        assert loaded.text() == compiled.text()
        assert {c: str(program) for c, program in loaded.programs.items()} == {
            c: str(program) for c, program in compiled.programs.items()
        }


def test_a_loaded_pipeline_lists_its_messages(tmp_path: Path) -> None:
    model = MODELS["mlp"]()
    with sf.fake_world(2):
        compiled = step_of(model, "1f1b", "alone").compile(model.params, model.batch)
        compiled.save(tmp_path / "step.sf")
        loaded = sf.load_compiled(tmp_path / "step.sf")
        for c, program in compiled.programs.items():
            assert loaded.programs[c].collectives == program.collectives
        assert loaded.memory.peak == compiled.memory.peak


def loss(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    for w in params:
        x = torch.tanh(x @ w) + x
    return (x - y).square().mean()


def arguments() -> Any:
    torch.manual_seed(0)
    return [randn(4, 4) for _ in range(4)], (randn(6, 4), randn(6, 4))


def plain(params: Any, batch: Any) -> Any:
    value, gradients = sf.accumulate(sf.value_and_grad(loss), 3)(params, batch)
    return value, updated(params, gradients)


PARAMS, BATCH = arguments()
CHAIN = Model(loss, PARAMS, BATCH, [0, 1, 2, 3])


def on_ranks(path: str, backend: str) -> Any:
    loaded = sf.load_compiled(path, backend=backend)
    return [x.to_local() for x in tree_leaves(loaded(*arguments()))]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_run_what_a_world_without_values_has_made(backend: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step.sf")
    with sf.fake_world(2, numerics=False):
        step_of(CHAIN, "1f1b", "alone").compile(*arguments()).save(path)
    with sf.fake_world(2):
        simulated = tree_leaves(sf.load_compiled(path)(*arguments()))
    real = run_ranks(2, on_ranks, path, backend)
    for rank, values in enumerate(real):
        for x, y in zip(values, simulated, strict=True):
            if backend == "aten":
                assert torch.equal(x, y.to_local().shards[rank])
            torch.testing.assert_close(x, y.to_local().shards[rank], rtol=0, atol=1e-12)
    for x, y in zip(simulated, tree_leaves(plain(*arguments())), strict=True):
        torch.testing.assert_close(sf.full(x), y, rtol=0, atol=1e-12)


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """A file with other instructions and the right digest, as somebody hostile would write it."""
    with safe_open(path, framework="pt") as found:
        metadata = found.metadata()
    tensors, record = load_file(path), json.loads(metadata["record"])
    rows = [row for said in record["programs"] for row in said["graph"]]
    change([row["fields"]["instructions"] for row in rows if row.get("loop") == "Pipeline"])
    metadata["record"] = json.dumps(record)
    metadata["digest"] = artefact_file._digest(metadata["record"], tensors)
    save_file(tensors, path, metadata)


def first(rows: list[Any], kind: str) -> list[Any]:
    return next(row for row in rows if row[0] == kind)


def read_early(parts: Any) -> None:
    first(parts[0], "run")[5][0] = ["value", 9, 0]


def read_beyond(parts: Any) -> None:
    first(parts[0], "run")[5][0] = ["row", 0, 99]


def send_less(parts: Any) -> None:
    first(parts[0], "send")[4][0][0] -= 1


def receive_more(parts: Any) -> None:
    first(parts[1], "receive")[4][0][0] += 1


def keep_silent(parts: Any) -> None:
    parts[0].remove(first(parts[0], "send"))


def send_to_itself(parts: Any) -> None:
    first(parts[0], "send")[2][1] = 0


def send_over_another(parts: Any) -> None:
    first(parts[0], "send")[1] = "dp"


def send_twice(parts: Any) -> None:
    at = parts[0].index(first(parts[0], "send"))
    parts[0].insert(at, [*parts[0][at][:2], [0, 1, 99], *parts[0][at][3:]])


def leave_gaps(parts: Any) -> None:
    for part, kind in ((parts[0], "send"), (parts[1], "receive")):
        first(part, kind)[4][1] = [10**6, 1]


HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "reads early": (read_early, "is read before it is computed"),
    "reads beyond": (read_beyond, "is read before it is computed"),
    "sends less": (send_less, "reads values whose shapes do not match"),
    "receives more": (receive_more, "reads values whose shapes do not match"),
    "keeps silent": (keep_silent, "wait for each other"),
    "sends to itself": (send_to_itself, "a message of another coordinate"),
    "another axis": (send_over_another, "KeyError"),
    "sends twice": (send_twice, "a message that nobody receives"),
    "gaps": (leave_gaps, "must be dense"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_pipeline_that_cannot_run_is_refused(kind: str, tmp_path: Path) -> None:
    change, said = HOSTILE[kind]
    path = tmp_path / "step.sf"
    with sf.fake_world(2):
        step_of(CHAIN, "1f1b", "alone").compile(*arguments()).save(path)
        rewritten(path, change)
        with pytest.raises(ArtefactError, match="cannot be read as a saved program") as caught:
            sf.load_compiled(path)
    assert said in str(caught.value)
