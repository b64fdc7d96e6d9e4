"""loss_scale has the scales of torch's GradScaler, and all ranks skip the same steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks

import shardfn as sf
from shardfn import P

SCALER = sf.loss_scale(2.0**10, growth=4.0, backoff=0.25, interval=2)
OPT = sf.optim(torch.optim.SGD, lr=0.1, momentum=0.9)
LARGE = 1e5  # more than float16 holds


def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ p["up"])
    return (h @ p["down"]).float().square().mean()


LOW = sf.mixed_precision(loss_fn, compute=torch.float16)


def step(p: Any, state: Any, scale: Any, x: torch.Tensor) -> Any:
    """A step of float16 that is skipped where a gradient is not finite."""
    scaled = sf.bucketed_grad(lambda p, x: SCALER.scale(LOW(p, x), scale))
    loss, grads = scaled(p, x)
    grads, finite = SCALER.unscale(grads, scale)
    new = OPT.update(p, grads, state)
    p, state = SCALER.select(finite, new, (p, state))
    return p, state, SCALER.update(scale, finite), loss / scale["scale"]


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = lambda *shape: torch.randn(shape, generator=generator) / 10
    return {"up": weight(8, 16), "down": weight(16, 4)}


def batches() -> list[torch.Tensor]:
    """Batches of which one has a row that is too large."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 8, generator=generator) for _ in range(4)]
    rows[1][7] = LARGE
    return rows


def test_the_scales_are_those_of_torch() -> None:
    rival = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
    )
    w = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([w], lr=0.0)
    state = SCALER.init()
    updated = lambda state, g: SCALER.update(state, SCALER.unscale(g, state)[1])
    captured = sf.jit(updated, backend="aten")
    for value in (1.0, 1.0, float("nan"), 1.0, float("inf"), 1.0, 1.0, 1.0):
        rival.scale(torch.ones(())).item()  # makes its scale
        w.grad = torch.tensor([1.0, value])
        rival.step(sgd)
        rival.update()
        state = captured(state, {"w": torch.tensor([1.0, value])})
        assert state["scale"].item() == rival.get_scale()
    huge = {**SCALER.init(), "scale": torch.tensor(2.0**127)}
    for _ in range(4):  # it does not grow to infinity
        huge = SCALER.update(huge, torch.tensor(True))
    assert huge["scale"] == 2.0**127


def trained(mesh: Any, where: Any) -> Any:
    """The results of each step, and the collectives of a step."""
    p = params()
    state = OPT.state_placements(where, p)
    ins = (where, state, P(), P("dp"))
    train = sf.shard(step, mesh, ins, (where, state, P(), P()), backend="aten")
    args = sf.distribute((p, OPT.init(p), SCALER.init()), mesh, ins[:3])
    rows = []
    for x in batches():
        *args, loss = train(*args, x)
        rows.append(sf.full((*args, loss)))
    return rows, train.lower(*args, batches()[0]).collectives


def alone() -> Any:
    args, rows = (params(), OPT.init(params()), SCALER.init()), []
    for x in batches():
        *args, loss = step(*args, x)
        rows.append((*args, loss))
    return rows


def assert_close(found: Any, wanted: Any) -> None:
    sf.tree_map(
        lambda x, y: torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3, equal_nan=True),
        [row[:3] for row in found],
        [row[:3] for row in wanted],
    )


def test_every_world_skips_the_step_whose_gradients_are_not_finite() -> None:
    wanted = alone()
    scales = [row[2]["scale"].item() for row in wanted]
    assert scales == [2.0**10, 2.0**8, 2.0**8, 2.0**10]
    assert torch.equal(wanted[1][0]["up"], wanted[0][0]["up"])
    assert not torch.equal(wanted[2][0]["up"], wanted[1][0]["up"])
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        found, collectives = trained(mesh, sf.fsdp(params(), mesh))
    assert_close(found, wanted)
    sums = Counter(c.kind for c in collectives)
    assert sums["all_reduce"] == 2  # of the loss, and of the flag of all gradients
    for found in run_ranks(2, _on_a_rank):
        assert_close(found, wanted)


def _on_a_rank() -> Any:
    return trained(sf.make_mesh((2,), ("dp",)), P())[0]


ERRORS: dict[str, tuple[Any, str]] = {
    "numbers": (
        lambda: sf.loss_scale(0, growth=0.5, backoff=2.0, interval=0),
        "loss_scale, initial: initial is 0, a int, and must be a positive number\n"
        "  growth is 0.5, a float, and must be a number, 1 or more\n"
        "  backoff is 2.0, a float, and must be a number above 0, at most 1\n"
        "  interval is 0, a int, and must be an int from 1 up\n"
        "  needed: a positive number\n  try: 2.0**16",
    ),
    "integer gradients": (
        lambda: SCALER.unscale({"w": torch.tensor([8, 16])}, SCALER.init()),
        "loss_scale.unscale: grads['w'] is torch.int64\n  needed: gradients of floating-point "
        "parameters\n  try: leave them out of grads",
    ),
    "numbers that differ": (
        lambda: SCALER.select(torch.tensor(False), (torch.ones(1), 4), (torch.ones(1), 3)),
        "loss_scale.select: the new 4 is no tensor, and the old one is 3\n  needed: tensors where "
        "the values differ\n  try: a torch.tensor for each of them",
    ),
    "a number for a tensor": (
        lambda: SCALER.select(
            torch.tensor(False), (torch.ones(2), 4), (torch.ones(2), torch.ones(3))
        ),
        "loss_scale.select: the new values have tensors of shapes [(2,)], but the old values have "
        "[(2,), (3,)]\n  needed: two trees with the same structure\n  try: "
        "scaler.select(finite, new_params, params)",
    ),
    "float16 gradients": (
        lambda: SCALER.unscale({"n": 1, "w": torch.ones(2).half()}, SCALER.init()),
        "loss_scale.unscale: grads['w'] is torch.float16\n  needed: gradients of float32 "
        "parameters, because small float16 gradients become 0\n  try: sf.mixed_precision(fn, "
        "compute=torch.float16), which keeps parameters in float32",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused(case: str) -> None:
    call, text = ERRORS[case]
    with pytest.raises(sf.ShardError) as error:
        call()
    assert without_line(error.value) == text
