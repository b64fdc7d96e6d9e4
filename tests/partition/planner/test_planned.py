"""Programs whose placements are chosen at once: what they send, and that their values are those
of one device.
"""

from __future__ import annotations

import importlib
from typing import Any

import models
import pytest
import schemes
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P, ShardError
from shardfn.partition.planner import integer_program, solve_axes
from shardfn.partition.planner.observed_walk import FEW
from shardfn.partition.planner.plan_price import PlanPrice

planning = importlib.import_module("shardfn.partition.propagate")
MIB = 2**20
SHAPES = dict(emb=(1000, 512), up=(512, 2048), down=(2048, 512), head=(512, 1000))
PARAMS = {name: sf.ShapeDtype(shape) for name, shape in SHAPES.items()}
TOKENS = sf.ShapeDtype((128, 128), torch.int64)
COLUMNS = dict.fromkeys(PARAMS, P(None, "dp"))


def language_model(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    h = torch.relu(p["emb"][tokens] @ p["up"]) @ p["down"]
    return F.cross_entropy((h @ p["head"]).flatten(0, 1), tokens.flatten())


def lowered(emb: P, **options: Any) -> Any:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        places = ({**COLUMNS, "emb": emb}, P("dp"))
        step = sf.shard(sf.grad(language_model), mesh, places, **options)
        return step.lower(PARAMS, TOKENS)


def sent(low: Any) -> float:
    """MiB that a rank sends, as the collectives of the program say."""
    rounds = {"all_reduce": 2.0, "all_to_all": 1.0}
    return sum(rounds.get(c.kind, 1.0) * c.nbytes * 3 / 4 for c in low.collectives) / MIB


def test_an_embedding_sharded_on_features_costs_no_more_than_one_sharded_on_rows() -> None:
    features = lowered(P(None, "dp"))
    assert sent(features) < 30
    assert sent(features) < 1.1 * sent(lowered(P("dp")))
    assert sent(lowered(P(None, "dp"), planner="greedy")) > 100


def test_a_program_whose_first_plan_is_the_cheapest_stays_as_it_is() -> None:
    assert str(lowered(P("dp"))) == str(lowered(P("dp"), planner="greedy"))


def test_equal_calls_are_planned_alike() -> None:
    assert str(lowered(P(None, "dp"))) == str(lowered(P(None, "dp")))


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every program is planned at once, however little it sends, and follows that plan."""
    compared: list[Any] = []
    monkeypatch.setattr(planning, "WORTH", -1.0)
    monkeypatch.setattr(PlanPrice, "is_below", lambda self, other: compared.append(self) or True)
    return compared


WORLDS: dict[str, tuple[dict[str, int], str, Any]] = {
    "data parallel": ({"dp": 3}, "replicated", P("dp")),
    "fully sharded": ({"dp": 3}, "fully_sharded", P("dp")),
    "tensor parallel": ({"tp": 2}, "tensor_parallel", P()),
    "both": ({"dp": 2, "tp": 2}, "mixed", P("dp")),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model", models.LOSSES)
def test_values_are_those_of_one_device(model: str, world: str, followed: list[Any]) -> None:
    loss, make_params, make_batch = models.LOSSES[model]
    params, (x, y) = make_params(), make_batch(5)
    axes, scheme, batch = WORLDS[world]
    size = torch.Size(axes.values()).numel()
    with sf.fake_world(size):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        places = (getattr(schemes, scheme)(params), batch, batch)
        step = sf.shard(models.STEPS[model], mesh, places, backend="aten")
        got = sf.full(step(params, x, y))
    assert followed
    wanted = models.oracle(loss, params, x, y)
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def on_a_rank() -> Any:
    planning.WORTH = 2.0**20  # so small a program is worth a plan here
    generator = torch.Generator().manual_seed(3)
    shapes = dict(emb=(500, 64), up=(64, 256), down=(256, 64), head=(64, 500))
    params = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    tokens = torch.randint(0, 500, (128, 60), generator=generator)
    mesh = sf.make_mesh((2,), ("dp",))
    places = (COLUMNS, P("dp"))
    step = sf.shard(sf.grad(language_model), mesh, places, backend="aten")
    greedy = sf.shard(sf.grad(language_model), mesh, places, planner="greedy")
    kinds, others = ([c.kind for c in f.lower(params, tokens).collectives] for f in (step, greedy))
    assert kinds != others
    return (sf.full(step(params, tokens)), sf.grad(language_model)(params, tokens), kinds)


def test_two_processes_compute_what_one_device_does_and_plan_alike() -> None:
    first, second = run_ranks(2, on_a_rank)
    assert first[2] == second[2]
    for got, wanted, _ in (first, second):
        for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_when_time_is_up_the_first_plan_is_taken_and_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integer_program, "SECONDS", 0.0)
    said: list[str] = []
    monkeypatch.setattr(solve_axes.log, "warning", lambda text, *args: said.append(text % args))
    low = lowered(P(None, "dp"))
    assert str(low) == str(lowered(P(None, "dp"), planner="greedy"))
    assert said == [
        "shard(grad(language_model)): the placements on axis dp were not planned within the "
        "search limits; shardfn takes the cheapest strategy of each op, as with "
        'planner="greedy"'
    ]


def layers(p: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in p:
        x = x + torch.relu(x @ up) @ down
    return x.square().mean()


def test_equal_layers_are_planned_as_one(
    monkeypatch: pytest.MonkeyPatch, followed: list[Any]
) -> None:
    sizes: list[int] = []
    solve = integer_program.IntegerProgram.solve
    monkeypatch.setattr(
        integer_program.IntegerProgram,
        "solve",
        lambda self: sizes.append(len(self.costs)) or solve(self),
    )
    up, down = sf.ShapeDtype((256, 1024)), sf.ShapeDtype((1024, 256))
    for depth in (20, 40):
        with sf.fake_world(4):
            mesh = sf.make_mesh((4,), ("dp",))
            step = sf.shard(sf.grad(layers), mesh, (P(None, "dp"), P("dp")))
            low = step.lower([(up, down)] * depth, sf.ShapeDtype((512, 256)))
            assert len(low.traced.program.graph.graph.nodes) > FEW
    half = len(sizes) // 2
    assert sizes[:half] == sizes[half:]


STACKED = dict(up=(6, 64, 256), down=(6, 256, 64))


def scanned(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    step = lambda x, w: (x + torch.relu(x @ w["up"]) @ w["down"], None)
    x, _ = sf.scan(step, p["emb"][tokens], p["layers"])
    return F.cross_entropy((x @ p["head"]).flatten(0, 1), tokens.flatten())


def test_the_carry_of_a_scan_is_planned_and_its_values_are_those_of_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "WORTH", 2.0**20)
    generator = torch.Generator().manual_seed(5)
    drawn = lambda *shape: torch.randn(shape, generator=generator).double() / 8
    params = dict(
        emb=drawn(300, 64),
        head=drawn(64, 300),
        layers={name: drawn(*shape) for name, shape in STACKED.items()},
    )
    tokens = torch.randint(0, 300, (36, 60), generator=generator)
    rows = P(None, "dp")
    places = dict(emb=rows, head=rows, layers=P(None, "dp"))
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        fn, where = sf.grad(scanned), (places, P("dp"))
        step = sf.shard(fn, mesh, where, backend="aten")
        greedy = sf.shard(fn, mesh, where, planner="greedy")
        planned = step.lower(params, tokens)
        assert planned.partition.advice.carries == {(36, 60, 64): (0,)}
        assert sent(planned) < 0.5 * sent(greedy.lower(params, tokens))
        got = sf.full(step(params, tokens))
    for a, b in zip(tree_leaves(got), tree_leaves(fn(params, tokens)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_weight_is_not_gathered_for_a_product_that_all_ranks_would_compute() -> None:
    """The weight is sharded where the product sums, and its input on no dim."""
    x, w = sf.ShapeDtype((4096, 4096)), sf.ShapeDtype((4096, 4096))
    kinds = []
    for planner in ("greedy", "global"):
        with sf.fake_world(8):
            mesh = sf.make_mesh((8,), ("tp",))
            step = sf.shard(
                sf.value_and_grad(lambda w, x: (x @ w).square().mean()),
                mesh,
                (P("tp"), P()),
                planner=planner,
            )
            kinds.append([c.kind for c in step.lower(w, x).collectives])
    assert "all_gather" in kinds[0]
    assert "all_gather" not in kinds[1]


def test_an_unknown_planner_is_refused_by_name() -> None:
    with pytest.raises(ShardError, match="planner is 'best'") as error:
        sf.shard(layers, planner="best")
    assert "one of greedy, global" in str(error.value)
