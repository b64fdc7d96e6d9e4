"""sf.auto: placements that shard chooses; one device is the judge of values, and what is known to
be best that of placements.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from stagings import counts
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.byte_sizes import bytes_of
from shardfn.partition.planner.integer_program import IntegerProgram

Lib: Any = sf  # called with wrong types


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()


def layered(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Layers that only a scan reads."""
    layer = lambda x, w: (x + torch.relu(x @ w["up"]) @ w["down"], None)
    return sf.scan(layer, x, p)[0].square().mean()


def momentum(p: Any, m: Any, x: torch.Tensor) -> Any:
    value, g = sf.value_and_grad(loss)(p, x)
    m = sf.tree_map(lambda a, b: 0.9 * a + b, m, g)
    return sf.tree_map(lambda a, b: a - 0.1 * b, p, m), m, value


def lookup(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    rows = F.embedding(tokens, p["table"])
    return (rows.sum(1) @ p["w"]).square().mean()


def sgd(fn: Any) -> Any:
    def step(p: Any, *batch: torch.Tensor) -> Any:
        value, g = sf.value_and_grad(fn)(p, *batch)
        return sf.tree_map(lambda a, b: a - 0.1 * b, p, g), value

    return step


def shapes(**given: tuple[int, ...]) -> dict[str, sf.ShapeDtype]:
    return {name: sf.ShapeDtype(shape) for name, shape in given.items()}


def chosen(fn: Any, args: Any, memory: Any = None, places: Any = sf.auto) -> Any:
    """The lowered program on 8 ranks."""
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((8,), ("x",))
        return sf.shard(fn, mesh, places, memory=memory).lower(*args)


SMALL = shapes(up=(512, 2048), down=(2048, 512)), sf.ShapeDtype((8192, 512))
WIDE = shapes(up=(8192, 32768), down=(32768, 8192)), sf.ShapeDtype((64, 8192))
# fewer features than ranks, so only rows can be sharded
TABLE = (shapes(table=(10**7, 4), w=(4, 64)), sf.ShapeDtype((4096, 16), torch.int64))
STACKED = shapes(up=(4, 512, 2048), down=(4, 2048, 512)), SMALL[1]
STACKED_WIDE = (shapes(up=(4, 4096, 16384), down=(4, 16384, 4096)), sf.ShapeDtype((64, 4096)))
KNOWN = {
    "data parallel": (sgd(loss), SMALL, "60MiB", "(P(), P('x'))"),
    "fully sharded": (sgd(loss), SMALL, "32MiB", "({'up': P(None, 'x'), 'down': P('x')}, P('x'))"),
    "tensor parallel": (sgd(loss), WIDE, "1GiB", "({'up': P(None, 'x'), 'down': P('x')}, P())"),
    "rows of a table": (sgd(lookup), TABLE, "250MiB", None),
    "data parallel scan": (sgd(layered), STACKED, "160MiB", "(P(), P('x'))"),
    "fully sharded scan": (
        sgd(layered),
        STACKED,
        "90MiB",
        "({'up': P(None, None, 'x'), 'down': P(None, 'x')}, P('x'))",
    ),
    "tensor parallel scan": (
        sgd(layered),
        STACKED_WIDE,
        "1GiB",
        "({'up': P(None, None, 'x'), 'down': P(None, 'x')}, P())",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_be_best_is_found(name: str) -> None:
    fn, args, memory, text = KNOWN[name]
    low = chosen(fn, args, memory)
    assert low.memory.peak <= bytes_of(memory)
    if text is None:
        assert low.placements.in_placements[0]["table"] == P("x")
    else:
        assert low.placements.text() == text


def test_the_same_is_chosen_again() -> None:
    first, again = (chosen(sgd(loss), SMALL, "32MiB"), chosen(sgd(loss), SMALL, "32MiB"))
    assert str(first.placements) == str(again.placements)
    assert str(first) == str(again)


def test_the_rest_of_a_tree_is_chosen_around_what_is_given() -> None:
    places = {"up": sf.auto, "down": P(None, "x")}, sf.auto
    low = chosen(sgd(loss), SMALL, None, places)
    (params, x) = low.placements.in_placements
    assert params["down"] == P(None, "x") and x == P("x")


def case() -> Any:
    torch.manual_seed(0)
    p = {"up": torch.randn(7, 9).double(), "down": torch.randn(9, 7).double()}
    m = sf.tree_map(torch.zeros_like, p)
    return p, m, torch.randn(11, 7).double()


def steps(mesh: Any, memory: Any) -> tuple[Any, Any]:
    """Two steps, the second with the DTensors of the first; and on one device."""
    p, m, x = case()
    step = sf.shard(momentum, mesh, sf.auto, memory=memory, backend="aten")
    found = step(p, m, x)
    before = counts.copy()
    found = step(*found[:2], x)
    found = step(*found[:2], x)
    assert counts["captures"] <= before["captures"] + 1
    assert all(
        found[0][k].placements == found[1][k].placements for k in p
    )  # state follows its parameter
    wanted = (p, m, None)
    for _ in range(3):
        wanted = momentum(wanted[0], wanted[1], x)
    return sf.tree_map(sf.full, found), wanted


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("memory", [None, "4500B"])
def test_values_are_those_of_one_device(shape: Any, memory: Any) -> None:
    with sf.fake_world(6 if len(shape) == 2 else 3):
        mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
        assert_close(*steps(mesh, memory))


def layers_on(mesh: Any, memory: Any) -> None:
    """A step over stacked layers of uneven sizes, against one device."""
    torch.manual_seed(1)
    p = {"up": torch.randn(3, 7, 9).double(), "down": torch.randn(3, 9, 7).double()}
    x = torch.randn(11, 7).double()
    step = sf.shard(sgd(layered), mesh, sf.auto, memory=memory, backend="aten")
    got = sf.tree_map(sf.full, step(p, x))
    assert_close(got, sgd(layered)(p, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("memory", [None, "12KB"])
def test_layers_of_a_scan_compute_what_one_device_does(shape: Any, memory: Any) -> None:
    with sf.fake_world(6 if len(shape) == 2 else 3):
        mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
        layers_on(mesh, memory)


def _on_a_rank() -> None:
    mesh = sf.make_mesh((2,), ("a",))
    assert_close(*steps(mesh, "5KB"))
    layers_on(mesh, "14KB")


def test_on_two_gloo_processes() -> None:
    run_ranks(2, _on_a_rank)


def test_a_dtensor_keeps_its_placement() -> None:
    p, m, x = case()
    with simulated(a=3) as mesh:
        step = sf.shard(momentum, mesh, sf.auto, backend="aten")
        q = sf.distribute(p, mesh, {"up": P("a"), "down": P(None, "a")})
        low = step.lower(q, m, x)
        params, state, _ = low.placements.in_placements
        assert params == state == {"up": P("a"), "down": P(None, "a")}


def test_gradients_from_outside_are_those_of_one_device() -> None:
    p, _, x = case()
    with simulated(a=3) as mesh:
        fn = sf.shard(loss, mesh, sf.auto, memory="5KB", backend="aten")
        for w in p.values():
            w.requires_grad_()
        fn(p, x).backward()
        found = {k: w.grad for k, w in p.items()}
    wanted = torch.autograd.grad(loss(p, x), [*p.values()])
    assert_close(tuple(map(sf.full, found.values())), wanted)


def test_auto_is_one_value_that_pickles() -> None:
    assert pickle.loads(pickle.dumps(sf.auto)) is sf.auto
    assert repr(sf.auto) == "sf.auto"


def test_when_time_is_up_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(IntegerProgram, "solve", lambda program: None)
    logging.getLogger("shardfn").addHandler(handler)
    try:
        low = chosen(sgd(loss), SMALL, "60MiB")
    finally:
        logging.getLogger("shardfn").removeHandler(handler)
    assert low.placements.text() == "(P(), P('x'))"
    assert (
        "shard(step): sf.auto: the integer program is too large, or had no solution within "
        "the search limits; shardfn takes the cheapest of data parallel and fully sharded "
        "placements"
    ) in said


def both(p: Any, m: Any, n: Any, x: torch.Tensor) -> Any:
    return momentum(p, sf.tree_map(torch.add, m, n), x)


X = torch.ones(8, 4)
NOTHING = "sf.auto is only for in_placements of "
WRONG: dict[str, tuple[Any, str]] = {
    "memory without auto": (
        lambda mesh: sf.shard(torch.sin, mesh, P("dp"), memory="1GiB"),
        "shard(sin), memory: in_placements has no sf.auto, so shardfn chooses no placements "
        "under the memory limit\n  try: use in_placements=sf.auto; or leave out memory= and "
        "read lowered.memory",
    ),
    "memory of no size": (
        lambda mesh: sf.shard(torch.sin, mesh, sf.auto, memory="much"),
        "shard(sin), memory: 'much' is not a number of bytes\n"
        "  try: a positive int, or text such as '512KB', '25MB' or '1GiB'",
    ),
    "memory that nothing fits": (
        lambda mesh: sf.shard(torch.sin, mesh, sf.auto, memory=40)(X),
        "shard(sin), memory: no placements found on (dp=2) fit in 40 B a rank\n  the smallest "
        "peak is 136 B: 72 B of arguments, 64 B of results\n  try: more ranks, a smaller "
        "batch, sf.checkpoint, sf.accumulate, or memory=136",
    ),
    "no tensor": (
        lambda mesh: sf.shard(torch.mul, mesh, (None, sf.auto))(X, 3),
        "in_placements: sf.auto is given for an argument without tensors, so nothing can be "
        "chosen\n  args[1] is a int",
    ),
    "of a result": (
        lambda mesh: sf.shard(torch.sin, mesh, None, sf.auto)(X),
        "out_placements: " + NOTHING + "sf.shard, which chooses placements",
    ),
    "of distribute": (
        lambda mesh: sf.distribute(X, mesh, sf.auto),
        "distribute: the tensor: " + NOTHING + "sf.shard, which chooses placements",
    ),
    "inside of another transform": (
        lambda mesh: sf.grad(sf.shard(torch.sum, mesh, sf.auto))(X),
        "in_placements: " + NOTHING + "the outermost sf.shard, which chooses placements",
    ),
    "of constrain": (
        lambda mesh: sf.shard(lambda x: sf.constrain(x, sf.auto), mesh)(X),
        "constrain: " + NOTHING + "the outermost sf.shard, which chooses placements",
    ),
    "of pin": (
        lambda mesh: sf.pin(torch.nn.ReLU(), {"": Lib.auto}),
        "pin, outputs['']: sf.auto\n  needed: a P, a Stage, a tree of them, or None",
    ),
    "states that contradict": (
        lambda mesh: sf.shard(both, mesh, (sf.auto, P("dp"), P(None, "dp"), P()))(
            *([{"up": torch.ones(4, 4), "down": torch.ones(4, 4)}] * 3), X
        ),
        "shard(both), argument p['up']: sf.auto cannot place the parameter together with its "
        "state, because their given placements differ\n  m['up'] is Shard(dim=0) on dp\n  "
        "n['up'] is Shard(dim=1) on dp\n  try: give the same placement to all these tensors, or "
        "sf.auto to all of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, text = WRONG[name]
    with simulated(dp=2) as mesh, pytest.raises(sf.ShardError) as error:
        run(mesh)
    assert text in str(error.value)


def test_the_least_memory_is_said_with_its_parts() -> None:
    with pytest.raises(sf.PlacementError) as error:
        chosen(sgd(loss), SMALL, "4MiB")
    text = str(error.value)
    assert "no placements found on (x=8) fit in 4.0 MiB a rank" in text
    assert "of arguments" in text and "of activations" in text
    least = int(text.rpartition("memory=")[2])
    assert chosen(sgd(loss), SMALL, least).memory.peak <= least


def test_a_mesh_of_one_rank_replicates() -> None:
    with simulated(dp=1) as mesh:
        step = sf.shard(torch.sin, mesh, sf.auto, backend="aten")
        assert step.lower(X).placements.in_placements == (P(),)


def language_model(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    h = torch.relu(p["emb"][tokens] @ p["up"]) @ p["down"]
    return F.cross_entropy((h @ p["head"]).flatten(0, 1), tokens.flatten())


def test_two_axes_with_room_to_choose() -> None:
    params = shapes(emb=(999, 64), up=(64, 256), down=(256, 64), head=(64, 999))
    tokens = sf.ShapeDtype((64, 16), torch.int64)
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((4, 2), ("dp", "tp"))
        step = sf.shard(sgd(language_model), mesh, sf.auto, memory="3MiB")
        low = step.lower(params, tokens)
        assert low.memory.peak <= 3 * 2**20
