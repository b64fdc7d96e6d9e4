"""Cut tensors as marks say, put them together again, and run one-op programs on the pieces;
torch.chunk is the judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardfn import _compat
from shardfn.partition import Plan, emit, layout, local_sizes, rules
from shardfn.partition import plan as steps
from shardfn.partition.collective_bytes import collectives_in
from shardfn.partition.printing import local_text
from shardfn.partition.rule_api.strategy import OpCall
from shardfn.runtime.simulator import simulate
from shardfn.schedule import plan_schedule, schedule
from shardfn.types import AxisPlacement, LocalProgram, MeshAxes, MeshPlacements

LETTERS = "abcdefg"


def mesh_axes(sizes: Sequence[int]) -> MeshAxes:
    """Axes a, b, c ... of these sizes."""
    return MeshAxes(tuple(LETTERS[: len(sizes)]), tuple(sizes))


def ranks(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every rank's coordinates, in row-major order."""
    return list(itertools.product(*map(range, sizes)))


def chunks(x: torch.Tensor, dim: int, unit: int, n: int) -> list[torch.Tensor]:
    """n chunks of a dim, in whole units, as torch.chunk makes them; the last ones may be empty."""
    units = x.shape[dim] // unit
    assert units * unit == x.shape[dim], f"{x.shape[dim]} is no multiple of {unit}"
    size = -(-units // n)
    ends = [unit * min(k * size, units) for k in range(n + 1)]
    return [
        x.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)
        for start, end in itertools.pairwise(ends)
    ]


def with_halo(
    x: torch.Tensor, dim: int, found: list[torch.Tensor], before: int, after: int
) -> list[torch.Tensor]:
    """Chunks with what lies on either side of them, zeros beyond the ends; an empty chunk stays
    empty.
    """
    wide = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])
    sizes = [c.shape[dim] for c in found]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        wide.narrow(dim, start, size + before + after if size else 0)
        for start, size in zip(starts, sizes, strict=True)
    ]


def held_rows(
    size: int, dim: int, marks: MeshPlacements, sizes: Sequence[int]
) -> dict[tuple[int, ...], torch.Tensor]:
    """The elements of a dim that the rank at each coordinate holds, where some axis has a
    strided shard of it: those that every axis says are its own.

    An axis views the dim as so many blocks, each of runs that a finer axis does not cut, and
    holds a chunk of the runs of each block. The last blocks may be short. In every second block of
    a zigzag, whose number of blocks is negative, the last rank holds the first chunk.
    """
    mine = [
        (*(mark if isinstance(mark, tuple) else (mark, 1)), 1)[1:3]
        if not isinstance(mark, str) and (mark if isinstance(mark, int) else mark[0]) == dim
        else None
        for mark in marks
    ]
    outers = sorted({abs(outer) for _, outer in filter(None, mine)})
    found = {}
    for at in ranks(sizes):
        rows = torch.arange(size)
        for k, cut_by in enumerate(mine):
            if cut_by is None:
                continue
            unit, blocks = cut_by
            outer = abs(blocks)
            back = sizes[k] - 1 - at[k] if blocks < 0 else at[k]
            finer = [o for o in outers if o > outer]
            run = -(-size // finer[0]) if finer else 1
            length = -(-size // outer)
            parts = [rows[rows // length == b] for b in range(outer)]
            rows = torch.cat(
                [
                    _chunk(part, part % length // run, unit // run, sizes[k], (at[k], back)[b % 2])
                    for b, part in enumerate(parts)
                ]
            )
        found[at] = rows
    return found


def _chunk(
    rows: torch.Tensor, runs: torch.Tensor, unit: int, n: int, coordinate: int
) -> torch.Tensor:
    """The rows whose runs are in a rank's chunk of them."""
    kept = chunks(runs.unique(), 0, max(unit, 1), n)[coordinate]
    return rows[torch.isin(runs, kept)]


def is_strided(mark: AxisPlacement) -> bool:
    return isinstance(mark, tuple) and len(mark) == 3


def split(
    x: torch.Tensor, mark: AxisPlacement, n: int, generator: torch.Generator, exact: bool = False
) -> list[torch.Tensor]:
    """What each of n ranks on one axis holds of x: a chunk, all of it, or a random term of the
    pending reduction.

    Exact terms of a sum are 2x, -x and zeros, which add up to x without rounding in any order.
    """
    if not isinstance(mark, str):
        dim, unit, *halo = mark if isinstance(mark, tuple) else (mark, 1)
        found = chunks(x, dim, unit, n)
        return with_halo(x, dim, found, *halo) if halo else found
    if mark in ("R", "*"):
        return [x] * n
    if mark == "sum" and x.dtype == torch.bool:  # each True is on one rank
        owner = torch.randint(0, n, x.shape, generator=generator)
        return [x & (owner == r) for r in range(n)]
    if mark == "sum" and exact:
        finite = torch.where(x.isfinite(), x, 0)
        terms = [x + finite, -finite, *[torch.zeros_like(x)] * (n - 2)][:n] if n > 1 else [x]
        return [terms[i] for i in torch.randperm(n, generator=generator).tolist()]
    noise = [_noise(x, generator) for _ in range(n - 1)]
    if mark == "sum":
        return [*noise, x - sum(noise)] if noise else [x]
    towards = torch.minimum if mark == "max" else torch.maximum
    out = [towards(x, x + v) for v in noise]
    out.insert(int(torch.randint(0, n, (), generator=generator)), x)
    return out


def _noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if x.dtype.is_floating_point or x.is_complex():
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return torch.randint(-5, 6, x.shape, generator=generator, dtype=x.dtype)


def cut(
    x: torch.Tensor,
    marks: MeshPlacements,
    sizes: Sequence[int],
    seed: int = 0,
    *,
    exact: bool = False,
) -> list[torch.Tensor]:
    """Every rank's piece of x; the first axis cuts first."""
    generator = torch.Generator().manual_seed(seed)
    level = [x]
    strided = {m[0] for m in marks if is_strided(m)}
    plain = [
        "R" if not isinstance(m, str) and layout.dim_and_unit(m)[0] in strided else m for m in marks
    ]
    for mark, n in zip(plain, sizes, strict=True):
        level = [piece for whole in level for piece in split(whole, mark, n, generator, exact)]
    for dim in strided:
        rows = held_rows(x.shape[dim], dim, marks, sizes)
        level = [
            piece.index_select(dim, rows[at]) for piece, at in zip(level, ranks(sizes), strict=True)
        ]
    return [_ordered(piece, x) for piece in level]


def _ordered(piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The piece in memory of its own, its dims in the order of `like`'s."""
    order = sorted(range(like.dim()), key=lambda d: (-like.stride(d), d))
    back = [order.index(d) for d in range(like.dim())]
    return piece.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def joined(
    pieces: Sequence[torch.Tensor],
    marks: MeshPlacements,
    sizes: Sequence[int],
    tolerance: float | None = None,
) -> torch.Tensor:
    """The whole value that pieces stand for; replicas must agree."""
    level = list(pieces)
    for mark, n in reversed(list(zip(marks, sizes, strict=True))):
        level = [_join(level[i : i + n], mark, tolerance) for i in range(0, len(level), n)]
    (whole,) = level
    for dim in {m[0] for m in marks if is_strided(m)}:
        rows = held_rows(whole.shape[dim], dim, marks, sizes)
        shards = [isinstance(m, str) or layout.dim_and_unit(m)[0] != dim for m in marks]
        once = [
            rows[at]
            for at in ranks(sizes)
            if not any(c for c, is_other in zip(at, shards, strict=True) if is_other)
        ]
        whole = whole.index_select(dim, torch.cat(once).argsort())
    return whole


def _join(group: list[torch.Tensor], mark: AxisPlacement, tolerance: float | None) -> torch.Tensor:
    if not isinstance(mark, str):
        return torch.cat(group, mark[0] if isinstance(mark, tuple) else mark)
    if mark == "R":
        for other in group[1:]:
            same(other, group[0], "replicas", tolerance)
        return group[0]
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[mark]
    total = group[0]
    for other in group[1:]:
        total = combine(total, other)
    return total


TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # exact otherwise


def same(
    got: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float | None = None
) -> None:
    """Equal in shape and dtype, and in value up to the rounding of the dtype, or up to the
    tolerance.
    """
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (
        f"{what}: {got.shape} {got.dtype}, not {wanted.shape} {wanted.dtype}"
    )
    tolerance = max(tolerance or 0.0, TOLERANCE.get(wanted.dtype, 0.0))
    wrong = ~torch.isclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(f"{what}, at {at}: {got[at].item()}, not {wanted[at].item()}")


def check_pieces(
    pieces: Sequence[torch.Tensor],
    whole: torch.Tensor,
    marks: MeshPlacements,
    sizes: Sequence[int],
    tolerance: float | None = None,
) -> None:
    """Pieces have the shapes of torch.chunk, and together they are the whole."""
    plain = tuple("R" if isinstance(m, str) else m for m in marks)
    for rank, piece, wanted in zip(ranks(sizes), pieces, cut(whole, plain, sizes), strict=True):
        assert piece.shape == wanted.shape, (
            f"rank {rank} holds {tuple(piece.shape)}, not {tuple(wanted.shape)}"
        )
    same(joined(pieces, marks, sizes, tolerance), whole, "the whole", tolerance)


def run_plan(plan: Plan, columns: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Every result's pieces by rank; ranks whose sizes are equal share a program, as they do in
    a real run.

    Args:
        plan: what to run.
        columns: for each input, every rank's piece.
    """
    everyone, names = (ranks(plan.axes.sizes), tuple(f"group:{a}" for a in plan.axes.names))
    kinds = local_sizes(plan, everyone)
    programs: dict[Any, LocalProgram] = {}
    for c, kind in kinds.items():
        if kind not in programs:
            programs[kind] = _local(plan, c, names)
    inputs = [[column[r] for column in columns] for r in range(len(everyone))]
    results = simulate([programs[kinds[c]] for c in everyone], inputs, everyone)
    return [list(column) for column in zip(*results, strict=True)]


def _local(plan: Plan, coordinates: tuple[int, ...], names: tuple[str, ...]) -> LocalProgram:
    graphs = schedule(emit(plan, coordinates, names, "cpu"), plan_schedule(plan, "one op"))
    return LocalProgram(
        name="one op",
        axes=plan.axes,
        graph=graphs[-1],
        unordered=graphs[-2],
        in_paths=tuple(f"x{i}" for i in range(len(plan.ins))),
        in_placements=tuple(slot.placements for slot in plan.ins),
        out_placements=tuple(slot.placements for slot in plan.outs),
        out_paths=tuple(f"out{i}" for i in range(len(plan.outs))),
        elided=(),
        show=local_text,
        records=collectives_in,
    )


class OneOp:
    """One call of an op: its fake call as rules see it, its tensors, its true results."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mode = _compat.FakeTensorMode()
        self.tensors: list[torch.Tensor] = []
        graph = torch.fx.Graph()
        replaced = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: self._holder(graph, x), (args, kwargs)
        )
        self.node = graph.call_function(target, *replaced)
        fake = torch.fx.node.map_arg(replaced, lambda n: n.meta["val"])
        with self.mode:
            self.node.meta.update(val=target(*fake[0], **fake[1]), phase="forward", source=None)
        with torch.no_grad():
            self.results = tensors_of(target(*args, **kwargs))
        ins = tuple(n.meta["val"] for n in graph.nodes if n.op == "placeholder")
        self.call = OpCall(
            target,
            self.node.args,
            dict(self.node.kwargs),
            ins,
            tuple(tensors_of(self.node.meta["val"])),
        )

    def _holder(self, graph: torch.fx.Graph, x: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder(f"x{len(self.tensors)}")
        node.meta["val"] = self.mode.from_tensor(x)
        self.tensors.append(x)
        return node

    def plan(
        self, ins: Sequence[MeshPlacements], outs: Sequence[MeshPlacements], sizes: Sequence[int]
    ) -> Plan:
        """The plan that runs the op on inputs cut like this, and claims results cut like that."""
        slots = [
            steps.Slot(i, x, m)
            for i, (x, m) in enumerate(
                zip((*self.call.ins, *self.call.outs), (*ins, *outs), strict=True)
            )
        ]
        mine, made = tuple(slots[: len(ins)]), tuple(slots[len(ins) :])
        axes, step = mesh_axes(sizes), steps.Apply(self.node, mine, made)
        numbers = itertools.count(len(slots))
        more = lambda value, marks: steps.Slot(next(numbers), value, marks)
        with self.mode:
            parts = rules.steps_of(step, axes, more)
        return Plan(axes=axes, steps=tuple(parts), ins=mine, outs=made)

    def prove(
        self, ins: Sequence[MeshPlacements], outs: Sequence[MeshPlacements], sizes: Sequence[int]
    ) -> None:
        """Run the op on pieces, and compare the pieces that come out with those of the true
        results.
        """
        columns = [
            cut(x, m, sizes, seed)
            for seed, (x, m) in enumerate(zip(self.tensors, ins, strict=True))
        ]
        found = run_plan(self.plan(ins, outs, sizes), columns)
        tolerance = max(TOLERANCE.get(x.dtype, 0.0) for x in (*self.tensors, *self.results))
        for pieces, whole, marks in zip(found, self.results, outs, strict=True):
            check_pieces(pieces, whole, marks, sizes, tolerance)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors that an op returns."""
    return (
        [result]
        if isinstance(result, torch.Tensor)
        else [r for r in result or () if isinstance(r, torch.Tensor)]
    )
