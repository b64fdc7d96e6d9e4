"""autograd.Functions whose forward takes the context: values and derivatives are eager torch's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.testing import assert_close

import shardfn as sf
from shardfn import CaptureError, P

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
A, B = (torch.randn(6, 5, dtype=F64, generator=GENERATOR) for _ in range(2))


class Inputs(torch.autograd.Function):
    """Saves its inputs. Its derivative is another than that of its formula, as in all of these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return 7 * g * y, 5 * g * x * x


class Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out, None)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0]


class Intermediate(torch.autograd.Function):
    """Saves values that are neither inputs nor results, among them integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner, mask = x.sin(), x > 0
        ctx.save_for_backward(inner, mask, mask.long())
        return inner.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        inner, mask, number = ctx.saved_tensors
        return g * inner * torch.where(mask, 2.0, -1.0) * (1 + number)


class Attributes(torch.autograd.Function):
    """Numbers, tensors and trees of tensors as attributes; a default; a shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float = 2.0, mode: str = "sum") -> Tensor:
        ctx.k, ctx.mode, ctx.shape = k, mode, x.shape
        ctx.x, ctx.held = x, {"cos": [x.cos(), k]}
        return (x * k).sum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        scale = ctx.held["cos"][0] * ctx.held["cos"][1] + ctx.x
        return (g[:, None] * scale * ctx.k).expand(ctx.shape), None, None


class Several(torch.autograd.Function):
    """Two tensors and a number; the gradient of an unused one is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, k: int) -> Any:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * y, k, (x + y).cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor, none: None, h: Tensor) -> Any:
        assert none is None
        (x,) = ctx.saved_tensors
        return g * ctx.k + h, h * x * x, None


class Nones(torch.autograd.Function):
    """Gradients of None both ways, and only the gradients that are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.needed = ctx.needs_input_grad
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        assert all(map(operator.ge, ctx.needed, ctx.needs_input_grad))
        dx = None if g is None or not ctx.needs_input_grad[0] else 11 * g
        return dx, None if h is None else 13 * h


class Silent(torch.autograd.Function):
    """A result that is marked as one without a derivative, and one of integers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        top, at = x.max(1)
        ctx.mark_non_differentiable(top)
        ctx.save_for_backward(at)
        return x.sum(1), top, at

    @staticmethod
    def backward(ctx: Any, g: Tensor, zeros: Tensor, none: Any) -> Tensor:
        (at,) = ctx.saved_tensors
        return (g + zeros)[:, None] * (at[:, None] == torch.arange(5))


class Itself(torch.autograd.Function):
    """Returns its input, as layers do that scale or reverse a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.k = k
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.k * g, None


class Outer(torch.autograd.Function):
    """Calls another one, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Result.apply(x) + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Inputs.apply(g, ctx.saved_tensors[0])


class Tangent(torch.autograd.Function):
    """Has a derivative in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_forward(x)
        ctx.k = k
        return x**2 * k

    @staticmethod
    def jvp(ctx: Any, t: Tensor, none: None) -> Tensor:
        return 3 * ctx.k * t * ctx.saved_tensors[0]


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Unmarked(Written):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(2)


class Listed(Written):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return [x * 2]


class Short(Inputs):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


stored = Inputs.apply


def silent(a: Tensor, b: Tensor) -> Tensor:
    x, top, at = Silent.apply(a * b)
    return x.sin() + top + at


class Case(NamedTuple):
    fn: Callable[..., Any]  # of A and B, or of a row of each, to a tensor of that many rows
    twice: bool = True  # whether it can be differentiated twice


CASES = {
    "saved inputs": Case(lambda a, b: Inputs.apply(a, b)),
    "one input twice": Case(lambda a, b: Inputs.apply(a, a) * b),
    "a stored apply": Case(lambda a, b: stored(a, b.sin())),
    "a saved result": Case(lambda a, b: Result.apply(a * b)),
    "saved intermediates": Case(lambda a, b: Intermediate.apply(a) * b, twice=False),
    "attributes": Case(lambda a, b: Attributes.apply(a, 3.0) + Attributes.apply(b), twice=False),
    "several results": Case(lambda a, b: Several.apply(a, b, 3)[0] * Several.apply(b, a, 2)[2]),
    "a number among the results": Case(
        lambda a, b: Several.apply(a, b, 3)[0] * Several.apply(b, a, 2)[1]
    ),
    "gradients of None": Case(lambda a, b: Nones.apply(a, b)[0].sin() * b),
    "an input without a gradient": Case(lambda a, b: Nones.apply(a.detach(), b)[1] * a),
    "a result without a derivative": Case(silent),
    "its own input": Case(lambda a, b: Itself.apply(a, 0.5) * b),
    "one inside another": Case(lambda a, b: Outer.apply(a) * b),
}


def total(case: Case) -> Callable[..., Tensor]:
    return lambda a, b: case.fn(a, b).square().sum()


def eager(case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The value and the gradients, by plain autograd."""
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    value = total(case)(a, b)
    value.backward()
    return value.detach(), (a.grad, b.grad)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_eager_torchs(name: str) -> None:
    case, wanted = CASES[name], eager(CASES[name])
    step = sf.value_and_grad(total(case), argnums=(0, 1))
    torch.testing.assert_close(step(A, B), wanted)
    for n in (2, 3):
        with sf.fake_world(n):
            mesh = sf.make_mesh((n,), ("dp",))
            sharded = sf.shard(step, mesh, P("dp"), backend="aten")
            torch.testing.assert_close(sf.full(sharded(A, B)), wanted)


@pytest.mark.parametrize("name", CASES)
def test_backward_from_outside_is_eager_torchs(name: str) -> None:
    case, (value, wanted) = CASES[name], eager(CASES[name])
    leaves = A.clone().requires_grad_(), B.clone().requires_grad_()
    found = sf.jit(total(case), backend="aten")(*leaves)
    found.backward()
    torch.testing.assert_close((found.detach(), leaves[0].grad, leaves[1].grad), (value, *wanted))


class Called(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.w = fn, torch.nn.Parameter(A.clone())

    def forward(self, b: Tensor) -> Tensor:
        return self.fn(self.w, b)


@pytest.mark.parametrize("name", CASES)
def test_in_a_module_too(name: str) -> None:
    case, (value, (wanted, _)) = CASES[name], eager(CASES[name])
    fn, params, buffers = sf.functionalize(Called(total(case)))
    found = sf.value_and_grad(lambda p: fn(p, buffers, B)[0])(params)
    torch.testing.assert_close(found, (value, {"w": wanted}))


@pytest.mark.parametrize("name", CASES)
def test_vmap_of_the_gradient_is_the_gradient_of_each_sample(name: str) -> None:
    case, (_, wanted) = CASES[name], eager(CASES[name])
    one = lambda a, b: total(case)(a[None], b[None])
    found = sf.vmap(sf.grad(one, argnums=(0, 1)))(A, B)
    torch.testing.assert_close(found, wanted)
    mapped = sf.grad(lambda a, b: sf.vmap(one)(a, b).sum(), argnums=(0, 1))
    torch.testing.assert_close(mapped(A, B), wanted)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.twice])
def test_derivatives_of_derivatives_are_eager_torchs(name: str) -> None:
    loss = total(CASES[name])
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(a, b), a, create_graph=True)
    wanted = torch.autograd.grad(first.sin().sum(), (a, b), allow_unused=True)
    inner = lambda a, b: sf.grad(loss)(a, b).sin().sum()
    found = sf.grad(inner, argnums=(0, 1))(A, B)
    zeros = [torch.zeros_like(A) if g is None else g for g in wanted]
    torch.testing.assert_close(found, tuple(zeros))


def test_a_vjp_whose_pullback_is_called_twice() -> None:
    value, pull = sf.vjp(lambda a: Intermediate.apply(a), A)
    a = A.clone().requires_grad_()
    out = Intermediate.apply(a)
    for g in (B, A):
        (wanted,) = torch.autograd.grad(out, a, g, retain_graph=True)
        torch.testing.assert_close(pull(g), (wanted,))
    torch.testing.assert_close(value, out.detach())


def test_tangents_are_those_of_its_jvp() -> None:
    found = sf.jvp(lambda x: Tangent.apply(x, 5.0), (A,), (B,))
    torch.testing.assert_close(found, (5 * A**2, 15 * A * B))
    mapped = sf.vmap(lambda x, t: sf.jvp(lambda x: Tangent.apply(x, 5.0), (x,), (t,)))
    torch.testing.assert_close(mapped(A, B), found)


def test_without_a_jvp_forward_mode_is_refused() -> None:
    with pytest.raises(CaptureError, match="You must implement the jvp function"):
        sf.jvp(lambda x: Result.apply(x), (A,), (B,))


def test_arguments_by_name() -> None:
    step = sf.grad(lambda x: Attributes.apply(x, mode="mean", k=4.0).sum())
    torch.testing.assert_close(step(A), 4 * (4 * A.cos() + A))


def twice(function: Any) -> Callable[[Tensor], Tensor]:
    return sf.grad(lambda x: sf.grad(lambda x: function.apply(x).sum())(x).sum())


REFUSED = {
    "once_differentiable": (
        twice(Marked),
        "Marked: the backward is marked once_differentiable, but is differentiated",
    ),
    "intermediates": (
        twice(Intermediate),
        "Intermediate: the second derivative needs a value of the forward that is neither an "
        "argument nor a result",
    ),
    "many samples": (
        lambda x: sf.vmap(twice(Intermediate))(x),
        "Intermediate: the second derivative needs a value of the forward that is neither an "
        "argument nor a result",
    ),
    "mark_dirty": (
        sf.grad(lambda x: Written.apply(x * 1).sum()),
        "Written: the forward writes in place to an argument",
    ),
    "a write": (
        sf.grad(lambda x: Unmarked.apply(x * 1).sum()),
        "Unmarked: the forward writes in place to an argument",
    ),
    "a list": (
        sf.grad(lambda x: Listed.apply(x)[0].sum()),
        "Listed: the forward returns a list of tensors",
    ),
    "too few gradients": (
        sf.grad(lambda x: Short.apply(x, x).sum()),
        "Short: the backward returns 1 gradients for 2 arguments",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str) -> None:
    call, wanted = REFUSED[case]
    with pytest.raises(CaptureError) as caught:
        call(A)
    assert str(caught.value).splitlines()[0] == f"autograd.Function {wanted}"
    assert "test_autograd_functions.py" in str(caught.value)


def test_once_differentiable_is_differentiated_once() -> None:
    torch.testing.assert_close(sf.grad(lambda x: Marked.apply(x).sum())(A), A)


K = 5.0


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * K

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * K * 3


class New(torch.autograd.Function):
    """One whose forward does not take the context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * K


@pytest.mark.parametrize("function", [Reading, New])
def test_a_constant_that_it_reads_is_that_of_the_call(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = sf.grad(lambda x: function.apply(x).sum())
    first = step(A)
    monkeypatch.setitem(globals(), "K", 10.0)
    torch.testing.assert_close(step(A), 2 * first)


def test_torch_itself_is_as_before() -> None:
    sf.grad(lambda x: Result.apply(x).sum())(A)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.grad(lambda x: Result.apply(x).sum())(A)


def _gradient_in_backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = x.sin() * x
    return torch.autograd.grad(y, x, g)[0]


class OfContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin() * x

    backward = staticmethod(_gradient_in_backward)


class OfSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(_gradient_in_backward)


class OfSolver(torch.autograd.Function):
    """A fixed point whose backward solves for the cotangent, as of an equilibrium model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        for _ in range(40):
            z = torch.tanh(0.3 * z + x)
        ctx.save_for_backward(x, z)
        return z

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, z = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach()
            x.requires_grad = True
            z = z.detach().requires_grad_()
            y = torch.tanh(0.3 * z + x)
        u = g
        for _ in range(40):
            u = g + torch.autograd.grad(y, z, u, retain_graph=True)[0]
        return torch.autograd.grad(y, x, u)[0]


@pytest.mark.parametrize("function", [OfContext, OfSetup, OfSolver])
def test_a_backward_may_take_gradients_itself(function: Any) -> None:
    x = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = lambda x: function.apply(x * 2).square().sum()
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close(sf.grad(loss)(x), expected)
    assert_close(sf.jit(sf.grad(loss), backend="aten")(x), expected)
    assert_close(sf.vmap(sf.grad(loss))(torch.stack([x, x]))[1], expected)
    assert_close(sf.bucketed_grad(loss)(x)[1], expected)
    with sf.fake_world(2):
        run = sf.shard(sf.grad(loss), sf.make_mesh((2,), ("a",)), P("a"), backend="aten")
        assert_close(sf.full(run(x)), expected)


@pytest.mark.parametrize("function", [OfContext, OfSetup])
def test_a_second_derivative_of_such_a_backward_is_refused_by_name(function: Any) -> None:
    x = torch.ones(3, dtype=torch.float64)
    loss = lambda x: function.apply(x).square().sum()
    with pytest.raises(
        CaptureError, match=rf"{function.__name__}: the backward takes a gradient by requires_gr"
    ):
        sf.grad(lambda x: sf.grad(loss)(x).sum())(x)


def test_the_pullback_in_a_backward_has_second_derivatives() -> None:
    class Advised(OfContext):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return torch.func.vjp(lambda x: x.sin() * x, x)[1](g)[0]

    x = torch.ones(3, dtype=torch.float64)
    plain = lambda x: (x.sin() * x).square().sum()
    loss = lambda x: Advised.apply(x).square().sum()
    second = lambda loss: sf.grad(lambda x: sf.grad(loss)(x).sin().sum())
    assert_close(second(loss)(x), second(plain)(x))


class LoudOfContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        print("forward", x)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        print("backward", g, x.sum())
        return 2 * x * g


class LoudOfSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        print("forward", x)
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(LoudOfContext.backward)


@pytest.mark.parametrize("function", [LoudOfContext, LoudOfSetup])
def test_its_methods_print_the_values_of_each_call(function: Any, capsys: Any) -> None:
    gradient = sf.grad(lambda x: function.apply(x).sum())
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for step in (gradient, sf.shard(gradient, mesh, P("dp"), backend="aten")):
            for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
                step(x)
                shown = capsys.readouterr().out.splitlines()
                assert shown == [f"forward {x}", f"backward {torch.ones(2)} {x.sum()!s}"]


def test_a_function_that_prints_is_refused_by_name(capsys: Any) -> None:
    with pytest.raises(CaptureError, match="You must implement the jvp function"):
        sf.jvp(lambda x: LoudOfContext.apply(x), (A,), (A,))
    assert capsys.readouterr().out == ""
