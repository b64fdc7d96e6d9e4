"""The law of repeated blocks: a program in which repeats are calls computes what the plain
function computes, in any mix of equal and nearly equal blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import shardfn as sf
from tests.support.outlined import copies, outlined, run_outlined

CASES = 300
D = 4
Value = torch.Tensor
# one part of a block: of its input, its parameters and a number
PARTS: dict[str, Callable[[Value, Value, Value, float], Value]] = {
    "product": lambda x, w, b, c: x @ w + b,
    "product of a transpose": lambda x, w, b, c: x @ w.t() * c,
    "norm": lambda x, w, b, c: F.layer_norm(x, (D,), b, b),
    "activation": lambda x, w, b, c: torch.tanh(x) * c,
    "gate": lambda x, w, b, c: torch.sigmoid(x @ w) * x,
    "reduction": lambda x, w, b, c: x - x.mean(0, keepdim=True) + c,
    "softmax": lambda x, w, b, c: torch.softmax(x * c, -1),
    "index": lambda x, w, b, c: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1)),
    "views": lambda x, w, b, c: x.t().reshape(x.shape) + torch.cat([b, b])[:D],
    "scan": lambda x, w, b, c: x.cumsum(0) / 3,
}
DEPARTURES = ("none", "op", "constant", "shared", "residual", "result", "buffer", "cast")


class Program:
    """A random stack of blocks, some of which depart from the others."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.parts = draw.choices(sorted(PARTS), k=draw.randint(3, 6))
        self.layers = draw.randint(4, 9)
        self.departures = {
            draw.randrange(self.layers): draw.choice(DEPARTURES) for _ in range(draw.randint(0, 3))
        }
        self.is_derived = draw.random() < 0.6
        self.is_donated = draw.random() < 0.5
        generator = torch.Generator().manual_seed(seed)
        self.params = [
            tuple(
                torch.randn(*shape, generator=generator, dtype=torch.float64) / 3
                for shape in ((D, D), (D,))
            )
            for _ in range(self.layers)
        ]
        self.x = torch.randn(3, D, generator=generator, dtype=torch.float64)

    def forward(self, params: Any, x: Value) -> tuple[Value, list[Value]]:
        """The stack, and the values inside of it that it returns."""
        shown = []
        first = x
        for k, (w, b) in enumerate(params):
            departure = self.departures.get(k, "none")
            parts = [*self.parts]
            if departure == "op":
                parts[k % len(parts)] = "activation"
            if departure == "shared":
                w, b = params[0]
            number = 0.5 if departure == "constant" else 0.7
            y = x
            for part in parts:
                y = PARTS[part](y, w, b, number)
            if departure == "residual":
                y = y + first
            if departure == "buffer":
                y = y + torch.ones(D, dtype=torch.float64) * 0.1
            if departure == "cast":
                y = y.float().double()
            x = x + y
            if departure == "result":
                shown.append(x.t())
        return x, shown

    def step(self, params: Any, x: Value) -> Any:
        """What is captured: the stack, or a step of descent along its gradient."""
        if not self.is_derived:
            return self.forward(params, x)

        def loss(params: Any) -> Any:
            value, shown = self.forward(params, x)
            return value.square().mean(), shown

        (value, shown), grads = sf.value_and_grad(loss, has_aux=True)(params)
        new = sf.tree_map(lambda p, g: p - 0.1 * g, params, grads)
        return new, value, shown


@pytest.mark.parametrize("seed", range(CASES))
def test_a_program_with_calls_computes_what_the_function_computes(seed: int) -> None:
    program = Program(seed)
    donated = 0 if program.is_donated else ()
    lowered = sf.jit(program.step, donate_argnums=donated).lower(program.params, program.x)
    wanted = tree_leaves(program.step(program.params, program.x))
    given = [x.clone() for x in tree_leaves((program.params, program.x))]
    for result, expected in zip(run_outlined(lowered, given), wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_the_random_programs_repeat() -> None:
    called = 0
    for seed in range(12):
        program = Program(seed)
        graph, _ = outlined(sf.jit(program.step).lower(program.params, program.x))
        called += bool(copies(graph))
    assert called >= 8
