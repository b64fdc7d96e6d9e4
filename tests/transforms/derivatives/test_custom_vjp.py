"""custom_vjp: a rule for reverse mode, and what cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from message import without_line
from torch import Tensor

import shardfn as sf

F64 = torch.float64
G = torch.Generator().manual_seed(11)
X, Y = (torch.randn(5, 3, generator=G, dtype=F64), torch.randn(3, 3, generator=G, dtype=F64))


@sf.custom_vjp
def doubled(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x @ y)


doubled.defvjp(
    lambda x, y: (doubled(x, y), {"c": torch.cos(x @ y), "x": x, "y": y}),
    lambda r, g: ((g * r["c"]) @ r["y"].T * 2, None),
)


def test_arguments_that_are_no_tensors_come_first_in_a_rule() -> None:
    @sf.custom_vjp
    def clipped(limit: float, x: Tensor) -> Tensor:
        return x

    plain = sf.custom_vjp(clipped.fn, nondiff_argnums=0)
    plain.defvjp(lambda limit, x: (x, None), lambda limit, _, g: (g.clamp(-limit, limit),))
    close(
        sf.grad(lambda x: (plain(0.5, x) * torch.arange(3, dtype=F64)).sum())(X[0]),
        torch.tensor([0.0, 0.5, 0.5], dtype=F64),
    )


def unruled() -> Any:
    return sf.custom_vjp(lambda x: x)


def with_rule(fwd: Any, bwd: Any) -> Any:
    made = sf.custom_vjp(lambda x: x * 2)
    made.defvjp(fwd, bwd)
    return made


def closing_over(w: Tensor) -> Tensor:
    made = sf.custom_vjp(lambda x: (x * w).sum())
    made.defvjp(lambda x: ((x * w).sum(), x), lambda r, g: (g * r,))
    return made(X)


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no rule": (
        lambda: unruled()(X),
        sf.ShardError,
        "custom_vjp(<lambda>): it has no rule\n  try: f.defvjp(fwd, bwd) before it is called",
    ),
    "a second rule": (
        lambda: doubled.defvjp(lambda x, y: (x, None), lambda _, g: (g, None)),
        sf.ShardError,
        (
            "custom_vjp(doubled): the function already has a rule\n  try: call custom_vjp(f) "
            "again with the other rule"
        ),
    ),
    "fwd returns no pair": (
        lambda: sf.grad(lambda x: with_rule(lambda x: x * 2, lambda r, g: (g,))(x).sum())(X),
        sf.TreeError,
        "custom_vjp(<lambda>): fwd returns a result with another structure\n"
        "  needed: (result, residuals)",
    ),
    "fwd returns another result": (
        lambda: sf.grad(lambda x: with_rule(lambda x: (x[0], x), lambda r, g: (g,))(x).sum())(X),
        sf.TreeError,
        "custom_vjp(<lambda>): the results of fwd do not match those of the function\n  "
        "result is (3,) torch.float64, result is (5, 3) torch.float64\n  needed: the same "
        "tree, shapes and dtypes\n  try: return the same result as the function",
    ),
    "bwd returns no tuple": (
        lambda: sf.grad(lambda x: with_rule(lambda x: (x * 2, x), lambda r, g: g)(x).sum())(X),
        sf.TreeError,
        "custom_vjp(<lambda>): bwd returns a result with another structure\n"
        "  needed: a tuple of 1 cotangents",
    ),
    "bwd returns another shape": (
        lambda: sf.grad(lambda x: with_rule(lambda x: (x * 2, x), lambda r, g: (g[0],))(x).sum())(
            X
        ),
        sf.TreeError,
        "custom_vjp(<lambda>): the cotangents of bwd do not match the arguments\n  "
        "cotangent[0] is (3,) torch.float64, args[0] is (5, 3) torch.float64\n  needed: the "
        "same tree, shapes and dtypes\n  try: return for each argument a tree with the same "
        "structure, or None for zero",
    ),
    "forward mode of a reverse rule": (
        lambda: sf.jvp(doubled, (X, Y), (X, Y)),
        sf.CaptureError,
        "custom_vjp(doubled): the function has only a reverse-mode rule, and is differentiated "
        "in forward mode\n"
        "  try: use sf.custom_jvp, whose rule serves both modes",
    ),
    "a closed-over value that is differentiated": (
        lambda: sf.grad(closing_over)(X),
        sf.CaptureError,
        "custom_vjp(<lambda>): the function closes over a value that is differentiated\n"
        "  try: pass the value as an argument, and give its derivative in the rule",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_said(name: str) -> None:
    call, kind, text = REFUSALS[name]
    with pytest.raises(kind) as error:
        call()
    assert without_line(error.value) == text
