"""Captures and lowers programs for four GPUs that are not there: `python -m no_gpu.captures
LIBRARY NAME ...` prints the faults of the programs of these names as JSON.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])  # before torch asks for its devices

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfn as sf
import shardfn.mesh
import shardfn.runtime.arguments
from shardfn import P
from shardfn.runtime.recorded import refuse_host_work

S = sf.ShapeDtype
W, X = S((4, 4)), S((16, 4))
ROWS = P("dp")
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Note a program, which lowers something."""
    PROGRAMS[fn.__name__] = fn
    return fn


def grid(*shape: int) -> Any:
    shape = shape or (4,)
    return sf.make_mesh(shape, ("dp", "tp")[: len(shape)], device_type="cuda")


def lowered(fn: Callable[..., Any], placements: Any, *args: Any, **options: Any) -> Any:
    return sf.shard(fn, grid(), placements, **options).lower(*args)


def step(loss: Callable[..., torch.Tensor], *args: Any) -> Any:
    """The value and the gradient of a loss of replicated weights and a sharded batch."""
    return lowered(sf.value_and_grad(loss), (P(), P("dp")), *args or (W, X))


@program
def scan() -> Any:
    layer = lambda x, w: (torch.tanh(x @ w), None)
    return step(lambda w, x: sf.scan(layer, x, w)[0].sum(), S((3, 4, 4)), X)


@program
def dropout_in_a_scan() -> Any:
    layer = lambda x, w: (F.dropout(x @ w, 0.1), None)
    return step(lambda w, x: sf.scan(layer, x, w)[0].sum(), S((3, 4, 4)), X)


@program
def cond() -> Any:
    return step(lambda w, x: sf.cond(w.sum() > 0, torch.sin, torch.cos, x @ w).sum())


@program
def while_loop() -> Any:
    go_on = lambda x: (x**2).sum() < 10
    return lowered(lambda x: sf.while_loop(go_on, lambda x: x * 1.5, x), P("dp"), X)


@program
def checkpoint() -> Any:
    layer = lambda w, x: torch.tanh(F.dropout(x @ w, 0.3))
    return step(lambda w, x: sf.checkpoint(layer)(w, x).sum())


@program
def custom_derivative() -> Any:
    @sf.custom_vjp
    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    sine.defvjp(lambda x: (torch.sin(x), x), lambda x, g: (g * torch.cos(x),))
    return step(lambda w, x: sine(x @ w).sum())


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * torch.cos(x)


@program
def autograd_function() -> Any:
    return step(lambda w, x: Sine.apply(x @ w).sum())


@program
def hook() -> Any:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.register_hook(lambda g: g * 2)
        return y.sin().sum()

    return step(loss)


@program
def double_derivative() -> Any:
    inner = lambda w, x: sf.grad(lambda w: torch.sin(x @ w).sum())(w).square().sum()
    return step(inner)


@program
def per_sample() -> Any:
    loss = lambda w, x: torch.sin(x @ w).sum()
    each = sf.vmap(sf.grad(loss), in_axes=(None, 0))
    return lowered(each, (P(), P("dp")), W, X)


@program
def buckets() -> Any:
    loss = lambda p, x: torch.tanh(torch.tanh(x @ p["a"]) @ p["b"]).sum()
    fn = sf.bucketed_grad(loss, 64)
    return lowered(fn, (P(), P("dp")), {"a": W, "b": W}, X)


@program
def random_numbers() -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        there = torch.rand(4, device="cpu").to(x.device)
        order = torch.randperm(16, device=x.device)[:, None]
        return torch.rand_like(x) + torch.bernoulli(x.sigmoid()) + there + order

    return lowered(fn, P("dp"), X)


@program
def without_a_mesh() -> Any:
    place = shardfn.runtime.arguments
    loss = lambda w, x: F.dropout(x @ w, 0.5).sum()
    with mock.patch.object(place, "default_device_type", lambda: "cuda"):
        return sf.jit(sf.value_and_grad(loss)).lower(W, X)


@program
def shard_map_in_jit() -> Any:
    own = lambda x: sf.psum(x * sf.axis_index("dp"), "dp")
    return sf.jit(sf.shard_map(own, grid(), P("dp"), P())).lower(X)


@program
def rows_to_ranks() -> Any:
    def own(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counts = torch.full((sf.axis_size("dp"),), 1, device=x.device)
        rows, came = sf.ragged_all_to_all(x @ w, counts, "dp")
        back, _ = sf.ragged_all_to_all(rows.sin(), came, "dp", rows="1x")
        return sf.psum(back.sum(), "dp")

    loss = sf.shard_map(own, grid(), (P(), P("dp")), P())
    return lowered(sf.grad(loss), (P(), P("dp")), W, X)


@program
def dtensors_inside() -> Any:
    mesh = grid()

    def own(x: torch.Tensor) -> torch.Tensor:
        sharded = DTensor.from_local(x, mesh, [Shard(0)])
        return sharded.redistribute(placements=[Replicate()]).to_local().sum()

    return sf.shard_map(own, mesh, P("dp"), P()).lower(X)


@program
def attention() -> Any:
    loss = lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    of_sum = lambda q: loss(q).float().sum()
    q = S((8, 4, 16, 64), torch.bfloat16)
    return lowered(sf.value_and_grad(of_sum), P("dp"), q)


def _module(make: Callable[[], nn.Module], x: Any, place: Any = ROWS) -> Any:
    def lower() -> Any:
        fn, params, buffers = sf.functionalize(make())

        def loss(p: Any, b: Any, x: torch.Tensor) -> torch.Tensor:
            out, _ = fn(p, b, x)
            out = out[0] if isinstance(out, tuple) else out
            return out.float().square().sum()

        given = sf.tree_map(lambda t: S(tuple(t.shape), t.dtype), (params, buffers))
        return lowered(sf.value_and_grad(loss), (P(), P(), place), *given, x)

    return lower


PROGRAMS |= {
    "lstm": _module(lambda: nn.LSTM(4, 8), S((5, 8, 4)), P(None, "dp")),
    "gru": _module(lambda: nn.GRU(4, 8, batch_first=True), S((8, 5, 4))),
    "encoder": _module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), S((8, 5, 8))
    ),
    "convolution": _module(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)),
        S((8, 3, 8, 8)),
    ),
    "embedding_bag": _module(lambda: nn.EmbeddingBag(16, 8, mode="sum"), S((8, 5), torch.int64)),
    "group_norm": _module(
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8)), S((8, 4, 8, 8))
    ),
}


def _optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    def lower() -> Any:
        optimizer = sf.optim(kind, lr=0.01, **options)
        loss = lambda p, x: torch.tanh(x @ p["w"] + p["b"]).sum()

        def train(p: Any, s: Any, x: torch.Tensor) -> Any:
            value, grads = sf.value_and_grad(loss)(p, x)
            return *optimizer.update(p, grads, s), value

        params = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
        given = sf.tree_map(lambda t: S(tuple(t.shape), t.dtype), (params, optimizer.init(params)))
        ins = (P(), P(), P("dp"))
        return lowered(train, ins, *given, X, donate_argnums=(0, 1))

    return lower


OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
PROGRAMS |= {kind.__name__: _optimizer(kind) for kind in OPTIMIZERS}
PROGRAMS["AdamW, fused"] = _optimizer(torch.optim.AdamW, fused=True)


def refusals() -> dict[str, str]:
    """The messages for tensors of two devices."""
    mesh, one, kept = grid(), torch.ones(()), torch.ones(4)
    cases = {
        "closed over": lambda x: x + kept,
        "made inside": lambda x: x + torch.ones(4),
        "random": lambda x: x + torch.rand(4),
    }
    found = {}
    for name, fn in cases.items():
        found[name] = refused(lambda fn=fn: sf.shard(fn, mesh, P("dp")).lower(X))
    placed = sf.shard(lambda x: x * one, mesh, P("dp"))
    found["an argument"] = refused(lambda: placed(torch.ones(16, 4)))
    return found


def host_work() -> dict[str, str]:
    """Why programs cannot be recorded as CUDA graphs; nothing of those that can."""
    scale = torch.tensor(2.0)
    cases = {
        "plain": lambda: PROGRAMS["AdamW"](),
        "dropout in a scan": lambda: PROGRAMS["dropout_in_a_scan"](),
        "cond": lambda: PROGRAMS["cond"](),
        "while_loop": lambda: PROGRAMS["while_loop"](),
        "rows by counts": lambda: PROGRAMS["rows_to_ranks"](),
        "on the CPU": lambda: lowered(lambda x: x.cpu().sum(), P("dp"), X),
        "an input": lambda: lowered(lambda x: x * scale, P("dp"), X),
    }
    found = {}
    for name, make in cases.items():
        made = make()
        placed, own = made.traced.placed, made.program
        found[name] = refused(functools.partial(refuse_host_work, name, placed, own))
    return found


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except sf.ShardError as error:
        return str(error)
    return ""


def main(names: list[str]) -> dict[str, Any]:
    """The faults of programs, by name, and the messages for tensors of two devices."""
    faults = {}
    for name in names or PROGRAMS:
        try:
            text = PROGRAMS[name]().text()
            assert "cuda" in text or "device" not in text, text
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"
    return {"faults": faults, "refusals": refusals(), "host work": host_work()}


if __name__ == "__main__":
    there = mock.patch.object(shardfn.mesh, "refuse_absent", lambda kind: None)
    with there, sf.fake_world(4, numerics=False):
        print(json.dumps(main(sys.argv[2:])))
