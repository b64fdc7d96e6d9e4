"""Random programs under random transforms, sharded and next to plain torch, until time is over."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from typing import Any

import attrs
import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from programs import Drawn, programs

import shardfn as sf
from shardfn import P

BATCH = 20  # programs of one seed
RTOL = 1e-8  # sums of other orders, through twelve ops and two derivatives
Fn = Callable[..., Any]
Clock = Callable[[], float]


def _ones(xs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.ones_like(x) for x in xs)


@attrs.frozen
class Nest:
    """One row: transforms around a loss of all inputs, in shardfn and in torch.

    Args:
        ours, plain: take the loss, and return a function of the inputs.
        samples: whether the inputs have a leading dim of samples, which stays replicated.
    """

    ours: Callable[[Fn, tuple[int, ...]], Fn]
    plain: Callable[[Fn, tuple[int, ...]], Fn]
    samples: bool = False


def _jvp(jvp: Fn) -> Callable[[Fn, tuple[int, ...]], Fn]:
    return lambda f, at: lambda *xs: jvp(f, xs, _ones(xs))


def _hvp(jvp: Fn, grad: Fn) -> Callable[[Fn, tuple[int, ...]], Fn]:
    return lambda f, at: lambda *xs: jvp(grad(f, argnums=at), xs, _ones(xs))


def _torch_value_and_grad(f: Fn, at: tuple[int, ...]) -> Fn:
    def both(*xs: Any) -> Any:
        grads, value = torch.func.grad_and_value(f, argnums=at)(*xs)
        return value, grads

    return both


NESTS = {
    "value": Nest(lambda f, at: f, lambda f, at: f),
    "grad": Nest(
        lambda f, at: sf.grad(f, argnums=at),
        lambda f, at: torch.func.grad(f, argnums=at),
    ),
    "bucketed_grad": Nest(
        lambda f, at: sf.bucketed_grad(f, argnums=at), _torch_value_and_grad
    ),
    "grad of checkpoint": Nest(
        lambda f, at: sf.grad(sf.checkpoint(f), argnums=at),
        lambda f, at: torch.func.grad(f, argnums=at),
    ),
    "jvp": Nest(_jvp(sf.jvp), _jvp(torch.func.jvp)),
    "jvp of grad": Nest(
        _hvp(sf.jvp, sf.grad), _hvp(torch.func.jvp, torch.func.grad)
    ),
    "vmap": Nest(
        lambda f, at: sf.vmap(f), lambda f, at: torch.vmap(f), samples=True
    ),
    "vmap of grad": Nest(
        lambda f, at: sf.vmap(sf.grad(f, argnums=at)),
        lambda f, at: torch.vmap(torch.func.grad(f, argnums=at)),
        samples=True,
    ),
    "grad of shard": Nest(
        lambda f, at: sf.grad(sf.shard(f), argnums=at),
        lambda f, at: torch.func.grad(f, argnums=at),
    ),
}


@attrs.frozen
class Case:
    """A program under one row of NESTS."""

    drawn: Drawn
    nest: str

    def inputs(self, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        """Values of the inputs: with samples, several of each."""
        if not NESTS[self.nest].samples:
            return tuple(x * scale for x in self.drawn.arguments())
        seeds = [self.drawn.arguments(seed) for seed in range(3)]
        return tuple(torch.stack(xs) * scale for xs in zip(*seeds, strict=True))

    def loss(self) -> Fn:
        program = self.drawn.function()
        return lambda *xs: program(*xs)[0]

    @property
    def argnums(self) -> tuple[int, ...]:
        return tuple(range(len(self.drawn.inputs)))

    def placements(self) -> tuple[P, ...]:
        """The placements of the inputs; P() for those that are Partial."""
        lead = (None,) * NESTS[self.nest].samples
        specs = [spec for _, spec in self.drawn.inputs.values()]
        return tuple(
            P(*lead, *spec.parts) if isinstance(spec, P) else P() for spec in specs
        )

    def sharded(self) -> Any:
        mesh = self.drawn.mesh
        with sf.fake_world(math.prod(mesh.values())):
            devices = sf.make_mesh(tuple(mesh.values()), tuple(mesh))
            step = NESTS[self.nest].ours(self.loss(), self.argnums)
            placed = sf.shard(step, devices, self.placements(), backend="aten")
            return sf.full(placed(*self.inputs()))

    def plain(self, scale: float = 1.0) -> Any:
        step = NESTS[self.nest].plain(_without_ours(self.drawn), self.argnums)
        return step(*self.inputs(scale))


def _without_ours(drawn: Drawn) -> Fn:
    """The loss without constraints, which are identities."""
    program = drawn.function()
    names = program.__globals__
    names["sf"] = _Identities
    return lambda *xs: program(*xs)[0]


class _Identities:
    """The functions of shardfn that a program calls, as plain torch."""

    @staticmethod
    def constrain(x: Any, *_: Any, **__: Any) -> Any:
        return x


def leaves(tree: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def difference(case: Case) -> str | None:
    """The first result that differs from torch's, as text. None if all agree, or if torch's own
    result is no number, or moves with the last digit of its inputs.
    """
    wanted = leaves(case.plain())
    found = leaves(case.sharded())
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        size = 1 + b.abs().max().item() if b.numel() else 1.0
        error = (a - b).abs().max().item() / size if b.numel() else 0.0
        if a.shape != b.shape or (error > RTOL and _is_stable(case)):
            return f"result {i} is off by {error:.2e}, shape {tuple(a.shape)}"
        if not math.isfinite(error) and _is_stable(case):
            return f"result {i} is {a.flatten()[:4].tolist()}"
    return None


def _is_stable(case: Case) -> bool:
    rows = zip(leaves(case.plain()), leaves(case.plain(1 + 1e-13)), strict=True)
    return all(
        a.isfinite().all() and (a - b).abs().max() <= 1e-7 * (1 + a.abs().max())
        for a, b in rows
        if a.numel()
    )


def run(
    seconds: float, seed: int, clock: Clock = time.monotonic
) -> collections.Counter[str]:
    """Try programs for so many seconds of a clock.

    Returns:
        How many were right, and how many refused by name or unsupported by torch itself.

    Raises:
        AssertionError: a wrong value; hypothesis prints the smallest such program.
    """
    counts = collections.Counter[str]()
    end = clock() + seconds
    is_over = lambda: clock() >= end
    while not is_over():
        _batch(seed, counts, is_over)
        seed += 1
    return counts


def _batch(
    seed: int, counts: collections.Counter[str], is_over: Callable[[], bool]
) -> None:
    failed: list[Case] = []  # then time does not count: a failure must fail again

    @hypothesis.seed(seed)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(st.builds(Case, programs(), st.sampled_from(sorted(NESTS))))
    def try_one(case: Case) -> None:
        if is_over() and not failed:
            return
        try:
            case.plain()
        except (RuntimeError, NotImplementedError):
            counts["unsupported by torch"] += 1
            return
        try:
            wrong = difference(case)
        except sf.ShardError:
            counts["refused by name"] += 1
            return
        except Exception:
            failed.append(case)
            raise
        if wrong is not None:
            failed.append(case)
        assert wrong is None, f"seed {seed}, {case.nest}: {wrong}\n{case.drawn!r}"
        counts["right"] += 1

    try_one()
