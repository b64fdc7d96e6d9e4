"""A module whose parameters get their shapes at its first call has, after a captured call, those
that a plain call makes; after a capture that fails, it is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardfn as sf
from shardfn import P

Call = Callable[[nn.Module, torch.Tensor], Any]


class Scale(LazyModuleMixin, nn.Module):
    """A module of a user's, which stays of its class."""

    def __init__(self, fill: Callable[[torch.Tensor], Any] = lambda x: 2.0) -> None:
        super().__init__()
        self.weight, self.fill = UninitializedParameter(), fill

    def initialize_parameters(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.weight.materialize(x.shape[-1:])
            self.weight.copy_(torch.as_tensor(self.fill(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def dense() -> nn.Module:
    return nn.Sequential(
        nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3), nn.LazyLinear(2), Scale()
    )


def images() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(3, 2),
        nn.LazyBatchNorm2d(),
        nn.LazyConvTranspose2d(2, 2),
        nn.LazyInstanceNorm2d(affine=True),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def plainly(transform: Callable[[Any], Any]) -> Call:
    return lambda module, x: transform(lambda x: module(x))(x)


def sharded(fn: Any, **options: Any) -> Any:
    return sf.shard(fn, sf.make_mesh((3,), ("a",)), P("a"), backend="aten", **options)


def per_rank(module: nn.Module, x: torch.Tensor) -> Any:
    mesh = sf.make_mesh((3,), ("a",))
    return sf.jit(sf.shard_map(lambda x: module(x), mesh, P("a"), P("a")), backend="aten")(x)


def scanned(module: nn.Module, x: torch.Tensor) -> Any:
    loop = lambda x: sf.scan(lambda u, row: (u, module(row)), torch.zeros(()), x)[1]
    return sf.jit(loop, backend="aten")(x)


def chosen(module: nn.Module, x: torch.Tensor) -> Any:
    branch = lambda x: sf.cond(x.sum() < 1e9, module, lambda x: x[:, :2] + 0, x)
    return sf.jit(branch, backend="aten")(x)


jitted = lambda fn: sf.jit(fn, backend="aten")
CALLS: dict[str, Call] = {
    "jit": plainly(jitted),
    "jit of the module": lambda module, x: jitted(module)(x),
    "shard": plainly(sharded),
    "shard_map": per_rank,
    "value and gradient": lambda module, x: sf.value_and_grad(
        lambda x: (module(x).sum(), module(x)), has_aux=True
    )(x)[0][1],
    "vmap": plainly(sf.vmap),
    "scan": scanned,
    "cond": chosen,
    "checkpoint": plainly(lambda fn: jitted(sf.checkpoint(fn))),
    "checkpoint of torch": plainly(
        lambda fn: jitted(lambda x: checkpoint(fn, x, use_reentrant=False))
    ),
    "a dynamic size": lambda module, x: jitted(lambda x: module(x))(sf.mark_dynamic(x, 0)),
}
CASES: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]
CASES = [(name, lambda: nn.LazyLinear(2, dtype=torch.float64), (3, 5)) for name in CALLS]
CASES += [
    ("jit of the module", dense, (3, 5)),
    ("shard", dense, (3, 5)),
    ("shard", images, (3, 2, 5, 5)),
]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().double()


@pytest.mark.parametrize(("name", "make", "shape"), CASES)
def test_s11_a_captured_call_makes_the_parameters_of_a_plain_one(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    plain = made(make)
    expected, drawn = plain(x), torch.get_rng_state()
    lazy = made(make)
    with sf.fake_world(3):
        out = CALLS[name](lazy, x)
        assert_close(sf.full(out).detach(), expected.detach())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_close(lazy.state_dict(), plain.state_dict())
    assert [*map(type, lazy.modules())] == [*map(type, plain.modules())]
    assert str(lazy) == str(plain)
    assert [*map(type, lazy.parameters())] == [*map(type, plain.parameters())]


def test_s11_gradients_reach_the_parameters_and_the_next_call_knows_them() -> None:
    lazy, x = made(dense), torch.randn(3, 5, dtype=torch.float64)
    plain = made(dense)
    with sf.fake_world(3):
        step = sharded(lambda x: lazy(x).square().sum())
        for _ in range(2):
            lazy.zero_grad()
            plain.zero_grad()
            for call in (step, lambda x: plain(x).square().sum()):
                torch.manual_seed(5)
                call(x).backward()
            for mine, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
                assert_close(mine.grad, theirs.grad)


def _called(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def _raises(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise KeyError(f"mine, of {len(module(x).shape)} dims")


def _branches(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = module(x)
    return out if out.sum() > 0 else -out


def _branches_before(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else module(x)


def _fails(x: torch.Tensor) -> float:
    raise ValueError("my start")


SHAPED = "reads a parameter that has no shape yet"
OF_VALUES = "makes its parameters from the values of its first call's arguments"
FAILING: list[tuple[Any, Any, Any, str]] = [
    (dense, _raises, KeyError, "mine, of 2 dims"),
    (dense, _branches, sf.CaptureError, "branches on a tensor's value"),
    (dense, _branches_before, sf.CaptureError, "branches on a tensor's value"),
    (lambda: nn.LazyConv2d(2, 2), _called, RuntimeError, "to LazyConv2d"),
    (lambda: Scale(_fails), _called, ValueError, "my start"),
    (lambda: Scale(lambda x: x.mean(0)), _called, sf.CaptureError, OF_VALUES),
    (lambda: Scale(lambda x: x.mean().item()), _called, sf.CaptureError, OF_VALUES),
    (lambda: nn.LazyLinear(2), lambda m, x: x * m.weight, sf.CaptureError, SHAPED),
    (lambda: nn.LazyLinear(2), lambda m, x: m.forward(x), sf.CaptureError, SHAPED),
]


def state_of(module: nn.Module) -> Any:
    """What a failed capture must not change."""
    parts = [*module.modules()]
    tables = [sorted((name, id(x)) for name, x in vars(part).items()) for part in parts]
    tensors = [(id(x), type(x)) for part in parts for x in part._parameters.values()]
    tensors += [(id(x), type(x)) for part in parts for x in part._buffers.values()]
    hooks = [[*part._forward_pre_hooks.items()] for part in parts]
    hooks += [[*part._load_state_dict_pre_hooks] for part in parts]
    return [*map(type, parts)], tables, tensors, hooks, torch.get_rng_state().tolist()


@pytest.mark.parametrize(("make", "fn", "error", "text"), FAILING)
def test_s11_a_capture_that_fails_leaves_the_module_as_it_was(
    make: Any, fn: Any, error: Any, text: str
) -> None:
    assert_left(jitted, make, fn, error, text)


@pytest.mark.parametrize("transform", [sharded, lambda fn: sf.grad(lambda x: fn(x).sum())])
@pytest.mark.parametrize(("make", "fn", "error", "text"), FAILING)
def test_s11_so_does_one_under_shard_and_grad(
    transform: Any, make: Any, fn: Any, error: Any, text: str
) -> None:
    assert_left(transform, make, fn, error, text)


def assert_left(transform: Any, make: Any, fn: Any, error: Any, text: str) -> None:
    """A module is after a failed capture what it was before."""
    if make is dense:
        make = lambda: nn.Sequential(nn.LazyLinear(4), Scale())
    module, x = made(make), torch.ones(3, 5, dtype=torch.float64)
    before = state_of(module)
    with sf.fake_world(3), pytest.raises(error, match=text):
        transform(lambda x: fn(module, x))(x)
    assert state_of(module) == before


def test_s11_parameters_without_a_shape_are_refused_by_name() -> None:
    module = nn.LazyLinear(2)
    named = dict(module.named_parameters())
    with sf.fake_world(3):
        for call, place in (
            (lambda: sf.jit(lambda x, w: x)(torch.ones(2), module.weight), ": w has"),
            (lambda: sf.grad(lambda p: p["weight"].sum())(named), r"p\['weight'\], p\['bias'\] h"),
            (lambda: sf.distribute(named, sf.make_mesh((3,), ("a",)), P()), r"\['bias'\] have"),
            (lambda: sf.functionalize(module), "weight, bias have"),
        ):
            with pytest.raises(sf.TreeError, match=place):
                call()
        with pytest.raises(sf.CaptureError, match="makes a module whose parameters have no shape"):
            sf.init(lambda: nn.LazyLinear(2), sf.make_mesh((3,), ("a",)), P(), sf.random.key(0))
