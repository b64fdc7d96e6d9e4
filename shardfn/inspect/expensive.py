"""Expensive programs: what is computed alike by all ranks of an axis, and activations that are
sent although another placement of one argument would send fewer.

A program is called so with a placement that mends it, found by placing it so; without one if
most of its time goes there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from ..byte_sizes import human_bytes
from ..errors import problem
from ..partition import layout, plan
from ..partition.auto import fused
from ..partition.auto.followers import Followers
from ..partition.auto.search import timed_on
from ..partition.planner.price import PlanPrice, plan_price, sending, unasked_bytes
from ..partition.planner.share import share_of
from ..partition.propagate import WORTH
from ..partition.propagation.walk import op_name
from ..placement import spec_of
from ..types import Marks, Program
from . import everywhere

SHARE = 0.01  # of a rank's FLOPs, above which what others compute too is expensive
FLOOR = 1e9  # FLOPs of a rank that are never expensive: some microseconds
MUCH, HALF = 1e12, 0.5  # FLOPs, and their share, that are said though no placement mends it
DEAR = 2.0**30  # bytes that nothing asks for, which are said though no placement mends it
LESS = 0.9  # of the bytes, or of the time, below which another placement mends a program
TRIES = 6  # placements that are tried for one finding
AHEAD = 3  # ops from the sum with a bias to the split of its result
LARGE = 2000  # ops of a program for which fewer are tried
SPLITS = {torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default}
Placing = Callable[[Sequence[Marks]], plan.Plan]
Changes = dict[int, Marks]  # of arguments, by their number


@attrs.frozen(eq=False)
class Mend:
    """Other placements of arguments, and of what follows them, and the program with them.

    Args:
        rows: of each argument its path, and its placements before and after.
        plan: the plan of the program.
    """

    rows: list[tuple[str, str, str]]
    plan: plan.Plan

    def __str__(self) -> str:
        return " and ".join(
            f"{path} at {after} in place of {before}" for path, before, after in self.rows
        )


def expensive(program: Program, chosen: plan.Plan, place: Placing, arguments: int) -> list[str]:
    """Warnings of the expensive parts of a plan.

    Args:
        program: the Program.
        chosen: its plan.
        place: returns the plan for other placements of the inputs.
        arguments: how many inputs are arguments of the user.
    """
    graph = program.graph.graph
    found = []
    if any(n > 1 for n in chosen.axes.sizes):
        search = _Search(program, chosen, place, arguments)
        if unasked_bytes(chosen, graph) >= WORTH:
            found += search.sent()
        found += search.replicated()
    return found


@attrs.frozen(eq=False)
class _Search:
    """A search for placements that mend a program."""

    program: Program
    chosen: plan.Plan
    place: Placing
    arguments: int

    @property
    def graph(self) -> torch.fx.Graph:
        return self.program.graph.graph

    def price(self, chosen: plan.Plan) -> PlanPrice:
        """The price of a plan, as `sf.auto` weighs it."""
        over = attrs.evolve(chosen, axes=timed_on(chosen.axes))
        return plan_price(over, self.graph, fused.in_bytes)

    def sent(self) -> Iterator[str]:
        """Activations that are sent, where an equally sharded program sends fewer."""
        steps = everywhere.largest_unasked(self.chosen, self.graph)
        if not steps:
            return
        before = unasked_bytes(self.chosen, self.graph)
        splits = [row for row in steps if parts_after(row[0].node) > 1]
        for step, axis in dict.fromkeys([steps[0], *splits[:1]]):
            mend = self.best(
                self.nearest(step.node),
                axis,
                self.is_less(before),
                is_sharded=True,
                blocks=parts_after(step.node),
            )
            if mend is not None:
                how_many = "most" if step is steps[0][0] else "many"
                yield self.sent_by(step, axis, mend, how_many)
                return
        if self.is_dear():
            yield self.sent_by(*steps[0], None, "most")

    def is_dear(self) -> bool:
        """Whether sending what nothing asks for takes longer than all that a rank computes."""
        over = attrs.evolve(self.chosen, axes=timed_on(self.chosen.axes))
        unasked = sending(over, self.graph, is_asked=False)
        is_much = unasked_bytes(self.chosen, self.graph) >= DEAR
        return is_much and unasked > self.price(self.chosen).computed

    def sent_by(self, step: plan.Redistribute, axis: int, mend: Mend | None, how_many: str) -> str:
        """A warning of activations that are sent, with how many of them one step sends."""
        before = unasked_bytes(self.chosen, self.graph)
        kind = next(move.kind for move in step.moves if move.axis == axis)
        name = self.chosen.axes.names[axis]
        got = (
            f"a rank sends {human_bytes(before)} of activations that no placement asks for, "
            f"{how_many} of them by {kind} over {name} for {op_name(step.node)}"
        )
        if mend is None:
            got += "; that takes longer than what it computes, and no other placement of one "
            return self.text(got + "argument spares it", "in_placements=sf.auto", step.node)
        after = unasked_bytes(mend.plan, self.graph)
        fix = f"{mend}, with which it sends {human_bytes(after)}"
        return self.text(got, fix, step.node)

    def is_less(self, before: float) -> Callable[[plan.Plan], bool]:
        """Whether a plan sends clearly fewer bytes that nothing asks for, and no more in all."""
        total = self.price(self.chosen).nbytes

        def is_less(other: plan.Plan) -> bool:
            after = unasked_bytes(other, self.graph)
            price = self.price(other)
            return after < min(LESS * before, before - WORTH) and price.nbytes < total

        return is_less

    def replicated(self) -> Iterator[str]:
        """Ops that all ranks of an axis compute alike, where another placement computes less."""
        every = sum(flops for _, _, flops in everywhere.work_of(self.chosen))
        for axis, name in enumerate(self.chosen.axes.names):
            rows = [row for row in everywhere.work_of(self.chosen) if self.is_alike(row[0], axis)]
            alike = sum(flops for _, _, flops in rows)
            if alike < max(FLOOR, SHARE * every):
                continue
            _, node, _ = max(rows, key=lambda row: row[2])
            near = [*self.data(), *self.nearest(node)]
            mend = self.best(near, axis, self.is_faster(), is_sharded=False)
            if mend is None and alike < max(MUCH, HALF * every):
                continue
            n = self.chosen.axes.sizes[axis]
            got = (
                f"{alike / every:.0%} of a rank's FLOPs are computed alike by all {n} ranks of "
                f"{name}, most of them by {op_name(node)}"
            )
            if mend is None:
                got += ", and no other placement of one argument shares them"
            yield self.text(got, str(mend or "in_placements=sf.auto"), node)

    def is_alike(self, step: plan.Apply, axis: int) -> bool:
        """Whether all ranks of an axis compute the same."""
        if self.chosen.axes.sizes[axis] == 1:
            return False
        slots = [(slot.value, slot.marks) for slot in (*step.outs, *step.ins)]
        return share_of(slots, self.chosen.axes.sizes, axis) == 1.0

    def is_faster(self) -> Callable[[plan.Plan], bool]:
        """Whether a plan computes clearly less, and takes less time."""
        now = self.price(self.chosen)
        every = sum(flops for _, _, flops in everywhere.work_of(self.chosen))

        def is_faster(other: plan.Plan) -> bool:
            price = self.price(other)
            flops = sum(flops for _, _, flops in everywhere.work_of(other))
            return flops < (1 - SHARE) * every and price.total < LESS * now.total

        return is_faster

    def nearest(self, node: torch.fx.Node) -> list[int]:
        """The arguments that an op depends on, the nearest first."""
        holders = self.graph.find_nodes(op="placeholder")
        number = {holder: i for i, holder in enumerate(holders)}
        outside = everywhere.outside(self.graph)
        seen = {node}
        queue = collections.deque([node])
        found = []
        while queue and len(found) < TRIES:
            next_one = queue.popleft()
            around = outside.get(next_one)
            for read in around or next_one.all_input_nodes:
                if read not in seen:
                    seen.add(read)
                    queue.append(read)
                    if read in number and number[read] < self.arguments:
                        found.append(number[read])
        return found

    def data(self) -> list[int]:
        """The first arguments that follow no parameter."""
        followers = Followers(self.graph)
        holders = self.graph.find_nodes(op="placeholder")[: self.arguments]
        free = [i for i, x in enumerate(holders) if followers.leader(x) is None]
        return free[:2] if followers.parameters else []

    def best(
        self,
        near: Sequence[int],
        axis: int,
        mends: Callable[[plan.Plan], bool],
        *,
        is_sharded: bool,
        blocks: int = 1,
    ) -> Mend | None:
        """The placement of one argument that mends the program best; None if none does.

        Args:
            near: the arguments that are tried.
            axis: on which their placements change.
            mends: whether a plan is one that mends.
            is_sharded: whether they are sharded on that axis now.
            blocks: as how many equal blocks their dims are viewed, too.
        """
        most = TRIES if len(self.graph.nodes) < LARGE else 2
        tried = [
            changes
            for i in dict.fromkeys(near)
            for changes in (
                *self.together(i, near, axis, blocks),
                *self.others(i, axis, is_sharded=is_sharded),
            )
        ]
        best: tuple[PlanPrice, Mend] | None = None
        for changes in tried[:most]:
            found = self.place(self.changed(changes))
            price = self.price(found)
            is_best = best is None or price.total < best[0].total
            if is_best and mends(found):
                best = price, self.mend(changes, found)
        return None if best is None else best[1]

    def others(self, i: int, axis: int, *, is_sharded: bool) -> Iterator[Changes]:
        """An argument evenly sharded on other dims over an axis."""
        slot = self.chosen.ins[i]
        sizes = self.chosen.axes.sizes
        if isinstance(slot.marks[axis], str) == is_sharded:
            return
        for dim, size in enumerate(slot.value.shape):
            marks = (*slot.marks[:axis], dim, *slot.marks[axis + 1 :])
            shape = tuple(slot.value.shape)
            ranks = [n for n, m in zip(sizes, marks, strict=True) if m == dim]
            count = 1
            for n in ranks:
                count *= n
            is_plain = layout.canonical(shape, marks, sizes) == marks
            if marks != slot.marks and is_plain and size and size % count == 0:
                yield {i: marks}

    def together(self, i: int, near: Sequence[int], axis: int, blocks: int) -> Iterator[Changes]:
        """An argument in blocks, with those near it in the same layer that are sharded as it is,
        such as the bias of a weight.
        """
        layer = layer_of(self.program.in_paths[i])
        beside = [k for k in near if layer_of(self.program.in_paths[k]) == layer]
        size_of = lambda k: self.chosen.ins[k].value.shape[self.chosen.ins[k].marks[axis]]
        for marks in self.in_blocks(i, axis, blocks):
            changes = {i: marks}
            for k in beside:
                for other in self.in_blocks(k, axis, blocks):
                    if size_of(k) == size_of(i):
                        changes[k] = other
            yield changes

    def in_blocks(self, i: int, axis: int, blocks: int) -> Iterator[Marks]:
        """An argument with its dim over an axis viewed as equal blocks, each of them sharded."""
        slot = self.chosen.ins[i]
        mark = slot.marks[axis]
        n = self.chosen.axes.sizes[axis]
        if blocks == 1 or not isinstance(mark, int):
            return
        size = slot.value.shape[mark]
        is_alone = [*slot.marks].count(mark) == 1
        if is_alone and size and size % (blocks * n) == 0:
            strided = layout.joined(mark, 1, outer=blocks)
            yield (*slot.marks[:axis], strided, *slot.marks[axis + 1 :])

    def changed(self, changes: Changes) -> list[Marks]:
        """The placements of all inputs with others for some arguments and their followers."""
        followers = Followers(self.graph)
        holders = self.graph.find_nodes(op="placeholder")
        given = [slot.marks for slot in self.chosen.ins]
        for i, marks in changes.items():
            leader = followers.leader(holders[i])
            for k, x in enumerate(holders):
                if k == i or (leader and followers.leader(x) is leader):
                    given[k] = marks
        return given

    def mend(self, changes: Changes, found: plan.Plan) -> Mend:
        """Placements of arguments as a mend."""
        rows = []
        for i, marks in changes.items():
            slot = self.chosen.ins[i]
            dims = slot.value.dim()
            before = spec_of(slot.marks, dims, self.chosen.axes)
            after = spec_of(marks, dims, self.chosen.axes)
            rows.append((self.program.in_paths[i], repr(before), repr(after)))
        return Mend(rows, found)

    def text(self, got: str, fix: str, node: torch.fx.Node) -> str:
        """A warning."""
        source = node.meta.get("source")
        module = (node.meta.get("custom") or {}).get("module")
        where = f", in {module}" if module else ""
        return problem(self.program.name, f"{got}{where}", fix=fix, source=source)


def layer_of(path: str) -> str:
    """The path of an argument without its last name."""
    end = max(path.rfind("."), path.rfind("["))
    return path[: max(end, 0)]


def equal_parts(node: torch.fx.Node) -> int:
    """The number of equal parts into which an op splits its input; 1 for other ops."""
    if node.target not in SPLITS:
        return 1
    parts = node.meta["val"]
    return 1 if len({tuple(x.shape) for x in parts}) > 1 else len(parts)


def parts_after(node: torch.fx.Node) -> int:
    """The number of equal parts into which an op, or one of the next ops, splits a value."""
    nodes = [node]
    for _ in range(AHEAD):
        nodes += [user for x in nodes for user in x.users if user not in nodes]
    return next((n for n in map(equal_parts, nodes) if n > 1), 1)
