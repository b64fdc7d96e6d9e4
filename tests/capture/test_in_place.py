"""In-place ops, `out=`, views and aliases inside a function: values and gradients as plain
torch has them, for every cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

DTYPE = torch.float64
X, Y = (torch.randn(5, 4, dtype=DTYPE, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
PLACED = (
    ((2,), ("a",), (P("a"), P("a"))),
    ((3,), ("a",), (P(None, "a"), P("a"))),
    ((3,), ("a",), (P(), P())),
    ((2, 2), ("a", "b"), (P("a", "b"), P("b"))),
    ((2, 2), ("a", "b"), (P(), P(("a", "b")))),
)
Program = Callable[[torch.Tensor, torch.Tensor], Any]
PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


def changed(name: str, *args: Any, **kwargs: Any) -> None:
    """A program that calls one in-place method on a value of its own; arguments may be
    functions of y.
    """

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * 2
        getattr(z, name)(*(a(y) if callable(a) else a for a in args), **kwargs)
        return z * x.sum()

    PROGRAMS[name if name not in PROGRAMS else f"{name} broadcast"] = run


def assigned(name: str, index: Any, value: Callable[[torch.Tensor], Any]) -> None:
    """A program that assigns to a part of a copy."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[index] = value(y)
        return z * y

    PROGRAMS[name] = run


def out(name: str, call: Callable[..., Any], *shape: int, dtype: torch.dtype = DTYPE) -> None:
    """A program that has an op write to a tensor of its own, and reads it there."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c = torch.empty(shape, dtype=dtype)
        d = call(x, y, c)
        c.add_(1)
        return c * 3, d

    PROGRAMS[name] = run


changed("relu_")
changed("add_", lambda y: y)
changed("mul_", lambda y: y[0])
changed("copy_", lambda y: y)
changed("copy_", lambda y: y[0])
changed("clamp_", -1, 1)
changed("fill_", 2.0)
changed("zero_")
changed("triu_")
changed("cumsum_", 0)
changed("addcmul_", lambda y: y, lambda y: y * 2)
changed("lerp_", lambda y: y, 0.3)
changed("masked_fill_", lambda y: y > 0, 1.0)
changed("index_add_", 0, torch.tensor([0, 4, 0]), lambda y: y[:3])
changed("index_copy_", 0, torch.tensor([0, 4]), lambda y: y[:2])
changed("index_fill_", 0, torch.tensor([0, 4]), 3.0)
changed("scatter_", 0, torch.tensor([[0, 1, 2, 4]]), lambda y: y[:1])
changed("scatter_add_", 0, torch.tensor([[0, 1, 2, 4], [0, 0, 0, 0]]), lambda y: y[:2])
assigned("row", 1, lambda y: y[2])
assigned("slices", (slice(1, 3), slice(None, None, 2)), lambda y: y[2:4, :2])
assigned("indices", torch.tensor([0, 3]), lambda y: y[:2])
assigned("element", (-1, -2), lambda y: 7.0)
assigned("ellipsis", (..., 1), lambda y: y[..., 0])
out("out_add", lambda x, y, c: torch.add(x, y, out=c), 5, 4)
out("out_mm", lambda x, y, c: torch.mm(x, y.t(), out=c), 5, 5)
out("out_sum", lambda x, y, c: torch.sum(x * y, 0, out=c), 4)
out("out_cat", lambda x, y, c: torch.cat([x, y], out=c), 10, 4)
out("out_cumsum", lambda x, y, c: torch.cumsum(x * y, 0, out=c), 5, 4)
out("out_casts", lambda x, y, c: torch.add(x, y, out=c), 5, 4, dtype=torch.float32)


@program
def mask_assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[y > 0] = 1.0
    return z * x


@program
def slices_changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[:, 1:] += 1
    z[2:] *= y[2:]
    return z * x


@program
def through_a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    v = z.view(20)
    v.add_(1)
    z.mul_(3)
    return z * y, v


@program
def through_a_transposed_slice(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    v = z[1:].t()
    v.copy_(y[1:].t() * 3)
    return z, v * 2


@program
def through_chunks_and_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    a, b = z.chunk(2, 0)
    a.mul_(3)
    b.add_(1)
    for k, row in enumerate(z.unbind(0)):
        row.add_(k)
    z[:4].diagonal().add_(1)
    return z * y


@program
def swapped_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[0], z[1] = z[1].clone(), z[0].clone()
    return z * y


@program
def filled_row_by_row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x)
    for k in range(5):
        z[k] = x[k] * k + (z[k - 1] if k else 0)
    return F.relu(z, inplace=True) * y


@program
def out_sort(x: torch.Tensor, y: torch.Tensor) -> Any:
    v, i = x.new_empty(5, 4), torch.empty(5, 4, dtype=torch.int64)
    torch.sort(x, dim=0, out=(v, i))
    return v * y, i + 1


@program
def out_max_and_topk(x: torch.Tensor, y: torch.Tensor) -> Any:
    v, i = x.new_empty(4), torch.empty(4, dtype=torch.int64)
    returned = torch.max(x, 0, out=(v, i))
    w, j = x.new_empty(5, 2), torch.empty(5, 2, dtype=torch.int64)
    torch.topk(y, 2, dim=1, out=(w, j))
    v.add_(1)
    return v * y, returned.values, i, w, j


@program
def shapes_changed(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x * 2
    z.transpose_(0, 1)
    w = z.unsqueeze_(1)
    w.squeeze_()
    v = (x + y).unsqueeze(1)
    v.squeeze_(1)
    r = (x * y).t_()
    return (
        z.reshape(z.shape),
        v.view(*v.shape),
        list(r)[-1] * len(r),
        r.stride(),
        tuple(z.shape),
        w.dim(),
        v.numel(),
    )


def both(fn: Program) -> Callable[..., Any]:
    """The values of a program, and the gradients of what floats among them."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = fn(x, y)
        return sum((k + 1.3) * v.double().sin().sum() for k, v in enumerate(floating(found)))

    return lambda x, y: (fn(x, y), sf.grad(loss, argnums=(0, 1))(x, y))


def floating(found: Any) -> list[torch.Tensor]:
    every = [found] if isinstance(found, torch.Tensor) else list(found)
    return [v for v in every if isinstance(v, torch.Tensor) and v.is_floating_point()]


def wanted_of(fn: Program) -> Any:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    loss = sum((k + 1.3) * v.double().sin().sum() for k, v in enumerate(floating(fn(x, y))))
    grads = torch.autograd.grad(loss, (x, y), allow_unused=True)
    return fn(X.clone(), Y.clone()), tuple(torch.zeros_like(X) if g is None else g for g in grads)


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b)


def differentiable(name: str) -> bool:
    """Autograd refuses out= of what requires grad, and writes to views of which one op makes
    several.
    """
    return not name.startswith("out_") and name != "through_chunks_and_rows"


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_s8_3_what_is_written_in_place_is_what_plain_torch_writes(name: str) -> None:
    fn = PROGRAMS[name]
    run, wanted = (
        (both(fn), wanted_of(fn)) if differentiable(name) else (fn, fn(X.clone(), Y.clone()))
    )
    x, y = X.clone(), Y.clone()
    for shape, axes, placed in PLACED:
        with sf.fake_world(torch.Size(shape).numel()):
            got = sf.full(sf.shard(run, sf.make_mesh(shape, axes), placed, backend="aten")(x, y))
            assert_same(got, wanted)
    assert torch.equal(x, X) and torch.equal(y, Y), "and the arguments are as they were"


def test_s8_3_the_answer_never_depends_on_earlier_calls() -> None:
    def product(x: torch.Tensor, y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        c = torch.empty_like(like)
        torch.mm(x, y.t(), out=c)
        return c

    like, results = X @ Y.t(), []
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        cut, whole = (
            sf.shard(product, mesh, (P("a"), P(), out), backend="aten") for out in (P("a"), P())
        )
        for order in ((cut, whole), (whole, cut), (cut, cut, whole, whole)):
            sf.runtime.cache.clear()
            results.append({fn: fn(X, Y, like) for fn in order})
    for found in results:
        assert {fn: r.placements for fn, r in found.items()} == {
            fn: r.placements for fn, r in results[0].items()
        }
        for r in found.values():
            torch.testing.assert_close(sf.full(r), X @ Y.t(), rtol=1e-12, atol=1e-12)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "assignment": lambda x: x.__setitem__(0, 1),
    "a view": lambda x: x.view(-1).mul_(2),
    "out=": lambda x: torch.add(x, x, out=x),
    "several outs": lambda x: torch.sort(
        x * 2, dim=0, out=(x, torch.empty(5, 4, dtype=torch.int64))
    ),
    "a slice of what out= returned": lambda x: torch.mul(x, 2, out=torch.empty_like(x)).add_(
        x.relu_()
    ),
}


@pytest.mark.parametrize("how", list(WRITES))
def test_s8_3_writing_to_an_argument_is_refused_by_name(how: str) -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        WRITES[how](x)
        return x + 1

    x = X.clone()
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        sf.shard(writes, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")(x)
    assert str(caught.value).startswith(
        "shard(writes), argument x: the function writes to this tensor in place"
    )
    assert caught.value.arg_path == "x" and __file__ in caught.value.source
    assert torch.equal(x, X)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "squeeze_ of an argument": (
        lambda x: x.squeeze_(0) + 1,
        "the function changes the shape of an argument in place",
    ),
    "out= of another shape": (
        lambda x: torch.add(x, x, out=x.new_empty(0)),
        "the out= tensor has another shape than the result",
    ),
    "out= with gaps": (
        lambda x: torch.add(x, x, out=x.new_zeros(5, 8)[:, ::2]),
        "the out= tensor is a view with gaps in memory",
    ),
    "resize_": (lambda x: (x * 2).resize_(4, 5), "the function resizes a tensor in place"),
}


@pytest.mark.parametrize("how", list(REFUSED))
def test_what_cannot_be_captured_in_place_is_refused_by_name(how: str) -> None:
    fn, said = REFUSED[how]
    with sf.fake_world(2), pytest.raises(sf.CaptureError, match=said):
        sf.shard(fn, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")(X)


I = torch.tensor([0, 2, 2, 1, 0])
TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x: torch.zeros(3, 4, dtype=DTYPE),
    "zeros_like": lambda x: torch.zeros_like(x[:3]),
    "new_zeros": lambda x: x.new_zeros(3, 4),
    "clone": lambda x: (x[:3] * 2).clone(),
    "a view": lambda x: (x * 1.5)[1:4],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_row", [False, True])
def test_a_reduction_into_a_tensor_has_the_gradient_of_one_that_returns_it(
    target: str, is_row: bool
) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for how in ("sum", "mean", "amax", "amin", "prod"):
            for include_self in (True, False):
                out = TARGETS[target](x)
                if not is_row:
                    at = I[:, None].expand(5, 4)
                    out.scatter_reduce_(0, at, x, how, include_self=include_self)
                elif how != "sum":
                    out.index_reduce_(0, I, x, how, include_self=include_self)
                total = total + (out.square() + out * x[:3]).sum()
        return total

    leaf = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close(sf.grad(loss)(X), expected)
    assert_close(sf.grad(sf.checkpoint(loss))(X), expected)
    assert_close(sf.jvp(loss, (X,), (Y,))[1], (expected * Y).sum())
    with sf.fake_world(2):
        run = sf.shard(sf.grad(loss), sf.make_mesh((2,), ("a",)), P("a"), backend="aten")
        assert_close(sf.full(run(X)), expected)


def in_place_samples() -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """For each op that torch has in place, a sample that torch differentiates."""
    random = {"cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "bernoulli"}
    samples = {}
    for op in op_db:
        is_method = isinstance(op.inplace_variant, type(torch.Tensor.add_))
        if not is_method or op.name in random or DTYPE not in op.dtypes:
            continue
        for sample in op.sample_inputs("cpu", DTYPE):
            x, run = (
                sample.input,
                functools.partial(_run_in_place, op.inplace_variant.__name__, sample),
            )
            try:
                _gradient(run, x)
            except (RuntimeError, IndexError, TypeError):  # not in place, or not differentiable
                continue
            if x.dim():
                samples[op.full_name] = x, run
                break
    return samples


def _run_in_place(op: str, sample: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    getattr(y, op)(*sample.args, **sample.kwargs)
    return (y * y.detach().cos()).sum()


def _gradient(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(fn(leaf), leaf)[0]


def test_each_op_that_torch_has_in_place_has_torchs_gradient() -> None:
    torch.manual_seed(0)
    samples = in_place_samples()
    assert len(samples) > 100
    xs = {name: x for name, (x, _) in samples.items()}
    total = lambda xs: sum(samples[name][1](x) for name, x in xs.items())
    for name, found in sf.grad(total)(xs).items():
        assert_close(found, _gradient(samples[name][1], xs[name]), msg=name, equal_nan=True)


def test_under_vmap_the_message_names_the_tensor_that_the_samples_share() -> None:
    shared = lambda x: torch.zeros(5, 4, dtype=DTYPE).mul_(x)
    with pytest.raises(sf.CaptureError, match=r"all samples share[\s\S]*x\.new_zeros"):
        sf.vmap(shared)(X[None])
    assert_close(sf.vmap(lambda x: x.new_zeros(5, 4).add_(x))(X[None])[0], X)
