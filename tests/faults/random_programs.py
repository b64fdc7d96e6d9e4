"""Random programs under random nests of transforms, sharded and next to plain torch, until time
is over.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from programs import Drawn, Writer, programs, spread

import shardfn as sf
from shardfn import P
from tests.faults.nests import ROWS, elements, nested

BATCH = 20  # programs of one seed
WIDEST = 20_000  # elements of a derivative
RANKS = 8  # at most
SHRINKING = 40.0  # seconds for smaller programs, after the first that fails
RTOL = {  # sums of other orders, through twelve ops and some derivatives
    torch.float64: 1e-8,
    torch.float32: 2e-3,
    torch.float16: 0.05,
    torch.bfloat16: 0.25,
    torch.int64: 1e-8,
}
DTYPES = (
    *[(torch.float64,)] * 3,
    (torch.float32,),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float64, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.int64),
)
Fn = Callable[..., Any]
Clock = Callable[[], float]


@attrs.frozen
class Layout:
    """A mesh, and the placements of the inputs on it."""

    mesh: dict[str, int]
    placements: tuple[Any, ...]

    def arguments(self, xs: tuple[torch.Tensor, ...], mesh: Any) -> list[Any]:
        """Inputs: those with a list of placements, which may be Partial, as DTensors."""
        rows = zip(xs, self.placements, strict=True)
        return [x if isinstance(p, P) else spread(x, mesh, p) for x, p in rows]


@attrs.frozen
class Case:
    """A program under nested transforms, sharded in several ways.

    Args:
        drawn: the program.
        nest: rows of `nests.ROWS`, the first innermost.
        at: which inputs are differentiated.
        dtypes: of the inputs.
        layouts: the meshes and placements to try.
    """

    drawn: Drawn
    nest: tuple[str, ...]
    at: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    layouts: tuple[Layout, ...]

    def __repr__(self) -> str:
        rows = "\n".join(f"# on {x.mesh}: {x.placements}" for x in self.layouts)
        nest = " of ".join(reversed(self.nest))
        return f"# {nest}, by {self.at}, {self.dtypes}\n{rows}{self.drawn!r}"

    @property
    def rtol(self) -> float:
        """How far a result may be off, by the least exact dtype of the inputs."""
        return max(RTOL[dtype] for dtype in self.dtypes)

    def inputs(self, scale: float = 1.0, is_exact: bool = False) -> tuple[torch.Tensor, ...]:
        """Values of the inputs, scaled, in their dtypes, or floats of the same value in float64."""
        rows = zip(self.drawn.arguments(), self.dtypes, strict=True)
        return tuple(_value(x, dtype, scale, is_exact) for x, dtype in rows)

    def sharded(self) -> Iterator[Any]:
        """The results on each layout, of one function."""
        program = self.drawn.function()
        loss = lambda *xs: program(*xs)[0]
        step = nested(loss, self.nest, self.at, is_ours=True)
        for layout in self.layouts:
            axes = layout.mesh
            with sf.fake_world(math.prod(axes.values())):
                mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
                placed = sf.shard(step, mesh, layout.placements, backend="aten")
                yield sf.full(placed(*layout.arguments(self.inputs(), mesh)))

    def plain(self, scale: float = 1.0, is_exact: bool = False) -> Any:
        """torch's results on one device."""
        loss = _without_ours(self.drawn)
        step = nested(loss, self.nest, self.at, is_ours=False)
        return step(*self.inputs(scale, is_exact))


def _value(x: torch.Tensor, dtype: torch.dtype, scale: float, is_exact: bool) -> torch.Tensor:
    if not dtype.is_floating_point:
        return (x * 2).to(dtype)
    x = x.to(dtype)
    return x.double() * scale if is_exact else x * scale


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


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Programs under one to three transforms, in three to sixteen layouts."""
    nest = draw(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=3))
    drawn = draw(programs(most=12 if len(nest) < 3 else 7))
    kinds = draw(st.sampled_from(DTYPES))
    dtypes = [draw(st.sampled_from(kinds)) for _ in drawn.inputs]
    floats = [i for i, dtype in enumerate(dtypes) if dtype.is_floating_point]
    at = draw(st.sets(st.sampled_from(floats or [0]), min_size=1))
    shapes = [shape for shape, _ in drawn.inputs.values()]
    hypothesis.assume(floats and elements(tuple(nest), sum(math.prod(s) for s in shapes)) <= WIDEST)
    own = Layout(drawn.mesh, tuple(spec for _, spec in drawn.inputs.values()))
    others = [_layout(draw, drawn) for _ in range(draw(st.integers(2, 15)))]
    layouts = [_without_partial(row, dtypes) for row in (own, *others)]
    return Case(drawn, tuple(nest), tuple(sorted(at)), tuple(dtypes), tuple(layouts))


def _layout(draw: st.DrawFn, drawn: Drawn) -> Layout:
    """Another mesh of the same axes, and placements on it."""
    writer = Writer(draw)
    sizes = {name: draw(st.integers(1, 4)) for name in drawn.mesh}
    hypothesis.assume(math.prod(sizes.values()) <= RANKS)
    writer.mesh = sizes
    shapes = [shape for shape, _ in drawn.inputs.values()]
    return Layout(sizes, tuple(writer.placement(shape) for shape in shapes))


def _without_partial(layout: Layout, dtypes: list[torch.dtype]) -> Layout:
    """The layout, with P() for what is Partial and not in float64: its terms are not exact."""
    rows = zip(layout.placements, dtypes, strict=True)
    placements = tuple(
        spec if isinstance(spec, P) or dtype == torch.float64 else P() for spec, dtype in rows
    )
    return attrs.evolve(layout, placements=placements)


def leaves(tree: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def differences(case: Case, wanted: list[torch.Tensor]) -> Iterator[str | None]:
    """For each layout the first result that differs from torch's, as text. None if all agree,
    or if torch's own result is no number, or moves with the last digit of its inputs.
    """
    for layout, tree in zip(case.layouts, case.sharded(), strict=True):
        said = _difference(leaves(tree), wanted, case)
        is_wrong = said is not None and (said.is_kind or _is_stable(case, wanted))
        yield f"on {layout}: {said.text}" if said and is_wrong else None


@attrs.frozen
class Difference:
    """A result that differs, and whether its shape or dtype does."""

    text: str
    is_kind: bool


def _difference(
    found: list[torch.Tensor], wanted: list[torch.Tensor], case: Case
) -> Difference | None:
    # the tangent of a 0-dim float32 times a Python number is float64 in torch.func (torch 2.13)
    is_widened = torch.float64 not in case.dtypes
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        is_same = a.dtype == b.dtype or (is_widened and b.dtype == torch.float64)
        if a.shape != b.shape or not is_same:
            kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
            return Difference(f"result {i} is {kinds[0]}, not {kinds[1]}", True)
        error = _error(a, b)
        if not error <= case.rtol:
            return Difference(f"result {i} is off by {error:.2e}", False)
    return None


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if not b.numel():
        return 0.0
    a, b = a.double(), b.double()
    return ((a - b).abs().max() / (1 + b.abs().max())).item()


def _is_stable(case: Case, wanted: list[torch.Tensor]) -> bool:
    """Whether torch's results stay what they are when the inputs move a little, or are computed
    more exactly.
    """
    exact = leaves(case.plain(is_exact=True))
    moved = leaves(case.plain(1 + 1e-13, is_exact=True))
    return all(
        a.isfinite().all() and _error(m, a) <= 1e-7 and _error(b, a) <= case.rtol / 4
        for a, m, b in zip(exact, moved, wanted, strict=True)
    )


def run(seconds: float, seed: int, clock: Clock = time.monotonic) -> collections.Counter[str]:
    """Try programs for so many seconds of a clock.

    Returns:
        How many functions were read, how many of their programs were right, and how many were
        refused by name or unsupported by torch itself.

    Raises:
        AssertionError: a wrong value; hypothesis prints the smallest such program.
    """
    counts = collections.Counter[str]()
    end = clock() + seconds
    while clock() < end:
        _batch(seed, counts, clock, end)
        seed += 1
    return counts


def _batch(seed: int, counts: collections.Counter[str], clock: Clock, end: float) -> None:
    failed: dict[str, float] = {}  # programs, and when they did: such a program must fail again

    @hypothesis.seed(seed)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases())
    def try_one(case: Case) -> None:
        text = repr(case)
        last = min(failed.values()) + SHRINKING if failed else end
        if clock() >= last and text not in failed:
            return
        try:
            _tried(case, seed, counts)
        except Exception:
            failed.setdefault(text, clock())
            raise

    try_one()


def _tried(case: Case, seed: int, counts: collections.Counter[str]) -> None:
    try:
        wanted = leaves(case.plain())
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        counts["unsupported by torch"] += 1
        return
    counts["functions"] += 1
    try:
        for wrong in differences(case, wanted):
            assert wrong is None, f"seed {seed}: {wrong}\n{case!r}"
            counts["right"] += 1
    except sf.ShardError:
        counts["refused by name"] += 1
