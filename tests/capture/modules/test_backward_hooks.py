"""Hooks of modules fire, see and may replace gradients, under every transform; plain autograd
is the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardfn as sf
from shardfn import P


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Affine(nn.Module):
    """Two inputs, of which one may need no gradient, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(rand(3, seed=2))

    def forward(self, x: Tensor, k: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return x * self.w * k, x.sin() * n


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Affine()

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        a, b = self.inner(x * 2, k, 3)
        return (a * b).cos()


def tripled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g * 3 + outputs[0].mean() for g in inputs)


def clipped(module: nn.Module, outputs: Any) -> Any:
    return tuple(None if g is None else g / (1 + g.norm()) for g in outputs)


def scaled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2, *args[1:])


def shifted(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    return out[0] + module.w, out[1]


def only_seen(module: nn.Module, inputs: Any, outputs: Any) -> None:
    assert len(inputs) == 3 and inputs[2] is None and len(outputs) == 2


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "pre": lambda m: m.register_forward_pre_hook(scaled),
    "forward": lambda m: m.register_forward_hook(shifted, with_kwargs=True),
    "full backward": lambda m: m.register_full_backward_hook(tripled),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(clipped),
    "seen": lambda m: m.register_full_backward_hook(only_seen),
    "all": lambda m: [hook(m) for name, hook in HOOKS.items() if name != "all"],
}
POINT = rand(5, 3, seed=7), rand(3, seed=8)


@pytest.fixture(params=HOOKS)
def hooked(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, Any]:
    """A module with hooks, its loss by its pure function, and its parameters."""
    module = Around().double()
    HOOKS[request.param](module.inner)
    fn, params, buffers = sf.functionalize(module)
    return module, lambda p, x, k: fn(p, buffers, x, k)[0].sum(), params


def eager(module: nn.Module, x: Tensor, k: Tensor, *wanted: int) -> Any:
    """The gradients of plain autograd by the parameter, and by some of the inputs."""
    inputs = [v.clone().requires_grad_(i in wanted) for i, v in enumerate((x, k))]
    module.zero_grad()
    module(*inputs).sum().backward()
    return {"inner.w": module.inner.w.grad}, *[inputs[i].grad for i in wanted]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_s7_6_hooks_fire_and_replace_gradients(hooked: Any) -> None:
    module, loss, params = hooked
    for argnums in ((0,), (0, 1), (0, 1, 2)):
        close(
            sf.grad(loss, argnums=argnums)(params, *POINT),
            eager(module, *POINT, *(n - 1 for n in argnums[1:])),
        )


def test_hooks_see_one_sample_under_vmap(hooked: Any) -> None:
    module, loss, params = hooked
    xs = rand(4, 5, 3, seed=9)
    wanted = [eager(module, x, POINT[1], 0, 1) for x in xs]
    stacked = sf.tree_map(lambda *gs: torch.stack(gs), *wanted)
    each = sf.grad(loss, argnums=(0, 1, 2))
    close(sf.vmap(each, in_axes=(None, 0, None))(params, xs, POINT[1]), stacked)
    total = lambda p, x, k: sf.vmap(loss, in_axes=(None, 0, None))(p, x, k).sum()
    summed = (sf.tree_map(lambda g: g.sum(0), stacked[0]), stacked[1], stacked[2].sum(0))
    close(sf.grad(total, argnums=(0, 1, 2))(params, xs, POINT[1]), summed)


def test_hooks_hold_under_shard_and_in_buckets(hooked: Any) -> None:
    module, loss, params = hooked
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        step = sf.shard(sf.bucketed_grad(loss), mesh, (None, P("a"), None), backend="aten")
        close(sf.full(step(params, *POINT)[1]), eager(module, *POINT, 0)[0])


def test_hooks_let_second_derivatives_and_jvp_through() -> None:
    module = Around().double()
    for name in ("forward", "full backward", "full backward pre"):
        HOOKS[name](module.inner)
    fn, params, buffers = sf.functionalize(module)
    x, k = POINT
    inner = lambda x: sf.grad(lambda x: fn(params, buffers, x, k)[0].sum())(x).square().sum()

    def judge(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(x, k).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    close(sf.grad(inner)(x), judge(x))
    value = lambda x: fn(params, buffers, x, k)[0].sum()
    tangent = sf.jvp(value, (x,), (x.cos(),))[1]
    bare = Around().double()
    bare.inner.register_forward_hook(shifted, with_kwargs=True)
    wanted = torch.func.jvp(
        lambda x: torch.func.functional_call(bare, params, (x, k)).sum(), (x,), (x.cos(),)
    )[1]
    close(tangent, wanted)


def test_a_hook_on_a_tensor_inside_fires() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            y.register_hook(lambda g: g * 3) if y.requires_grad else None
            return y

    fn, params, buffers = sf.functionalize(Inside())
    close(sf.grad(lambda x: fn(params, buffers, x)[0].sum())(POINT[0]), 3 * POINT[0].cos())


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_hooks_on_the_backward_fire_too() -> None:
    module = nn.Linear(3, 2).double()
    module.register_backward_hook(
        lambda m, inputs, outputs: tuple(None if g is None else g * 2 for g in inputs)
    )
    fn, params, buffers = sf.functionalize(module)
    x = rand(4, 3)
    module(x).sum().backward()
    close(
        sf.grad(lambda p: fn(p, buffers, x)[0].sum())(params),
        {k: p.grad for k, p in module.named_parameters()},
    )


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", HOOKS)
def test_s7_6_hooks_of_closed_over_modules_fire(name: str) -> None:
    module = Around().double()
    HOOKS[name](module.inner)
    by_name, *wanted = eager(module, *POINT, 0, 1)
    loss = lambda x, k: module(x, k).sum()
    close(sf.grad(loss, argnums=(0, 1))(*POINT), tuple(wanted))
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        module.zero_grad()
        leaves = [x.clone().requires_grad_() for x in POINT]
        sf.shard(loss, mesh, (P("a"), P()))(*leaves).backward()
        close([x.grad for x in leaves], wanted)
        close(module.inner.w.grad, by_name["inner.w"])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("is_followed", [False, True])
def test_s7_6_hooks_of_tensor_parallel_layers_fire(is_followed: bool) -> None:
    """From outside, also when the input does not require grad."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 5)).double()

    def hooked(module: nn.Module) -> nn.Module:
        times = lambda factor, gs: tuple(None if g is None else g * factor for g in gs)
        for layer in (module[0], module[2]):  # type: ignore[index]
            layer.register_full_backward_hook(lambda m, gs, _: times(2, gs))
            layer.register_full_backward_pre_hook(lambda m, gs: times(3, gs))
        return module

    plain = hooked(net())
    x, y = (POINT[0].clone().requires_grad_(is_followed) for _ in range(2))
    plain(x).square().sum().backward()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = hooked(parallelize_module(net(), mesh, styles))
        sf.jit(lambda x: module(x).square().sum(), backend="aten")(y).backward()
        wanted = [p.grad for p in plain.parameters()]
        close([sf.full(p.grad) for p in module.parameters()], wanted)
        assert (y.grad is None) is (x.grad is None) is not is_followed
        close([y.grad] * is_followed, [x.grad] * is_followed)


def test_a_hook_of_a_closed_over_module_is_read_again() -> None:
    module, factor = nn.Linear(3, 3).double(), [2.0]
    module.register_full_backward_hook(lambda m, inputs, _: (inputs[0] * factor[0],))
    gradient = sf.grad(lambda x: module(x).sum())
    first = gradient(POINT[0])
    factor[0] = 4.0
    close(gradient(POINT[0]), first * 2)


def test_a_hook_of_a_closed_over_module_that_communicates_is_refused() -> None:
    module = nn.Linear(3, 3).double()
    rank = torch.distributed.get_rank
    module.register_full_backward_hook(lambda m, inputs, _: (inputs[0] * rank(),))
    with sf.fake_world(2):
        wanted = "a backward hook of Linear: the hook communicates or reads its rank"
        with pytest.raises(sf.CaptureError, match=wanted):
            sf.jit(sf.grad(lambda x: module(x).sum()))(POINT[0])
