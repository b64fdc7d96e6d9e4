"""Draw the pictures of docs/pictures.md: `python docs/pictures/draw.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardfn as sf
from shardfn import P

FOLDER = Path(__file__).parent
X = torch.arange(35.0)


def placed(x: torch.Tensor, spec: Any) -> Any:
    """A DTensor on 2 by 2 ranks."""
    with sf.fake_world(4):
        return sf.distribute(x, sf.make_mesh((2, 2), ("dp", "tp")), spec)


def step(params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    x, y = batch

    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = x
        for k in range(3):
            hidden = torch.relu(hidden @ params[f"up{k}"]) @ params[f"down{k}"]
        return ((hidden - y) ** 2).mean()

    loss, grads = sf.bucketed_grad(loss_fn)(params)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


def lowered() -> Any:
    """One rank's program of a training step, on 4 by 2 ranks."""
    wide = {f"up{k}": sf.ShapeDtype((512, 2048)) for k in range(3)}
    narrow = {f"down{k}": sf.ShapeDtype((2048, 512)) for k in range(3)}
    batch = sf.ShapeDtype((4096, 512)), sf.ShapeDtype((4096, 512))
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((4, 2), ("dp", "tp"))
        params = {**wide, **narrow}
        where = sf.placements(params, {"up*": P(None, "tp"), "down*": P("tp", None)})
        train = sf.shard(step, mesh, in_placements=(where, P("dp")))
        return train.lower(params, batch)


PICTURES: dict[str, Callable[[], Any]] = {
    "uneven": lambda: placed(X.reshape(7, 5), P("dp", "tp")),
    "zigzag": lambda: placed(torch.arange(8), P(sf.zigzag("tp"))),
    "folded": lambda: placed(torch.zeros(4, 6, 72, 48), P("dp", None, "tp*3")),
    "memory": lambda: lowered().memory,
    "time": lambda: lowered().time("H100"),
    "schedule": lambda: sf.schedules.one_f_one_b(4, 8),
}


if __name__ == "__main__":
    for name, value in PICTURES.items():
        sf.draw(value(), path=FOLDER / f"{name}.svg")
