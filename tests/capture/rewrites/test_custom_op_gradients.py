"""Custom ops pass through capture whole, and `register_autograd` is differentiated under our
transforms.
"""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import CaptureError


@torch.library.custom_op("custom::power", mutates_args=())
def power(x: torch.Tensor, c: torch.Tensor, k: float = 2.0, *, shift: float = 0.0) -> torch.Tensor:
    return c * x**k + shift


@torch.library.custom_op("custom::split", mutates_args=())
def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x * 3


@torch.library.custom_op("custom::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _saved(ctx, inputs, keyword_only_inputs, output):
    assert keyword_only_inputs["shift"] in (0.0, 1.5)
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.k = inputs[2]


def _derivative(ctx, g):
    x, c = ctx.saved_tensors
    return ctx.k * g * power(x, c, ctx.k - 1), g * x**ctx.k, None


@torch.library.custom_op("custom::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@torch.library.custom_op("custom::cube_gradient", mutates_args=())
def cube_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return 3 * g * x**2


LIBRARY = torch.library.Library("custom", "FRAGMENT")
LIBRARY.define("triple(Tensor x) -> Tensor")
LIBRARY.impl("triple", lambda x: x * 3, "CPU")
torch.library.register_fake("custom::triple", torch.empty_like, lib=LIBRARY)

power.register_fake(lambda x, c, k=2.0, shift=0.0: torch.empty_like(x))
power.register_autograd(_derivative, setup_context=_saved)
split.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
split.register_autograd(lambda ctx, g, h: 2 * g + 3 * h)
flat.register_fake(torch.empty_like)
cube.register_fake(torch.empty_like)
cube.register_autograd(
    lambda ctx, g: cube_gradient(ctx.saved_tensors[0], g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
cube_gradient.register_fake(lambda x, g: torch.empty_like(x))

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
C = torch.tensor([5.0, 7.0, 11.0], dtype=torch.float64)


def test_the_op_stands_whole_in_the_program() -> None:
    program = sf.grad(lambda x: power(x, C, shift=1.5).sum()).trace(X).program
    assert str(program).count("power(") == 2, "the op, and the one that its derivative calls"


def test_the_gradient_is_the_registered_one_with_defaults_and_keywords() -> None:
    fn = lambda x, c: power(x, c, shift=1.5).sum()
    found = sf.grad(fn, argnums=(0, 1))(X, C)
    assert torch.equal(found[0], 2 * C * X)
    assert torch.equal(found[1], X**2)


def test_arguments_by_name_have_gradients() -> None:
    fn = lambda x, c: power(k=3.0, c=c, x=x).sum() + power(x, c=c, shift=1.5).sum()
    found = sf.grad(fn, argnums=(0, 1))(X, C)
    torch.testing.assert_close(found, (3 * C * X**2 + 2 * C * X, X**3 + X**2))


def test_a_gradient_that_is_an_op_without_one() -> None:
    loss = lambda x: (cube(x) * C).sum()
    wanted = 3 * C * X**2
    torch.testing.assert_close(sf.grad(loss)(X), wanted)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        found = sf.shard(sf.grad(loss), mesh, sf.P("dp"), backend="aten")(X)
        torch.testing.assert_close(sf.full(found), wanted)
    with pytest.raises(CaptureError, match="a custom op that has no usable derivative"):
        sf.grad(lambda x: sf.grad(loss)(x).sum())(X)


def test_the_gradient_of_a_gradient() -> None:
    second = sf.grad(lambda x: sf.grad(lambda x: power(x, C, 3.0).sum())(x).sum())
    torch.testing.assert_close(second(X), 6 * C * X)


def test_several_results() -> None:
    fn = lambda x: (split(x)[0] * X + split(x)[1]).sum()
    torch.testing.assert_close(sf.grad(fn)(X), 2 * X + 3)


def test_torch_itself_is_as_before_once_the_function_is_captured() -> None:
    sf.grad(lambda x: power(x, C).sum())(X)
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.grad(lambda x: power(x, C).sum())(X)
    x = X.clone().requires_grad_()
    power(x, C).sum().backward()
    assert torch.equal(x.grad, 2 * C * X)


def test_vmap_of_the_op_inside_a_function_is_as_torch_has_it() -> None:
    fn = torch.vmap(lambda x: power(x, C))
    with sf.fake_world(2):
        sharded = sf.shard(fn, sf.make_mesh((2,), ("dp",)), sf.P("dp"), backend="aten")
        assert torch.equal(sf.full(sharded(X[None])), power(X, C)[None])


def test_an_op_without_a_derivative_is_refused_by_name() -> None:
    with pytest.raises(CaptureError) as error:
        sf.grad(lambda x: flat(x).sum())(X)
    first, *_, fix = str(error.value).splitlines()
    assert first == (
        "grad(<lambda>): the function differentiates a custom op that has no usable derivative"
    )
    assert fix == (
        "  try: torch.library.custom_op with register_autograd, and arguments that are "
        "tensors, not lists of tensors"
    )


@pytest.mark.filterwarnings("ignore:custom..triple")
def test_an_op_whose_part_of_a_gradient_torch_would_leave_out_is_refused() -> None:
    with pytest.raises(CaptureError) as error:
        sf.grad(lambda x: (torch.ops.custom.triple(x) * x).sum())(X)
    first, *_, fix = str(error.value).splitlines()
    assert first == "op custom.triple.default: the op has no derivative, but is differentiated"
    assert fix == (
        "  try: define the op by torch.library.custom_op with register_autograd, or pass x.detach()"
    )
    found = sf.grad(lambda x: (torch.ops.custom.triple(x.detach()) * x).sum())(X)
    assert torch.equal(found, 3 * X)


class Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return flat(x)


CALL, *HELD = sf.functionalize(Module())


def _in_a_module(x: torch.Tensor) -> torch.Tensor:
    return CALL(*HELD, x)[0]


FORWARD = {
    "no derivative": lambda: sf.jvp(flat, (X,), (X,)),
    "a registered one": lambda: sf.jvp(lambda x: power(x, C), (X,), (X,)),
    "a library's": lambda: sf.jvp(torch.ops.custom.triple, (X,), (X,)),
    "by name": lambda: sf.jvp(lambda x: power(C, c=x), (X,), (X,)),
    "jacfwd": lambda: sf.jacfwd(flat)(X),
    "linearize": lambda: sf.linearize(flat, X)[1](X),
    "vmap outside": lambda: sf.vmap(lambda x: sf.jvp(flat, (x,), (x,))[1])(X[:, None]),
    "vmap inside": lambda: sf.jvp(sf.vmap(flat), (X[:, None],), (X[:, None],)),
    "a loop": lambda: sf.jvp(
        lambda x: sf.scan(lambda c, _: (flat(c), None), x, None, length=2)[0], (X,), (X,)
    ),
    "a branch": lambda: sf.jvp(lambda x: sf.cond(x.sum() > 0, flat, flat, x), (X,), (X,)),
    "a module": lambda: sf.jvp(_in_a_module, (X,), (X,)),
}


@pytest.mark.parametrize("case", FORWARD)
def test_a_tangent_that_torch_would_leave_out_is_refused(case: str) -> None:
    with pytest.raises(CaptureError, match="no forward-mode derivative") as caught:
        FORWARD[case]()
    assert caught.value.fix == (
        "use reverse mode: sf.vjp or sf.jacrev; or wrap the op in sf.custom_jvp"
    )


def test_a_constant_has_no_tangent_and_no_gradient() -> None:
    of_constant = lambda x: flat(C) * x * x
    value, tangent = sf.jvp(of_constant, (X,), (X,))
    torch.testing.assert_close((value, tangent), (2 * C * X**2, 4 * C * X**2))
    total = lambda x: of_constant(x).sum()
    torch.testing.assert_close(sf.hessian(total)(X), torch.diag(4 * C))
    part = lambda x: (flat(x).detach() * x).sum()
    torch.testing.assert_close(sf.grad(part)(X), 2 * X)


def test_gradients_of_many_samples() -> None:
    found = sf.vmap(sf.grad(lambda x, c: power(x, c, k=3.0)))(X, C)
    torch.testing.assert_close(found, 3 * C * X**2)
    found = sf.jacrev(lambda x: power(x, C))(X)
    torch.testing.assert_close(found, torch.diag(2 * C * X))
    with pytest.raises(CaptureError, match="a custom op that has no usable derivative"):
        sf.vmap(sf.grad(lambda x: flat(x).sum()))(X[:, None])
