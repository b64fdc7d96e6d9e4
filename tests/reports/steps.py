"""Steps whose reports are tested: each a lowered program of a small model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from shardfn import P

Tensor = torch.Tensor


class Block(nn.Module):
    """A layer of a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Layers, and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def modules(width: int = 64, layers: int = 3) -> Any:
    """A training step of modules: parameters sharded over dp and tp, on 8 ranks."""
    model, params, buffers = sf.functionalize(Tower(width, layers))
    plan = {
        "layers.*.up.weight": P("tp", "dp"),
        "layers.*.down.weight": P("dp", "tp"),
        "layers.*.up.bias": P("tp"),
    }
    where = sf.placements(params, plan, default=P())

    def loss_of(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(params, buffers, x)[0], y)

    def step(params: Any, x: Tensor, y: Tensor) -> Any:
        loss, grads = sf.bucketed_grad(loss_of)(params, x, y)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss

    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((4, 2), ("dp", "tp"))
        x, y = sf.ShapeDtype((128, width)), sf.ShapeDtype((128,), torch.int64)
        train = sf.shard(step, mesh, (where, P("dp"), P("dp")), backend="aten")
        return train.lower(params, x, y)


def stacked(layers: int = 5) -> Any:
    """A gradient through a scan over layers, on 4 ranks."""

    def loss_of(params: Any, x: Tensor) -> Tensor:
        layer = lambda c, p: (c + torch.relu(c @ p["up"]) @ p["down"], None)
        x, _ = sf.scan(layer, x, params)
        return x.square().mean()

    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        params = {"up": sf.ShapeDtype((layers, 32, 128)), "down": sf.ShapeDtype((layers, 128, 32))}
        where = {"up": P(None, "dp", "tp"), "down": P(None, "tp", "dp")}
        step = sf.shard(sf.value_and_grad(loss_of), mesh, (where, P("dp")), backend="aten")
        return step.lower(params, sf.ShapeDtype((64, 32)))


def replicated() -> Any:
    """A step that sends nothing but its gradient, on 2 ranks."""
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",))
        loss = lambda w, x: (x @ w).square().mean()
        step = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")), backend="aten")
        return step.lower(sf.ShapeDtype((33, 65)), sf.ShapeDtype((130, 33)))


STEPS = {"modules": modules, "stacked": stacked, "replicated": replicated}


def pipelined(width: int = 64, rows: int = 128, microbatches: int = 8) -> Any:
    """A gradient by a pipeline of four stages, on 8 ranks."""

    def loss_of(params: Any, x: Tensor, y: Tensor) -> Tensor:
        for p in params:
            x = torch.relu(x @ p)
        return (x - y).square().mean()

    schedule = sf.schedules.one_f_one_b(4, microbatches)
    step = sf.pipelined_grad(loss_of, microbatches, schedule=schedule)
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((4, 2), ("pp", "dp"))
        where = [P(pp=k) for k in range(4)]
        params = [sf.ShapeDtype((width, width)) for _ in range(4)]
        run = sf.shard(step, mesh, (where, P("dp"), P("dp")), backend="aten")
        x = sf.ShapeDtype((rows, width))
        return run.lower(params, x, x)


def followed() -> Any:
    """A call that autograd follows, on 2 ranks: a forward and a backward."""
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        loss = sf.shard(lambda w, x: (x @ w).square().mean(), mesh, (P(), P("dp")))
        w = torch.ones(33, 65, requires_grad=True)
        return loss.lower(w, torch.ones(130, 33))
