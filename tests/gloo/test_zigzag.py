"""Real gloo processes that hold zigzags: results as in the simulator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

MESHES: dict[str, tuple[dict[str, int], P]] = {
    "2": ({"cp": 2}, P(None, sf.zigzag("cp"))),
    "2x2": ({"dp": 2, "cp": 2}, P("dp", sf.zigzag("cp"))),
    "2x2 one dim": ({"tp": 2, "cp": 2}, P(None, (sf.zigzag("cp"), "tp"))),
}


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Collectives that put chunks in order: an all-gather, an all-to-all, a reduce-scatter."""
    h = F.dropout(torch.tanh(x @ w), 0.2)  # (B, T, D)
    by_feature = sf.constrain(h, P(None, None, "cp"))
    back = sf.constrain(by_feature.cumsum(1), P(None, sf.zigzag("cp")))
    at = torch.arange(x.shape[1])
    scores = (h @ h.transpose(1, 2)).masked_fill(at[:, None] < at, float("-inf"))
    return back, scores.softmax(-1) @ h, (h[:, 1:] - h[:, :-1]).mean()


def results(name: str, backend: str) -> list[torch.Tensor]:
    axes, spec = MESHES[name]
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    x, w = drawn(4, 16, 4), drawn(4, 6)

    def loss(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, Any]:
        outs = program(x, w)
        return sum((y * y).sum() for y in outs), outs

    step = sf.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    specs = spec, P(None, "cp")
    sf.random.state.seed(1)
    again = sf.distribute(x, mesh, spec)
    assert torch.equal(sf.full(again), x)
    found = sf.shard(step, mesh, specs, backend=backend)(again, w)
    return [*tree_leaves(sf.full(found)), sf.full(sf.from_local(again.to_local(), mesh, spec))]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("name", MESHES)
def test_processes_compute_what_the_simulator_does(name: str, backend: str) -> None:
    n = math.prod(MESHES[name][0].values())
    with sf.fake_world(n):
        simulated = results(name, backend)
    assert len(simulated) == 7
    for real in run_ranks(n, results, name, backend):
        exact = 0.0 if backend == "aten" else 1e-14  # kernels round as memory is aligned
        torch.testing.assert_close(real, simulated, rtol=exact, atol=exact)


X = torch.arange(96.0).reshape(4, 24)


def saved(name: str, folder: str) -> Any:
    """Of a zigzag, saved and loaded as a zigzag and as other placements: the values, and this
    rank's shard.
    """
    axes, spec = MESHES[name]
    n = math.prod(axes.values())
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    tree = {"x": sf.distribute(X, mesh, spec)}
    sf.save(f"{folder}/ours", tree)
    dcp.save(tree, checkpoint_id=f"{folder}/torchs")
    like = {"x": sf.ShapeDtype(X.shape)}
    turned = P(sf.zigzag("cp"))
    loaded = [
        sf.load(f"{folder}/ours", like, mesh, P(None, "cp")),
        sf.load(f"{folder}/torchs", like, mesh, turned),
        sf.load(f"{folder}/ours", like, sf.make_mesh((n,), ("tp",)), P(None, sf.zigzag("tp"))),
        {"x": sf.distribute(torch.zeros_like(X), mesh, turned)},
    ]
    dcp.load(loaded[-1], checkpoint_id=f"{folder}/ours/step-00000000")
    sf.save(f"{folder}/back", loaded[0])
    loaded.append(sf.load(f"{folder}/back", tree))
    return sf.full(loaded), loaded[-1]["x"].to_local()


@pytest.mark.parametrize("name", MESHES)
def test_a_zigzag_is_saved_and_loaded_at_any_placement(name: str, tmp_path: Path) -> None:
    axes, spec = MESHES[name]
    n = math.prod(axes.values())
    with sf.fake_world(n):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        placed = sf.distribute(X, mesh, spec)
        simulated = saved(name, str(tmp_path / "simulated"))
        locals_ = [placed.to_local(rank=rank) for rank in range(n)]
    real = run_ranks(n, saved, name, str(tmp_path / "real"))
    for trees, _ in (simulated, *real):
        assert len(trees) == 5 and all(torch.equal(tree["x"], X) for tree in trees)
    for (_, local), wanted in zip(real, locals_, strict=True):
        assert torch.equal(local, wanted)
