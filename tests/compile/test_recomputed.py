"""A compiled program computes cheap values again in its backward: fewer bytes live on, and
nothing changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

import shardfn as sf
from shardfn import P
from shardfn.compile import recomputed as module
from shardfn.compile.recomputed import recompute_cheap_values
from shardfn.ops.placement import AFTER
from shardfn.schedule import copied

ROWS, WIDTH, INNER = 63, 5, 301


def mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ up) @ down
    return x.square().sum()


def gated(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        inner = x @ up
        x = x + (F.silu(inner) * inner.tanh()) @ down
    return x.sin().sum()


def dropping(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        x = x + F.dropout(F.gelu(x @ up), 0.3) @ down
    return x.square().sum()


def arguments(layers: int = 3) -> Any:
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64)
    return [(draw(WIDTH, INNER), draw(INNER, WIDTH)) for _ in range(layers)], draw(ROWS, WIDTH)


def lowered(fn: Any, shape: tuple[int, ...], placements: Any, *args: Any) -> Any:
    mesh = sf.make_mesh(shape, ("dp", "tp")[: len(shape)])
    return sf.shard(sf.value_and_grad(fn), mesh, placements).lower(*args)


def alive(graph: torch.fx.Graph) -> int:
    """The bytes that live from the forward to the backward."""
    split = module._Split.of(graph)
    assert split is not None
    return split.bytes(split.crossing)


def values_of(graph: torch.fx.Graph) -> list[torch.Tensor]:
    """The results of a program of one rank without collectives."""
    torch.manual_seed(1)
    inputs = [
        torch.randn(x.shape, dtype=x.dtype)
        if x.is_floating_point()
        else torch.zeros(x.shape, dtype=x.dtype)
        for node in graph.find_nodes(op="placeholder")
        for x in [node.meta["val"]]
    ]
    owner = torch.fx.GraphModule(torch.nn.Module(), graph)
    return torch.fx.Interpreter(owner).run(*inputs)


@pytest.mark.parametrize("fn", [mlp, gated, dropping])
def test_fewer_bytes_live_on_and_the_values_stay(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    with sf.fake_world(1):
        program = lowered(fn, (1,), (P(), P("dp")), *arguments()).program
    before = program.graph
    after = recompute_cheap_values(before)
    assert after is not before
    assert alive(after) <= 0.75 * alive(before)
    for got, wanted in zip(values_of(after), values_of(before), strict=True):
        assert torch.equal(got, wanted)
    drawn = [sum("random" in str(node.target) for node in graph.nodes) for graph in (before, after)]
    assert drawn[0] == drawn[1]
    assert fn is not dropping or drawn[0]


def waving(params: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in params:
        inner = x @ up  # which no derivative reads
        x = x + ((inner + 1).sin() * (inner * 2).cos()) @ down
    return x.square().sum()


@pytest.mark.parametrize(("fn", "fused"), [(mlp, 0), (gated, 0), (waving, 3)])
def test_the_peak_is_that_of_the_graph_that_recomputes(fn: Any, fused: int) -> None:
    stored = fused * ROWS * INNER * 8  # where the graph runs op by op
    with sf.fake_world(1):
        graph = lowered(fn, (1,), (P(), P("dp")), *arguments()).program.graph
    split = module._Split.of(graph)
    assert split is not None
    cheapest = split.cheapest()
    names = {node.name for node in cheapest}
    made = module._RecomputingGraph(copied(graph), names, len(split.early)).graph
    *nodes, _ = made.nodes
    course = split.course(cheapest)
    assert max(course) + stored == max(module._alive(nodes)) < max(split.alive)
    assert course[-1] == split.alive[-1]
    assert split.course(set()) == [*split.alive]


def test_a_program_stays_whose_peak_would_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv).square().sum()

    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("cp",))
        step = sf.grad(attention, argnums=(0, 1, 2))
        ring = sf.shard(step, mesh, (P(None, None, "cp"),) * 3, attention={"cp": "ring"})
        graph = ring.lower(*[sf.ShapeDtype((1, 2, 64, 16), torch.float32)] * 3).program.graph
    split = module._Split.of(graph)
    assert split is not None
    cheapest = split.cheapest()
    assert split.bytes(split.crossing) - split.bytes(split.saved(cheapest)) >= module.LEAST_BYTES
    assert recompute_cheap_values(graph) is graph


@pytest.mark.parametrize(
    ("shape", "placements"), [((2,), (P(), P("dp"))), ((2, 2), (P(None, "tp"), P("dp")))]
)
def test_collectives_keep_their_order(
    shape: tuple[int, ...], placements: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    with sf.fake_world(len(shape) * 2):
        program = lowered(mlp, shape, placements, *arguments()).program
    sent = lambda graph: [
        node.meta["collective"] for node in graph.nodes if "collective" in node.meta
    ]
    after = recompute_cheap_values(program.graph)
    assert after is not program.graph
    assert sent(after) == sent(program.graph)
    inputs = lambda graph: [n.name for n in graph.find_nodes(op="placeholder")]
    assert inputs(after) == inputs(program.graph)


def test_what_is_computed_again_waits_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    with sf.fake_world(1):
        program = lowered(gated, (1,), (P(), P("dp")), *arguments()).program
    graph = recompute_cheap_values(program.graph)
    barred = graph.find_nodes(op="call_function", target=AFTER)
    assert barred
    for node in barred:
        _, token = node.args
        assert token.meta["phase"] == "backward"


def test_waiting_for_the_backward_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In compiled code a value has another name: nothing runs, and the values stay."""
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 10)
    params, x = arguments(2)
    step = sf.jit(sf.value_and_grad(gated))
    compiled = step.compile(params, x)
    code = compiled.code
    assert "  # after buf" in code and "after.default(" not in code
    grads, loss = torch.func.grad_and_value(gated)(params, x)
    torch.testing.assert_close(step(params, x), (loss, grads), rtol=1e-12, atol=1e-9)


def test_a_program_that_spares_little_stays_as_it_is() -> None:
    with sf.fake_world(1):
        program = lowered(mlp, (1,), (P(), P("dp")), *arguments()).program
    assert recompute_cheap_values(program.graph) is program.graph


def test_a_program_without_a_backward_stays_as_it_is() -> None:
    with sf.fake_world(1):
        mesh = sf.make_mesh((1,), ("dp",))
        program = sf.shard(mlp, mesh, (P(), P("dp"))).lower(*arguments()).program
    assert recompute_cheap_values(program.graph) is program.graph


def on_two_ranks() -> tuple[Any, int]:
    """A compiled step of this rank, and how many values it computes again."""
    module.LEAST_BYTES = 1 << 10
    mesh = sf.make_mesh((2,), ("dp",))
    step = sf.shard(sf.value_and_grad(gated), mesh, (P(), P("dp")), backend="inductor")
    params, x = arguments(1)
    program = step.lower(params, x).program.graph
    added = len(recompute_cheap_values(program).nodes) - len(program.nodes)
    return sf.full(step(params, x)), added


def test_a_compiled_step_on_two_real_ranks_equals_one_device() -> None:
    params, x = arguments(1)
    wanted = sf.value_and_grad(gated)(params, x)
    for got, added in run_ranks(2, on_two_ranks):
        assert added > 0
        sf.tree_map(torch.testing.assert_close, got, wanted)
