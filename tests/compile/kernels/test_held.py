"""The memory that is stated for a program is that of the code that Inductor writes for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from bench.remat import peak
from shardfn import P
from shardfn._tree import leaves
from tests.support.stages.allocations import allocated

R = torch.randn
CLOSE = 0.05


def relu_mlp(w: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in w.values():
        x = torch.relu(x @ layer)
    return x.square().mean()


def trained(loss: Callable[..., Any], w: Any, *batch: Any, where: Any = None) -> Any:
    """A lowered step of AdamW, on one device, or with a strategy on two ranks."""
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)

    def step(w: Any, state: Any, *batch: Any) -> Any:
        value, grads = sf.bucketed_grad(loss)(w, *batch)
        grads, _ = sf.clip_by_global_norm(grads, 1.0)
        w, state = opt.update(w, grads, state)
        return w, state, value

    if where is None:
        run = sf.jit(step, donate_argnums=(0, 1))
    else:
        mesh = sf.make_mesh((2,), ("dp",))
        plan = sf.strategy(where, w, mesh)
        state = opt.state_placements(plan.state, w)
        places = (plan.params, state, *(plan.batch for _ in batch))
        run = sf.shard(step, mesh, places, donate_argnums=(0, 1))
    return run.lower(w, opt.init(w), *batch)


def widths() -> dict[str, torch.Tensor]:
    return {f"layers.{k}": R(256, 256) for k in range(3)}


def residual(w: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down in w:
        x = x + F.gelu(x @ up) @ down
    return x.square().mean()


def tensor_parallel() -> Any:
    mesh = sf.make_mesh((2,), ("tp",))
    w = [(R(128, 512), R(512, 128)) for _ in range(3)]
    places = [(P(None, "tp"), P("tp"))] * 3, P()
    return sf.shard(sf.value_and_grad(residual), mesh, places).lower(w, R(512, 128))


def blocks(w: Any, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A Llama of gated blocks with attention."""
    h = F.embedding(tokens, w["emb"])
    for layer in w["layers"]:
        n = F.rms_norm(h, (64,), layer["n1"])
        q, k, v = ((n @ layer[x]).unflatten(-1, (4, 16)).transpose(1, 2) for x in "qkv")
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + a.transpose(1, 2).flatten(2) @ layer["o"]
        n = F.rms_norm(h, (64,), layer["n2"])
        h = h + (F.silu(n @ layer["gate"]) * (n @ layer["up"])) @ layer["down"]
    return F.cross_entropy((h @ w["emb"].T).flatten(0, 1), y.flatten())


def llama() -> tuple[Any, torch.Tensor, torch.Tensor]:
    layer = lambda: {
        **{x: R(64, 64) for x in "qkvo"},
        **dict(gate=R(64, 256), up=R(64, 256), down=R(256, 64)),
        **dict(n1=torch.ones(64), n2=torch.ones(64)),
    }
    x, y = torch.randint(0, 512, (2, 8, 128))
    return dict(emb=R(512, 64), layers=[layer() for _ in range(2)]), x, y


def pictures(w: Any, x: torch.Tensor) -> torch.Tensor:
    for c in w:
        x = F.relu(F.conv2d(x, c, padding=1))
    return x.mean((2, 3)).square().mean()


def normed(w: Any, x: torch.Tensor) -> torch.Tensor:
    for up, down, g, b in w:
        h = F.layer_norm(x, (128,), g, b) @ up
        x = x + F.gelu(h, approximate="tanh") @ down
    return x.square().mean()


def attention(w: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in w:
        q, k, v = (x @ layer).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT, -1) @ v
    return x.square().mean()


def module(m: torch.nn.Module, *args: torch.Tensor) -> Any:
    """A lowered gradient of a module, whose first result counts."""
    fn, params, buffers = sf.functionalize(m)

    def loss(params: Any, *args: torch.Tensor) -> torch.Tensor:
        out = fn(params, buffers, *args)[0]
        first = out if isinstance(out, torch.Tensor) else out[0]
        return first.square().mean()

    return sf.jit(sf.value_and_grad(loss)).lower(params, *args)


def pooled() -> torch.nn.Module:
    nn = torch.nn
    first = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AvgPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(72, 10))


class UNet(torch.nn.Module):
    """Two levels, joined along the channels of group norms."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8))
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 1))
        self.last = nn.Sequential(nn.GroupNorm(2, 16), nn.SiLU(), nn.Conv2d(16, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.first(x))
        h = F.silu(self.norm(self.down(x)))
        return self.last(torch.cat([self.up(h), x], 1))


def heads(w: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention, by the kernel that takes and makes several tensors at once."""
    q, k, v = (x @ w).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).contiguous()
    return F.scaled_dot_product_attention(q, k, v).square().mean()


def tangent(w: Any, x: torch.Tensor, t: torch.Tensor) -> Any:
    """The tangent of one matrix along another, whose product is added to a second one."""
    return sf.jvp(lambda w: torch.tanh(x @ w).square().mean(), (w,), (t,))


def graded(loss: Callable[..., Any], w: Any, *batch: torch.Tensor) -> Any:
    return sf.jit(sf.value_and_grad(loss)).lower(w, *batch)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: graded(relu_mlp, widths(), R(1024, 256)),
    "adamw": lambda: trained(relu_mlp, widths(), R(1024, 256)),
    "ddp": lambda: trained(relu_mlp, widths(), R(1024, 256), where="ddp"),
    "zero3": lambda: trained(relu_mlp, widths(), R(1024, 256), where="zero3"),
    "tensor parallel": tensor_parallel,
    "llama": lambda: trained(blocks, *llama()),
    "llama zero3": lambda: trained(blocks, *llama(), where="zero3"),
    "llama forward": lambda: sf.jit(blocks).lower(*llama()),
    "convolutions": lambda: graded(pictures, [R(32, 3, 3, 3), R(64, 32, 3, 3)], R(8, 3, 32, 32)),
    "layer norm": lambda: graded(
        normed, [(R(128, 512), R(512, 128), torch.ones(128), torch.zeros(128))] * 3, R(512, 128)
    ),
    "attention": lambda: graded(attention, [R(64, 192) for _ in range(3)], R(8, 128, 64)),
    "softmax": lambda: graded(
        lambda w, x: torch.softmax(x @ w, -1).square().mean(), R(8, 8), R(8, 8)
    ),
    "cross entropy of logits": lambda: graded(
        lambda w, x, y: F.binary_cross_entropy_with_logits(x @ w, y),
        R(8, 3),
        R(20, 8),
        torch.rand(20, 3),
    ),
    "gru": lambda: module(torch.nn.GRU(16, 16), R(5, 8, 16)),
    "linear layers on sequences": lambda: graded(
        relu_mlp, {"a": R(16, 64), "b": R(64, 16), "c": R(16, 16)}, R(4, 8, 16)
    ),
    "pools": lambda: module(pooled(), R(2, 3, 18, 18)),
    "group norm": lambda: module(
        torch.nn.Sequential(torch.nn.Conv1d(4, 8, 3), torch.nn.GroupNorm(2, 8)), R(2, 4, 50)
    ),
    "u-net": lambda: module(UNet(), R(2, 3, 16, 16)),
    "instance norm": lambda: module(
        torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.InstanceNorm2d(6)), R(2, 3, 12, 12)
    ),
    "heads": lambda: graded(heads, R(12, 36), R(3, 5, 12)),
    "tangent": lambda: sf.jit(tangent).lower(R(16, 24), R(9, 16), R(16, 24)),
    "an expanded number": lambda: graded(lambda w, x: (x @ w).sum(), R(16, 9), R(10, 16)),
    "every second column": lambda: graded(
        lambda w, x: (x[:, ::2] @ w).square().sum(), R(8, 9), R(10, 16)
    ),
    "dropout": lambda: graded(
        lambda w, x: (F.dropout(torch.relu(x @ w), 0.3) @ w.T).square().mean(), R(32, 64), R(50, 32)
    ),
    "bfloat16": lambda: graded(
        lambda w, x: relu_mlp({k: y.bfloat16() for k, y in w.items()}, x),
        widths(),
        R(1024, 256).bfloat16(),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_stated_peak_is_that_of_inductors_code(name: str) -> None:
    with sf.fake_world(2):
        lowered = PROGRAMS[name]()
        found = lowered.memory
        assert found.peak == pytest.approx(allocated(lowered), rel=CLOSE)
        assert sum(tensor.nbytes for tensor in found.alive) == found.peak


def scanned(w: Any, x: torch.Tensor) -> torch.Tensor:
    step = lambda c, layer: (c + torch.relu(c @ layer["up"]) @ layer["down"], c.sum())
    c, sums = sf.scan(step, x, w)
    return c.square().mean() + sums.mean()


RUN = {
    "mlp": (relu_mlp, widths(), R(1024, 256)),
    "scan": (scanned, dict(up=R(5, 128, 512), down=R(5, 512, 128)), R(512, 128)),
}


@pytest.mark.parametrize("name", RUN)
def test_the_stated_peak_is_what_the_compiled_program_is_seen_to_allocate(name: str) -> None:
    loss, w, x = RUN[name]
    step = sf.jit(sf.value_and_grad(loss))
    step(w, x)
    lowered = step.lower(w, x)
    given = [*leaves((w, x)), *lowered.traced.captured.closed_over]
    seen = peak(lambda: step(w, x)) + sum(y.nbytes for y in given)
    assert lowered.memory.peak == pytest.approx(seen, rel=CLOSE)
