"""Law 0: a sharded training step computes what the plain one computes. Float64, odd sizes,
uneven shards.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import schemes
import torch

import shardfn as sf
from shardfn import P

MESHES = {
    "1": {"dp": 1},
    "2": {"dp": 2},
    "3": {"dp": 3},
    "5": {"dp": 5},
    "8": {"dp": 8},
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "tp8": {"tp": 8},
    "2x4": {"dp": 2, "tp": 4},
    "3x2": {"dp": 3, "tp": 2},
    "2x2x2": {"pp": 2, "dp": 2, "tp": 2},
}


def _cases() -> list[Any]:
    cases = []
    for mesh, axes in MESHES.items():
        if "dp" in axes:
            cases += [(mesh, "replicated", P("dp")), (mesh, "fully_sharded", P("dp"))]
        if "tp" in axes:
            cases.append((mesh, "tensor_parallel", P("dp") if "dp" in axes else P()))
        if len(axes) > 1:
            cases += [(mesh, "mixed", P("dp")), (mesh, "fully_sharded", P(("dp", "tp")))]
        if len(axes) > 2:
            cases += [(mesh, "mixed", P(("pp", "dp")))]
    return cases


def run(model: str, axes: dict[str, int], params_placed: Any, batch: P, args: Any) -> Any:
    size = 1
    for n in axes.values():
        size *= n
    with sf.fake_world(size):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        step = sf.shard(models.STEPS[model], mesh, (params_placed, batch, batch), backend="aten")
        return sf.full(step(*args))


def worst(got: Any, wanted: Any) -> float:
    pairs = zip(sf._tree.leaves(got), sf._tree.leaves(wanted), strict=True)
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)


@pytest.mark.parametrize(("mesh", "scheme", "batch"), _cases(), ids=str)
@pytest.mark.parametrize("model", list(models.LOSSES))
def test_sharded_step_equals_autograd_on_one_device(
    model: str, mesh: str, scheme: str, batch: P
) -> None:
    loss_fn, make_params, make_batch = models.LOSSES[model]
    params, (x, y) = make_params(), make_batch()
    placed = getattr(schemes, scheme)(params)
    got = run(model, MESHES[mesh], placed, batch, (params, x, y))
    assert worst(got, models.oracle(loss_fn, params, x, y)) < 1e-10
    assert all(
        a.shape == b.shape
        for a, b in zip(sf._tree.leaves(got[0]), sf._tree.leaves(params), strict=True)
    )


def test_plain_step_equals_autograd_too() -> None:
    for name, (loss_fn, make_params, make_batch) in models.LOSSES.items():
        params, (x, y) = make_params(), make_batch()
        loss, grads = sf.value_and_grad(loss_fn)(params, x, y)
        _, wanted, wanted_loss = models.oracle(loss_fn, params, x, y)
        assert worst((loss, grads), (wanted_loss, wanted)) < 1e-12, name
        assert isinstance(loss, torch.Tensor)
