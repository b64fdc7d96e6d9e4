"""functionalize: a module as a pure function equals the module, alone and under every transform."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from stagings import counts
from torch import Tensor, nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

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
    """Containers of modules, a shared one, a weight behind a list, a scale that is no buffer,
    any tree as result.
    """

    class Out(NamedTuple):
        y: Tensor
        rest: Any

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
        self.again, self.rates, self.scale = (
            self.parts["a"][0],
            [0.5, {"k": 2}],
            torch.tensor(3.0, dtype=F64),
        )
        self.alias = [self.again.weight]
        self.register_buffer("shift", torch.tensor(0.25, dtype=F64), persistent=False)

    def forward(self, x: Tensor, *, k: float = 1.0) -> Any:
        for part in self.parts["a"]:
            x = part(x) * self.rates[0]
        x = self.again(x) * self.scale * k + self.shift
        return self.Out(
            x,
            {
                "n": 3,
                "none": None,
                "list": [x.sum(), (x @ self.alias[0],)],
                "o": OrderedDict(z=x.mean()),
            },
        )


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
        return self.attention(
            x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        )[0]


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
    "BatchNorm": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        rand(8, 3),
    ),
    "Conv and BatchNorm": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()),
        rand(8, 2, 4, 4),
    ),
    "Ema": (Ema, rand(8, 3)),
    "LSTM": (lambda: Taken(nn.LSTM(3, 4, 2, batch_first=True), first), rand(8, 5, 3)),
    "GRU": (lambda: Taken(nn.GRU(3, 4, batch_first=True), first), rand(8, 5, 3)),
    "RNN": (
        lambda: Taken(nn.RNN(3, 4, bidirectional=True, batch_first=True), first),
        rand(8, 5, 3),
    ),
    "LSTMCell": (lambda: Taken(nn.LSTMCell(3, 4), first), rand(8, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), rand(8, 3)),
    "MultiheadAttention": (
        lambda: Itself(nn.MultiheadAttention(4, 2, batch_first=True)),
        rand(8, 5, 4),
    ),
    "TransformerEncoderLayer": (encoder, rand(8, 5, 4)),
    "weight_norm": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        rand(8, 3),
    ),
    "old weight_norm": (old_weight_norm, rand(8, 3)),
    "spectral_norm": (
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
        rand(8, 3),
    ),
    "orthogonal": (
        lambda: torch.nn.utils.parametrizations.orthogonal(
            nn.Linear(3, 3), orthogonal_map="cayley"
        ),
        rand(8, 3),
    ),
    "GroupNorm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)), rand(8, 2, 5)),
    "InstanceNorm": (
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        rand(8, 2, 5),
    ),
    "PReLU": (lambda: nn.PReLU(3), rand(8, 3)),
}
MODES = {"train": True, "eval": False}
NAMES = [
    pytest.param(name, training, id=f"{name} {mode}")
    for name in MODULES
    for mode, training in MODES.items()
]


def made(name: str, training: bool = True) -> nn.Module:
    torch.manual_seed(3)
    module = MODULES[name][0]().double().train(training)
    with torch.no_grad():
        for x in [*module.parameters(), *module.buffers()]:
            if x.is_floating_point() and "norm" not in name:
                x.add_(torch.rand_like(x) * 0.1)
    return module


def close(got: Any, wanted: Any) -> None:
    assert_close(got, wanted, rtol=1e-12, atol=1e-12, check_device=False)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {k: x.detach().clone() for k, x in (*module.named_parameters(), *module.named_buffers())}


def judged(name: str, training: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, buffers afterwards), of the plain module with plain autograd."""
    module, x = made(name, training), MODULES[name][1]
    loss = module(x).square().sum()
    loss.backward()
    return (
        loss.detach(),
        {k: p.grad for k, p in module.named_parameters()},
        dict(module.named_buffers()),
    )


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


WORLDS = {"2": ((2,), P("a")), "2 x 4": ((2, 4), P(("a", "b")))}
SHARDED = [
    "MLP",
    "tied",
    "trees",
    "BatchNorm",
    "Conv and BatchNorm",
    "Ema",
    "LSTM",
    "MultiheadAttention",
]
SHARDED += ["TransformerEncoderLayer", "weight_norm"]


@functools.cache  # one function for all worlds, which share its capture
def loss_and_state(name: str) -> tuple[Any, Any, Any]:
    fn, params, buffers = sf.functionalize(made(name))
    return loss_of(fn), params, buffers


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SHARDED)
def test_sharding_over_the_batch_changes_nothing(name: str, world: str) -> None:
    x, (of_state, params, buffers) = MODULES[name][1], loss_and_state(name)
    shape, spec = WORLDS[world]
    loss, grads, new = judged(name, True)
    with sf.fake_world(len(range(torch.Size(shape).numel()))):
        mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
        plain = sf.value_and_grad(of_state, has_aux=True)
        bucketed = sf.bucketed_grad(of_state, has_aux=True)
        for transform in (plain, bucketed):
            step = sf.shard(transform, mesh, (None, None, spec), backend="aten")
            (value, after), found = step(params, buffers, x)
            close(sf.full((value, found, after)), (loss, grads, new))


@pytest.mark.parametrize(
    "name",
    [
        "MLP",
        "tied",
        "BatchNorm",
        "Ema",
        "LSTM",
        "TransformerEncoderLayer",
        "weight_norm",
        "old weight_norm",
    ],
)
def test_vmap_over_parameters_is_an_ensemble(name: str) -> None:
    x = MODULES[name][1]
    fn, params, buffers = sf.functionalize(made(name))
    scaled = [
        sf.tree_map(lambda p, k=k: p * k if p.is_floating_point() else p, (params, buffers))
        for k in (1.0, 0.75, 0.5)
    ]
    stacked = sf.tree_map(lambda *ps: torch.stack(ps), *scaled)
    got = sf.vmap(fn, in_axes=(0, 0, None))(*stacked, x)
    close(got, sf.tree_map(lambda *outs: torch.stack(outs), *[fn(*ps, x) for ps in scaled]))
    grads = sf.vmap(sf.grad(loss_of(fn), has_aux=True), in_axes=(0, 0, None))(*stacked, x)
    wanted = [sf.grad(loss_of(fn), has_aux=True)(*ps, x) for ps in scaled]
    close(grads, sf.tree_map(lambda *outs: torch.stack(outs), *wanted))


@pytest.mark.parametrize("name", ["MLP", "BatchNorm", "Ema"])
def test_vmap_over_inputs_gives_each_sample_its_own_new_buffers(name: str) -> None:
    xs = torch.stack([MODULES[name][1], MODULES[name][1].flip(0) * 2])
    fn, params, buffers = sf.functionalize(made(name))
    got = sf.vmap(fn, in_axes=(None, None, 0))(params, buffers, xs)
    wanted = [fn(params, buffers, x) for x in xs]
    close(got, sf.tree_map(lambda *outs: torch.stack(outs), *wanted))
    found = sf.vmap(sf.grad(loss_of(fn), has_aux=True), in_axes=(None, None, 0))(
        params, buffers, xs
    )
    wanted = [sf.grad(loss_of(fn), has_aux=True)(params, buffers, x) for x in xs]
    close(found, sf.tree_map(lambda *outs: torch.stack(outs), *wanted))


@pytest.mark.parametrize(
    "name", ["MLP", "tied", "BatchNorm", "Conv and BatchNorm", "weight_norm", "GRUCell", "LSTM"]
)
def test_jvp_and_grad_agree(name: str) -> None:
    x = MODULES[name][1]
    fn, params, buffers = sf.functionalize(made(name))
    loss = lambda p: loss_of(fn)(p, buffers, x)[0]
    direction = sf.tree_map(torch.cos, params)
    _, tangent = sf.jvp(loss, (params,), (direction,))
    wanted = sum((g * direction[k]).sum() for k, g in judged(name, True)[1].items())
    assert_close(tangent, wanted, rtol=1e-11, atol=1e-11)


def test_second_derivatives_and_jacobians_pass_through() -> None:
    module, x = made("MLP"), MODULES["MLP"][1]
    fn, params, buffers = sf.functionalize(module)
    loss = lambda w: loss_of(fn)({**params, "second.weight": w}, buffers, x)[0]
    plain = lambda w: torch.func.functional_call(module, {"second.weight": w}, x).square().sum()
    w = params["second.weight"]
    close(sf.hessian(loss)(w), torch.func.hessian(plain)(w))
    close(sf.jacrev(loss)(w), torch.func.jacrev(plain)(w))


def test_torch_func_takes_it_too() -> None:
    fn, params, buffers = sf.functionalize(made("BatchNorm"))
    _, grads, new = judged("BatchNorm", True)
    close(
        torch.func.grad(loss_of(fn), has_aux=True)(params, buffers, MODULES["BatchNorm"][1]),
        (grads, new),
    )


def test_trees_of_arguments_and_results_keep_their_kind() -> None:
    torch.manual_seed(3)
    module, x = Trees().double(), rand(8, 3)
    fn, params, buffers = sf.functionalize(module)
    got, _ = fn(params, buffers, x, k=0.5)
    wanted = module(x, k=0.5)
    assert (
        type(got) is Trees.Out
        and type(got.rest["o"]) is OrderedDict
        and type(got.rest["list"]) is list
    )
    assert (got.rest["n"], got.rest["none"]) == (3, None)
    close(
        (got.y, got.rest["list"], got.rest["o"]["z"]),
        sf.tree_map(torch.detach, (wanted.y, wanted.rest["list"], wanted.rest["o"]["z"])),
    )


def test_a_tied_weight_is_there_once() -> None:
    _, params, _ = sf.functionalize(Tied())
    assert list(params) == ["embed.weight"]


def test_parameters_and_buffers_are_values_of_their_own() -> None:
    module = made("BatchNorm")
    _, params, buffers = sf.functionalize(module)
    assert not any(x.requires_grad for x in params.values())
    kept = state(module)
    for x in (*params.values(), *buffers.values()):
        x.zero_()
    close(state(module), kept)


def test_the_hooks_are_those_of_when_it_was_made() -> None:
    module, x = made("BatchNorm", training=False), MODULES["BatchNorm"][1]
    fn, params, buffers = sf.functionalize(module)
    wanted = module(x).detach()
    module.register_forward_hook(lambda m, args, out: out * 2)
    out, new = fn(params, buffers, x)
    close((out, new), (wanted, buffers))


def test_two_calls_capture_once() -> None:
    fn, params, buffers = sf.functionalize(made("MLP"))
    x = MODULES["MLP"][1]
    before = counts["captures"]
    for k in range(3):
        fn(params, buffers, x + k)
    assert counts["captures"] == before + 1
    step = sf.grad(loss_of(fn), has_aux=True)
    for _ in range(3):
        step(params, buffers, x)
    assert counts["captures"] == before + 2


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda fn: pickle.loads(pickle.dumps(fn))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("name", ["MLP", "BatchNorm", "LSTM", "tied"])
def test_it_survives_copies_and_pickle(name: str, again: Callable[[Any], Any]) -> None:
    fn, params, buffers = sf.functionalize(made(name))
    x = MODULES[name][1]
    wanted = fn(params, buffers, x)
    other = again(fn)
    assert repr(other) == repr(fn)
    close(other(params, buffers, x), wanted)


def test_it_prints_and_shows_its_parameters() -> None:
    fn, _, _ = sf.functionalize(MLP())
    assert repr(fn) == "functionalize(MLP)"
    parameters = inspect.signature(fn).parameters
    assert list(parameters) == ["params", "buffers", "x"]


def test_it_can_be_differentiated_itself_and_its_arguments_are_named() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(x) * x).sum()

    module, x = Loss().double(), rand(8, 3)
    fn, params, buffers = sf.functionalize(module)
    module(x).backward()
    wanted = {k: p.grad for k, p in module.named_parameters()}
    with simulated(a=2) as mesh:
        step = sf.shard(
            sf.bucketed_grad(fn, has_aux=True), mesh, (None, None, P("a")), backend="aten"
        )
        (_, new), grads = step(params, buffers, x)
        close(sf.full((grads, new)), (wanted, dict(module.named_buffers())))
        leaves = [
            leaf for bucket in step.lower(params, buffers, x).plan.buckets for leaf in bucket.leaves
        ]
    assert sorted(leaves) == ["params['norm.bias']", "params['norm.weight']"]
    with pytest.raises(sf.TreeError, match="missing a required argument: 'x'"):
        fn(params, buffers)
