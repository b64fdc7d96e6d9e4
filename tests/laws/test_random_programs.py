"""Law 0 on programs that nobody thought of: random ops, shapes, placements and meshes; values
and gradients in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from effort import examples
from hypothesis import assume, given
from programs import Drawn, programs
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

RTOL = 1e-9  # sums of other orders, through eight ops and their gradients


def sharded(drawn: Drawn) -> Any:
    """((loss, result), gradients) of the program on its mesh."""
    with sf.fake_world(math.prod(drawn.mesh.values())):
        mesh = sf.make_mesh(tuple(drawn.mesh.values()), tuple(drawn.mesh))
        placed, numbers = (
            tuple(spec for _, spec in drawn.inputs.values()),
            tuple(range(len(drawn.inputs))),
        )
        grads = tuple(spec if isinstance(spec, P) else None for spec in placed)
        step = sf.value_and_grad(drawn.function(), argnums=numbers, has_aux=True)
        out = sf.shard(step, mesh, placed, ((None, drawn.out), grads), backend="aten")(
            *drawn.placed_arguments(mesh)
        )
        return sf.full(out)


def plain(drawn: Drawn, scale: float = 1.0) -> Any:
    """The same by torch.autograd on one device, of inputs that are scaled."""
    inputs = [(x * scale).requires_grad_() for x in drawn.arguments()]
    loss, result = drawn.function()(*inputs)
    grads = (
        torch.autograd.grad(loss, inputs, allow_unused=True)
        if loss.requires_grad
        else [None] * len(inputs)
    )
    return (loss.detach(), result.detach()), tuple(
        torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)
    )


def has_gradient(drawn: Drawn) -> bool:
    """Whether the plain program's gradients are numbers that stay what they are when its inputs
    move a little.

    QR of a singular matrix has none: rounding alone decides what comes out.
    """
    _, grads = plain(drawn)
    _, moved = plain(drawn, 1 + 1e-13)
    return all(
        g.isfinite().all() and (g - m).abs().max() <= 1e-7 * (1 + g.abs().max())
        for g, m in zip(grads, moved, strict=True)
    )


def compare(drawn: Drawn) -> None:
    """The sharded program's loss, result and gradients next to the plain one's."""
    ((loss, result), grads), ((wanted_loss, wanted_result), wanted_grads) = (
        sharded(drawn),
        plain(drawn),
    )
    assert_close(loss, wanted_loss, rtol=RTOL, atol=RTOL)
    assert_close(result, wanted_result, rtol=RTOL, atol=RTOL)
    for name, got, wanted in zip(drawn.inputs, grads, wanted_grads, strict=True):
        size = 1 + float(wanted.abs().max())
        assert_close(
            got / size,
            wanted / size,
            rtol=RTOL,
            atol=RTOL,
            msg=lambda m, name=name: f"gradient of {name}: {m}",
        )


# Ops that shard an inner factor of a dim, and those that carry such a shard.
MIXING = (
    "unary",
    "binary",
    "matmul",
    "batched",
    "reduce",
    "along",
    "transpose",
    "merge",
    "split",
    "reshape",
    "cat",
    "norm",
    "parts",
    "attention",
    "gather",
)


def checked(drawn: Drawn) -> None:
    """`compare`, of programs that have a gradient."""
    try:
        compare(drawn)
    except AssertionError:
        assume(has_gradient(drawn))
        raise


@given(programs())
@examples(25)
def test_a_sharded_program_and_its_gradients_equal_the_plain_ones(drawn: Drawn) -> None:
    checked(drawn)


@given(programs(kinds=MIXING))
@examples(25)
def test_programs_that_merge_and_split_dims_equal_the_plain_ones(drawn: Drawn) -> None:
    checked(drawn)


@given(programs(lengths=(2, 4, 4, 8, 12, 3)))
@examples(25)
def test_programs_with_zigzags_equal_the_plain_ones(drawn: Drawn) -> None:
    checked(drawn)


def test_a_program_without_a_gradient_says_nothing() -> None:
    for line, tells in (
        ("(x0 - x0).sqrt()", False),
        ("torch.sin(1e13 * x0)", False),
        ("torch.relu(x0)", True),
    ):
        inputs = {"x0": ((4, 3, 4), P())}
        drawn = Drawn(
            mesh={"a": 2}, inputs=inputs, indices={}, lines=(f"v0 = {line}",), result="v0", out=None
        )
        assert has_gradient(drawn) == tells
