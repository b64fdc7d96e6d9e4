"""Gradients that a call would lose: of rank code, held tensors, dual numbers, hooks, frozen
parameters; the words of each refusal.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.tensor([0.5, -1.0, 2.0], dtype=F64)
W = torch.tensor([1.0, 2.0, 3.0], dtype=F64, requires_grad=True)
HERE = re.compile(re.escape(__file__) + r":\d+")


def said(call: Any, *args: Any) -> str:
    with pytest.raises(sf.ShardError) as error:
        call(*args)
    return HERE.sub("HERE", str(error.value))


def in_rank_code(mesh: Any, read: Any) -> Any:
    """The code of one rank, whose shards are uneven: each kind of rank has its own program."""

    def fn(d: Any) -> Any:
        y = d.to_local() * read()
        return DTensor.from_local(y, mesh, d.placements, shape=d.shape, stride=d.stride())

    return sf.jit(fn, backend="aten")


def test_in_code_of_uneven_ranks_a_closed_over_tensor_is_named_with_its_line_and_the_fix() -> None:
    w = W.detach().clone().requires_grad_()
    with simulated(dp=2) as mesh:
        x = sf.distribute(X, mesh, P("dp"))
        f = in_rank_code(mesh, lambda: w.sum())
        text = (
            "jit(fn): the function closes over w, which requires grad: its gradient would be lost\n"
            "  at: HERE\n  needed: closed-over tensors that need no gradient\n  try: pass the "
            "tensor as an argument and differentiate inside the function with sf.grad; or "
            ".detach() constants; or call the function under torch.no_grad()"
        )
        for _ in range(2):
            assert said(f, x) == text
        with torch.no_grad():
            f(x)
        with torch.inference_mode():
            f(x)
        assert said(f, x) == text
        assert "argument d: the argument requires grad" in said(f, x.detach().requires_grad_())


def test_a_module_in_the_code_of_a_rank_is_named_with_functionalize() -> None:
    layer = nn.Linear(3, 2).double()
    with simulated(dp=2) as mesh:
        x = sf.distribute(X, mesh, P("dp"))
        text = said(in_rank_code(mesh, lambda: layer(X).sum()), x)
    assert text.startswith(
        "jit(fn): the function closes over layer.weight, layer.bias, which require grad: their "
        "gradients"
    )
    assert (
        "try: fn, params, buffers = sf.functionalize(layer), and pass params as an argument; or"
    ) in text


def test_a_compiled_call_takes_no_tensor_that_begins_to_require_grad() -> None:
    w = W.detach().clone()
    compiled = sf.jit(lambda x: (x * w).sum(), backend="aten").compile(X)
    w.requires_grad_()
    assert "compiled jit(<lambda>): the function closes over w" in said(compiled, X)
    w.requires_grad_(False)
    leaf = X.clone().requires_grad_()
    text = "compiled jit(<lambda>), argument x: the argument requires grad"
    assert text in said(compiled, leaf)
    with torch.no_grad():
        assert_close(compiled(leaf), (X * w).sum())


def test_a_tensor_that_a_functionalized_module_holds_is_refused() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = W

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

    fn, params, buffers = sf.functionalize(Held())
    assert "the function closes over self.k" in said(fn, params, buffers, X)


def test_transforms_of_torch_func_around_a_call_are_right() -> None:
    f = sf.jit(lambda x: x.sin().square().sum(), backend="aten")
    plain = lambda x: x.sin().square().sum()
    stacked = torch.stack([X, 2 * X])
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        assert_close(transform(f)(X), transform(plain)(X))
    assert_close(torch.vmap(f)(stacked), torch.vmap(plain)(stacked))
    assert_close(torch.func.jvp(f, (X,), (X,)), torch.func.jvp(plain, (X,), (X,)))
    compiled = f.compile(X)
    assert "the compiled function is called inside a transform of torch.func" in said(
        torch.func.grad(compiled), X
    )


def test_dual_numbers_of_forward_mode_are_refused() -> None:
    f = sf.jit(lambda x: (x * x).sum(), backend="aten")
    f(X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        for call in (f, f.compile(X)):
            assert (
                "argument x: the tensor has a tangent (torch.autograd.forward_ad), which "
                "would be lost"
            ) in said(call, dual)
        assert "closed-over dual: the tensor has a tangent" in said(
            sf.jit(lambda x: (x * dual).sum(), backend="aten"), X
        )
        assert_close(f(X), (X * X).sum())
        assert forward_ad.unpack_dual(dual).tangent is not None


def test_hooks_on_saved_tensors_see_nothing_and_stay() -> None:
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        got = sf.grad(lambda x: (x.sin() * x).sum())(X)
        assert not seen
        (W * W).sum()
        assert seen
    assert_close(got, X.cos() * X + X.sin())


def test_frozen_parameters_are_among_the_buffers_and_nothing_is_sent_for_them() -> None:
    module = nn.Linear(3, 2).double()
    module.weight.requires_grad_(False)
    fn, params, buffers = sf.functionalize(module)
    assert list(params) == ["bias"] and list(buffers) == ["weight"]
    module.weight.requires_grad_()  # later changes do not reach it
    x = torch.stack([X, 2 * X])
    with simulated(a=2) as mesh:
        loss = lambda p, x: fn(p, buffers, x)[0].square().sum()
        step = sf.shard(sf.bucketed_grad(loss), mesh, (None, P("a")), backend="aten")
        grads = sf.full(step(params, x)[1])
        assert [leaf for b in step.lower(params, x).plan.buckets for leaf in b.leaves] == [
            "p['bias']"
        ]
    module(x).square().sum().backward()
    assert_close(grads, {"bias": module.bias.grad})
    text = said(fn, {**params, "weight": buffers["weight"]}, buffers, x)
    assert (
        "it has also weight" in text
        and "frozen parameters (requires_grad=False) are in buffers" in text
    )


def test_a_frozen_parameter_that_the_module_writes_to_is_returned() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(W.detach().clone())
            self.mean = nn.Parameter(torch.zeros(3, dtype=F64), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(self.w * 0.5)
            return x * self.w + self.mean

    fn, params, buffers = sf.functionalize(Average())
    out, after = fn(params, buffers, X)
    assert_close((out, after), (X * W.detach() + W.detach() / 2, {"mean": W.detach() / 2}))
    assert not buffers["mean"].any()


def test_a_module_without_trainable_parameters_has_no_gradients() -> None:
    fn, params, buffers = sf.functionalize(nn.Linear(3, 2).double().requires_grad_(False))
    assert params == {} and sf.grad(lambda p: fn(p, buffers, X)[0].sum())(params) == {}


def test_hooks_that_a_pure_function_cannot_call_are_refused() -> None:
    after, several = nn.Linear(3, 2), nn.Linear(3, 2)
    after.weight.register_post_accumulate_grad_hook(lambda p: None)
    torch.autograd.graph.register_multi_grad_hook(list(several.parameters()), lambda gs: None)
    assert said(sf.functionalize, after) == (
        "functionalize(Linear), parameter weight: the parameter has a post-accumulate-grad "
        "hook, which needs an accumulated .grad, but a pure function has no .grad\n  needed: "
        "hooks that take a single gradient\n  try: p.register_hook(fn), or apply the hook to "
        "the gradients that sf.grad returns"
    )
    assert "parameter weight: the parameter has a hook of several tensors" in said(
        sf.functionalize, several
    )


def test_a_hook_that_returns_another_shape_is_refused() -> None:
    module = nn.Linear(3, 2).double()
    module.weight.register_hook(lambda g: g.sum())
    fn, params, buffers = sf.functionalize(module)
    assert "a hook on a parameter returned () for a gradient of shape (2, 3)" in said(
        sf.grad(lambda p: fn(p, buffers, X)[0].sum()), params
    )


def test_a_hook_sees_one_sample_under_vmap_of_grad() -> None:
    module = nn.Linear(3, 1, bias=False).double()
    module.weight.register_hook(lambda g: g / g.norm())
    fn, params, buffers = sf.functionalize(module)
    xs = torch.stack([X, 2 * X, -X])
    got = sf.vmap(sf.grad(lambda p, x: fn(p, buffers, x)[0].sum()), in_axes=(None, 0))(params, xs)
    unit = (X / X.norm()).reshape(1, 3)
    assert_close(got, {"weight": torch.stack([unit, unit, -unit])})
