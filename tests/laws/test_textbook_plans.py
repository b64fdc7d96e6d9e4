"""A plan is never dearer than a textbook's: a step of a Llama with the widths of 70 billion
parameters, as data parallel, fully sharded, tensor parallel, sequence parallel and both at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner import llama
from shardfn import P
from shardfn.hardware import H100, SENT
from shardfn.partition import propagate
from shardfn.partition.auto import fused_op_cost
from shardfn.partition.planner.plan_price import PlanPrice, plan_price
from shardfn.partition.planner.start_costs import with_hardware_links

LAYERS = 2
COLUMN, ROW = P(None, None, "tp"), P(None, "tp")
TENSOR = dict(wq=COLUMN, wk=COLUMN, wv=COLUMN, wo=ROW, wg=COLUMN, wu=COLUMN, wd=ROW)
WITHIN = 1.05  # of plans that take about the same time, the one that sends less is taken


def loss(p: Any, tokens: torch.Tensor, pinned: P | None, remat: bool) -> torch.Tensor:
    """The loss of a Llama, whose values between layers are pinned as a person would."""
    pin = (lambda x: x) if pinned is None else (lambda x: sf.constrain(x, pinned))
    layer = lambda x, w: pin(llama.layer(x, w))
    layer = sf.checkpoint(layer) if remat else layer
    x, _ = sf.scan(lambda c, w: (layer(c, w), None), pin(p["emb"][tokens]), p["layers"])
    logits = llama.normed(x, p["n"]) @ p["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def step(pinned: P | None = None, remat: bool = False) -> Callable[..., Any]:
    one = functools.partial(loss, pinned=pinned, remat=remat)

    def step(p: Any, tokens: torch.Tensor) -> Any:
        value, g = sf.value_and_grad(one)(p, tokens)
        return sf.tree_map(lambda a, b: a - 0.1 * b, p, g), value

    return step


@attrs.frozen
class World:
    """A mesh, and the rows of a batch."""

    sizes: tuple[int, ...]
    rows: int
    context: int = 4096

    @property
    def args(self) -> Any:
        sizes = attrs.evolve(llama.SEVENTY, batch=self.rows, context=self.context)
        return llama.shapes(LAYERS, True, sizes)


def fully_sharded(mesh: Any, axis: Any, base: Any = None) -> Any:
    """Parameters sharded over some axes, but for the dim of the layers."""
    params, _ = llama.shapes(LAYERS, True)
    layer = {k: sf.ShapeDtype(x.shape[1:], x.dtype) for k, x in params["layers"].items()}
    below = base and {**base, "layers": {k: P(*x.parts[1:]) for k, x in base["layers"].items()}}
    found = sf.fsdp({**params, "layers": layer}, mesh, axis=axis, base=below)
    return {**found, "layers": {k: P(None, *x.parts) for k, x in found["layers"].items()}}


def tensor() -> Any:
    layers = dict(n1=P(), n2=P(), **TENSOR)
    return dict(emb=P("tp"), n=P(), head=P(None, "tp"), layers=layers)


# the axes, the parameters, the batch, and the values between layers in one way or more
Book = tuple[tuple[str, ...], Callable[[Any], Any], P, tuple[P, ...]]
BOTH = P(("dp", "tp"))
BOOKS: dict[str, Book] = {
    "ddp": (("dp",), lambda mesh: P(), P("dp"), (P("dp"),)),
    "zero3": (("dp",), lambda mesh: fully_sharded(mesh, "dp"), P("dp"), (P("dp"),)),
    "tensor": (("tp",), lambda mesh: tensor(), P(), (P(), P(None, "tp"))),
    "ddp over both": (("dp", "tp"), lambda mesh: P(), BOTH, (BOTH,)),
    "zero3 over both": (
        ("dp", "tp"),
        lambda mesh: fully_sharded(mesh, ("dp", "tp")),
        BOTH,
        (BOTH,),
    ),
    "hsdp": (("dp", "tp"), lambda mesh: fully_sharded(mesh, "tp"), BOTH, (BOTH,)),
    "ddp, tensor": (("dp", "tp"), lambda mesh: tensor(), P("dp"), (P("dp"), P("dp", "tp"))),
    "zero3, tensor": (
        ("dp", "tp"),
        lambda mesh: fully_sharded(mesh, "dp", tensor()),
        P("dp"),
        (P("dp"), P("dp", "tp")),
    ),
}
WORLDS = [
    World((8,), 1),
    World((8,), 16),
    World((64,), 64),
    World((1024,), 256),
    World((2, 4), 8),
    World((8, 8), 64),
    World((128, 8), 256),
    World((128, 8), 1024),
]
CASES = [
    pytest.param(world, name, remat, id=f"{world.sizes}-{world.rows}-{name}-{remat}")
    for world in WORLDS
    for name, (axes, *_) in BOOKS.items()
    if len(axes) == len(world.sizes)
    for remat in (False, True)
]
SAMPLED = [
    pytest.param(World((1024,), 256), "zero3", True, id="few rows"),
    pytest.param(World((8,), 1), "tensor", False, id="thin products"),
    pytest.param(World((128, 8), 256), "zero3, tensor", True, id="two axes"),
]


def price(traced: Any, plan: Any) -> PlanPrice:
    """The price of a plan over the links of an H100's nodes."""
    over = attrs.evolve(plan, axes=with_hardware_links(plan.axes))
    return plan_price(over, traced.program.graph.graph, fused_op_cost.in_bytes)


def planned(mesh: Any, world: World, fn: Any, places: Any, planner: str) -> PlanPrice:
    traced = sf.shard(fn, mesh, places).trace(*world.args)
    return price(traced, propagate(traced.program, *traced.placements(), planner=planner))


def check(world: World, name: str, remat: bool) -> None:
    axes, place, batch, between = BOOKS[name]
    with sf.fake_world(math.prod(world.sizes), numerics=False):
        mesh = sf.make_mesh(world.sizes, axes)
        places = place(mesh), batch
        mine = planned(mesh, world, step(remat=remat), places, "global")
        by_hand = [
            planned(mesh, world, step(pinned, remat), places, "greedy") for pinned in between
        ]
    assert mine.total <= WITHIN * min(x.total for x in by_hand)


@pytest.mark.parametrize(("world", "name", "remat"), SAMPLED)
def test_a_sampled_plan_is_no_dearer_than_a_textbooks(world: World, name: str, remat: bool) -> None:
    check(world, name, remat)


@pytest.mark.parametrize(("world", "name", "remat"), CASES)
def test_a_plan_is_no_dearer_than_a_textbooks(world: World, name: str, remat: bool) -> None:
    check(world, name, remat)


def auto(world: World, memory: str | None = None) -> tuple[float, int]:
    """What the placements take that `sf.auto` chooses, and their peak."""
    with sf.fake_world(math.prod(world.sizes), numerics=False):
        mesh = sf.make_mesh(world.sizes, ("dp", "tp")[: len(world.sizes)])
        low = sf.shard(step(remat=True), mesh, sf.auto, memory=memory).lower(*world.args)
        return price(low.traced, low.partition).total, low.memory.peak


def books_of(world: World) -> float:
    """What the cheapest textbook takes, as it is planned."""
    found = []
    for axes, place, batch, _ in BOOKS.values():
        if len(axes) == len(world.sizes):
            with sf.fake_world(math.prod(world.sizes), numerics=False):
                mesh = sf.make_mesh(world.sizes, axes)
                places = place(mesh), batch
                found.append(planned(mesh, world, step(remat=True), places, "global").total)
    return min(found)


def test_a_row_on_each_of_some_ranks_is_found_where_whole_weights_do_not_fit() -> None:
    _, peak = auto(World((1024,), 256), "10GiB")
    assert peak <= 10 * 2**30


@pytest.mark.parametrize(
    "world", WORLDS, ids=lambda world: f"{world.rows} on {' x '.join(map(str, world.sizes))}"
)
def test_auto_is_no_dearer_than_a_textbook(world: World) -> None:
    total, _ = auto(world)
    assert total <= WITHIN * books_of(world)


SMALL = llama.Sizes(512, 4, 1408, 4096, 64, 64)


@pytest.mark.parametrize("remat", [False, True])
def test_auto_is_no_dearer_than_a_strategy_that_shards_state(remat: bool) -> None:
    """With a state of AdamW, in memory in which some of the strategies fit."""
    params, tokens = llama.shapes(LAYERS, False, SMALL)
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)
    one = functools.partial(llama.loss, remat=remat)
    state = opt.init(params)

    def step(p: Any, s: Any, tokens: torch.Tensor, pin: Callable[[Any], Any] = lambda g: g) -> Any:
        value, g = sf.value_and_grad(one)(p, tokens)
        return *opt.update(p, pin(g), s), value

    found = {}
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("dp",))
        for name in ("ddp", "zero1", "zero2", "zero3"):
            plan = sf.strategy(name, params, mesh)
            kept = plan.params, opt.state_placements(plan.state, params)
            fn = functools.partial(step, pin=functools.partial(sf.constrain, placements=plan.grads))
            book = sf.shard(fn, mesh, (*kept, plan.batch), (*kept, P()))
            found[name] = book.lower(params, state, tokens)
        chosen = sf.shard(step, mesh, sf.auto, memory="80MiB").lower(params, state, tokens)
    times = {
        name: price(low.traced, low.partition).total
        for name, low in found.items()
        if low.memory.peak <= 80 * 2**20
    }
    assert chosen.memory.peak <= 80 * 2**20 and 0 < len(times) < len(found)
    assert price(chosen.traced, chosen.partition).total <= WITHIN * min(times.values())


def test_links_count_without_being_told() -> None:
    """Over nodes of eight a byte costs what the network says."""
    shape = sf.ShapeDtype((1024, 8192)), sf.ShapeDtype((8192, 8192))
    with sf.fake_world(128, numerics=False):
        mesh = sf.make_mesh((16, 8), ("dp", "tp"))
        traced = sf.shard(torch.matmul, mesh, (P("dp"), P())).trace(*shape)
        plan = propagate(traced.program, *traced.placements())
    assert [x.byte for x in plan.axes.costs] == [
        SENT / (H100.efficiency.network * H100.network),
        1.0,
    ]


@pytest.mark.parametrize("sizes", [(8,), (2, 4)], ids=str)
def test_megatrons_pair_of_products_gathers_twice(sizes: tuple[int, ...]) -> None:
    """Sequence parallel: what it reads, in the forward, and its gradient. No weight is gathered."""
    axes = ("dp", "tp")[-len(sizes) :]
    rows = 4 * math.prod(sizes[:-1])
    inside = P("dp" if "dp" in axes else None, "tp")

    def pair(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = sf.constrain(x.sin(), inside)
        y = F.gelu(x @ p["up"]) @ p["down"]
        return sf.constrain(y, inside).float().square().mean()

    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    params = {"up": of(8192, 28672), "down": of(28672, 8192)}
    places = {"up": P(None, "tp"), "down": P("tp")}, inside
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh(sizes, axes)
        step = sf.shard(sf.value_and_grad(pair, argnums=(0, 1)), mesh, places)
        low = step.lower(params, of(rows, 4096, 8192))
    kinds = [c.kind for c in low.collectives if c.axis == "tp" and c.nbytes > 2**20]
    assert sorted(kinds) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
