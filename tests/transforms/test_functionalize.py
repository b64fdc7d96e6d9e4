"""functionalize: a module as a pure function equals the module, alone and under every transform."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardfn as sf
from shardfn import P
from shardfn.runtime import cache

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.embed(i).tanh())


class Trees(nn.Module):
    """Containers of modules, a shared one, a weight behind a list, a scale that is no buffer, any tree as result."""

    class Out(NamedTuple):
        y: Tensor
        rest: Any

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
        self.again, self.rates, self.scale = self.parts["a"][0], [0.5, {"k": 2}], torch.tensor(3.0, dtype=F64)
        self.alias = [self.again.weight]
        self.register_buffer("shift", torch.tensor(0.25, dtype=F64), persistent=False)

    def forward(self, x: Tensor, *, k: float = 1.0) -> Any:
        for part in self.parts["a"]:
            x = part(x) * self.rates[0]
        x = self.again(x) * self.scale * k + self.shift
        return self.Out(x, {"n": 3, "none": None, "list": [x.sum(), (x @ self.alias[0],)], "o": OrderedDict(z=x.mean())})


class Ema(nn.Module):
    """A buffer that is written to in place, and one that is set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rand(3))
        self.register_buffer("mean", rand(3, seed=1))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0) * self.w * 0.1)
        self.steps = self.steps + 1
        return x * self.w - self.mean


class Taken(nn.Module):
    """The tensor of a module that returns more."""

    def __init__(self, inner: nn.Module, take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.take = inner, take

    def forward(self, *args: Any) -> Tensor:
        return self.take(self.inner(*args))


def first(out: Any) -> Tensor:
    return out[0]


class Itself(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1))[0]


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(3, 2))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "MLP": (MLP, rand(8, 3)),
    "Sequential": (lambda: nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5)), rand(8, 3)),
    "tied": (Tied, torch.arange(8) % 7),
    "trees": (lambda: Taken(Trees(), first), rand(8, 3)),
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), rand(8, 3)),
    "Conv and BatchNorm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()), rand(8, 2, 4, 4)),
    "Ema": (Ema, rand(8, 3)),
    "LSTM": (lambda: Taken(nn.LSTM(3, 4, 2, batch_first=True), first), rand(8, 5, 3)),
    "GRU": (lambda: Taken(nn.GRU(3, 4, batch_first=True), first), rand(8, 5, 3)),
    "RNN": (lambda: Taken(nn.RNN(3, 4, bidirectional=True, batch_first=True), first), rand(8, 5, 3)),
    "LSTMCell": (lambda: Taken(nn.LSTMCell(3, 4), first), rand(8, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), rand(8, 3)),
    "MultiheadAttention": (lambda: Itself(nn.MultiheadAttention(4, 2, batch_first=True)), rand(8, 5, 4)),
    "TransformerEncoderLayer": (encoder, rand(8, 5, 4)),
    "weight_norm": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), rand(8, 3)),
    "old weight_norm": (old_weight_norm, rand(8, 3)),
    "spectral_norm": (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), rand(8, 3)),
    "orthogonal": (lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"), rand(8, 3)),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)), rand(8, 2, 5)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True), rand(8, 2, 5)),
    "PReLU": (lambda: nn.PReLU(3), rand(8, 3)),
}
MODES = {"train": True, "eval": False}
NAMES = [pytest.param(name, training, id=f"{name} {mode}") for name in MODULES for mode, training in MODES.items()]


def made(name: str, training: bool = True) -> nn.Module:
    torch.manual_seed(3)
    module = MODULES[name][0]().double().train(training)
    with torch.no_grad():
        for x in [*module.parameters(), *module.buffers()]:
            if x.is_floating_point() and "norm" not in name:
                x.add_(torch.rand_like(x) * 0.1)
    return module


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, check_device=False)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {k: x.detach().clone() for k, x in (*module.named_parameters(), *module.named_buffers())}


def judged(name: str, training: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, buffers afterwards), of the plain module with plain autograd."""
    module, x = made(name, training), MODULES[name][1]
    loss = module(x).square().sum()
    loss.backward()
    return loss.detach(), {k: p.grad for k, p in module.named_parameters()}, dict(module.named_buffers())


def loss_of(fn: Any) -> Callable[..., Any]:
    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        out, buffers = fn(params, buffers, x)
        return out.square().sum(), buffers

    return loss


@pytest.mark.parametrize(("name", "training"), NAMES)
def test_the_function_equals_the_module_and_leaves_it_alone(name: str, training: bool) -> None:
    module, x = made(name, training), MODULES[name][1]
    before, given = state(module), x.clone()
    fn, params, buffers = sf.functionalize(module)
    kept = copy.deepcopy((params, buffers))
    out, new = fn(params, buffers, x)
    judge = made(name, training)
    close(out, judge(x).detach())
    close(new, dict(judge.named_buffers()))
    close((state(module), x, (params, buffers)), (before, given, kept))


@pytest.mark.parametrize(("name", "training"), NAMES)
def test_gradients_and_new_buffers_equal_autograds(name: str, training: bool) -> None:
    module, x = made(name, training), MODULES[name][1]
    fn, params, buffers = sf.functionalize(module)
    loss, grads, new = judged(name, training)
    (value, after), found = sf.value_and_grad(loss_of(fn), has_aux=True)(params, buffers, x)
    close((value, found, after), (loss, grads, new))
