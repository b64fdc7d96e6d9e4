"""The list of node.meta keys holds after every stage, and is the list that the code keeps to."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from pieces import mesh_axes
from worlds import simulated

import shardfn as sf
from shardfn import P, _compat, schedule
from shardfn.ops.graph_keys import BY_GRAPH, GLOBAL, KEYS, LOCAL, TORCH, check_keys, wrong_keys
from shardfn.ops.loops import inner_nodes
from shardfn.types import Collective
from tests.support.reading.source import PACKAGE

X = torch.ones(6, 4)


def gpt() -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    params, tokens = models.gpt_params(1), torch.zeros(4, 5, dtype=torch.int64)
    loss = sf.checkpoint(lambda p, x: models.gpt_loss(p, x, x))
    return sf.bucketed_grad(loss), (P(), P("dp")), (params, tokens)


def loop() -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    def loss(w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        body = lambda c, x: (torch.tanh(c @ w) + x, c.sum())
        carry, sums = sf.scan(body, torch.zeros(5, 4), xs)
        return (carry**2).sum() + sums.sum()

    placements = (P("dp"), P(None, "dp"))
    return sf.grad(loss), placements, (torch.ones(4, 4), torch.ones(3, 5, 4))


def branch() -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    chosen = lambda x: sf.cond(x.sum() > 0, torch.sin, torch.cos, x)
    return chosen, (P("dp"),), (X,)


def per_rank() -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    summed = lambda x: sf.psum(x * sf.axis_index("dp"), "dp")
    mapped = sf.shard_map(summed, in_placements=P("dp"), out_placements=P())
    return mapped, (P("dp"),), (X,)


@pytest.mark.parametrize("program", [gpt, loop, branch, per_rank])
def test_every_graph_carries_only_keys_of_the_list(program: Callable[[], Any]) -> None:
    fn, placements, args = program()
    with simulated(dp=2) as mesh:
        traced = sf.shard(fn, mesh, placements, backend="aten").trace(*args)
        low = traced.lower()
    check_keys(inner_nodes(traced.program.graph.graph, once=True), GLOBAL)
    for graph in (low.program.unordered, low.program.graph):
        check_keys(inner_nodes(graph, once=True), LOCAL)


def one_op() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = _compat.FakeTensorMode().from_tensor(torch.ones(3))
    graph.output([x])
    return graph


def test_a_key_that_the_list_does_not_know_is_noticed_after_a_pass() -> None:
    graph = one_op()
    schedule.check(graph, mesh_axes((2, 3)))
    next(iter(graph.nodes)).meta["note"] = 1
    with pytest.raises(AssertionError) as caught:
        schedule.check(graph, mesh_axes((2, 3)))
    assert str(caught.value) == "node.meta: x: 'note' is not a meta key of a local graph"


BAD = {
    "val": "a tensor",
    "source": 3,
    "module": 3,
    "phase": None,
    "is_recomputed": 1,
    "origin": None,
    "step": True,
    "slots": 3,
    "type": ((3,), ["R"]),
    "collective": "all_reduce",
    "transfer": [],
    "moved": 1,
    "plans": None,
    "batch": "1",
}


@pytest.mark.parametrize("name", BY_GRAPH[LOCAL])
def test_a_value_of_the_wrong_type_is_noticed(name: str) -> None:
    graph = one_op()
    node = next(iter(graph.nodes))
    node.meta[name] = BAD[name]
    assert wrong_keys(graph.nodes, LOCAL) == [
        f"x: {name!r} must be {BY_GRAPH[LOCAL][name].holds}; got {BAD[name]!r}"
    ]


def test_a_value_of_the_right_type_passes() -> None:
    record = Collective("all_reduce", "dp", 4, "sum", "x", None, False)
    good = {
        "source": None,
        "phase": "backward",
        "slots": (1, 4),
        "type": ((6,), ((0, 2), "sum")),
        "collective": record,
        "val": [torch.ones(2), None],
    }
    graph = one_op()
    next(iter(graph.nodes)).meta.update(good)
    assert not wrong_keys(graph.nodes, LOCAL)


def keys_used() -> set[tuple[str, str]]:
    """The stage and the key of every `node.meta[key]`, `.get(key)` and `key in node.meta`."""
    used: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        stage = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            key = _key_of(node)
            if key is not None:
                used.add((stage, key))
    return used


def _key_of(node: ast.AST) -> str | None:
    match node:
        case ast.Subscript(ast.Attribute(attr="meta"), ast.Constant(str(key))):
            return key
        case ast.Call(
            ast.Attribute(ast.Attribute(attr="meta"), "get" | "pop" | "setdefault"),
            [ast.Constant(str(key)), *_],
        ):
            return key
        case ast.Compare(
            ast.Constant(str(key)), [ast.In() | ast.NotIn()], [ast.Attribute(attr="meta")]
        ):
            return key
    return None


def test_each_stage_uses_the_keys_that_the_list_gives_to_it() -> None:
    used = keys_used()
    given = {(stage, key.name) for key in KEYS for stage in (key.owner, *key.readers)}
    assert used <= given, "a stage uses a key that the list does not give to it"
    unread = {
        (stage, key.name) for key in KEYS for stage in key.readers if (stage, key.name) not in used
    }
    assert not unread, "the list names a reader that does not read"


def test_the_owners_are_folders_of_the_package_and_no_key_has_two_rows() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {TORCH}
    assert {key.owner for key in KEYS} <= folders
    assert {stage for key in KEYS for stage in key.readers} <= folders
    assert sum(len(keys) for keys in BY_GRAPH.values()) == len(KEYS)
