"""The memory of a program: its peak is the one that is counted when the program runs."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from alive import Alive
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from shardfn.inspect.memory import KINDS


def counted(graph: torch.fx.Graph, given: list[torch.Tensor]) -> int:
    """The peak of the memory of a graph, run op by op."""
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with Alive(given) as counting:
        torch.fx.Interpreter(module).run(*given)
    return counting.peak


@pytest.mark.parametrize("model", models.LOSSES)
def test_the_peak_is_within_5_percent_of_what_is_counted(model: str) -> None:
    loss, make_params, make_batch = models.LOSSES[model]
    params, (x, y) = make_params(), make_batch(6)
    low = sf.jit(sf.value_and_grad(loss), backend="aten").lower(params, x, y)
    given = [*tree_leaves(params), x, y]
    assert low.memory.peak == pytest.approx(counted(low.program.graph, given), rel=0.05)


def layers(w: Any, x: torch.Tensor) -> torch.Tensor:
    layer = lambda c, w: (c + torch.relu(c @ w["up"]) @ w["down"], c.sum())
    c, sums = sf.scan(layer, x, w)
    return c.square().mean() + sums.mean()


def experts(p: Any, x: torch.Tensor) -> torch.Tensor:
    best, chosen = (x @ p["gate"]).softmax(-1).topk(2, -1)
    y = torch.zeros_like(x)
    for k, (up, down) in enumerate(p["experts"]):
        share = (best * (chosen == k)).sum(-1, keepdim=True)
        y = y + torch.relu(x @ up) @ down * share
    return y.square().mean()


def pictures(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.max_pool2d(F.relu(F.conv2d(x, p["first"], padding=1)), 2)
    h = F.relu(F.conv2d(h, p["second"], padding=1)).mean((2, 3))
    return (h @ p["last"]).square().mean()


def tried(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A branch and a loop, without derivatives."""
    step = lambda s: (s[0] + 1, torch.tanh(s[1] @ p))
    _, h = sf.while_loop(lambda s: s[0] < 3, step, (torch.tensor(0), x))
    return sf.cond(h.sum() > 0, lambda h: (h @ p).exp(), lambda h: h.sin(), h).sum()


def chunks(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Views of one tensor that die one after the other."""
    values, _ = torch.sort(x @ p, -1)
    a, b, c = torch.chunk(values, 3, -1)
    return (a * b).sum() + values.topk(3).values.sum() + c.logsumexp(0).sum()


R = torch.randn
WITH_LOOPS = {
    "scan": (sf.value_and_grad(layers), dict(up=R(5, 31, 127), down=R(5, 127, 31)), R(129, 31)),
    "experts": (
        sf.value_and_grad(experts),
        dict(gate=R(33, 4), experts=[(R(33, 65), R(65, 33)) for _ in range(4)]),
        R(101, 33),
    ),
    "pictures": (
        sf.value_and_grad(pictures),
        dict(first=R(16, 3, 3, 3), second=R(31, 16, 3, 3), last=R(31, 7)),
        R(5, 3, 33, 33),
    ),
    "chunks": (sf.value_and_grad(chunks), R(33, 66), R(51, 33)),
    "branch and loop": (tried, R(65, 65), R(301, 65)),
}


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_the_peak_of_loops_is_within_5_percent_and_its_tensors_add_up_to_it(name: str) -> None:
    fn, params, x = WITH_LOOPS[name]
    low = sf.jit(fn, backend="aten").lower(params, x)
    found = low.memory
    assert sum(tensor.nbytes for tensor in found.alive) == found.peak
    holders = low.program.graph.find_nodes(op="placeholder")
    given = [*tree_leaves(params), x, *low.traced.captured.closed_over]
    assert len(given) == len(holders)
    assert found.peak == pytest.approx(counted(low.program.graph, given), rel=0.05)


def on_a_rank() -> Any:
    loss, make_params, make_batch = models.LOSSES["llama"]
    params, (x, y) = make_params(), make_batch(6)
    mesh = sf.make_mesh((2,), ("dp",))
    place = sf.distribute(params, mesh, P("dp"))
    batch = sf.distribute((x, y), mesh, P("dp"))
    places = (P("dp"), P("dp"), P("dp"))
    step = sf.shard(sf.bucketed_grad(loss), mesh, places, backend="aten")
    step(place, *batch)
    given = [d.to_local() for d in tree_leaves((place, batch))]
    with Alive(given) as counting:
        step(place, *batch)
    return step.lower(place, *batch).memory.peak, counting.peak


def test_on_two_processes_too() -> None:
    for predicted, found in run_ranks(2, on_a_rank):
        assert predicted == pytest.approx(found, rel=0.05)


def test_the_tensors_at_the_peak_add_up_to_it() -> None:
    w = [sf.ShapeDtype((64, 64)) for _ in range(4)]

    def loss(w: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in w:
            x = torch.relu(x @ layer)
        return x.sum()

    found = sf.jit(sf.grad(loss)).lower(w, sf.ShapeDtype((1024, 64))).memory
    assert sum(tensor.nbytes for tensor in found.alive) == found.peak
    assert sum(found.of(kind) for kind in KINDS) == found.peak
    assert found.of("activations") >= 3 * 1024 * 64 * 4
    assert found.of("arguments") == (4 * 64 * 64 + 1024 * 64) * 4
    text = str(found)
    assert text.startswith("jit(grad(loss)): ")
    assert "activations" in text and "relu" in text and "test_memory.py" in text


def test_a_scan_holds_what_one_step_does_beside_its_rows() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        step = lambda c, layer: (torch.relu(c @ layer), None)
        return sf.scan(step, x, w)[0].sum()

    args = sf.ShapeDtype((8, 32, 32)), sf.ShapeDtype((256, 32))
    found = sf.jit(loss).lower(*args).memory
    held = (8 * 32 * 32 + 2 * 256 * 32) * 4
    assert held < found.peak < held + 4 * 256 * 32 * 4
