"""Warnings about expensive programs: ops that all ranks of an axis compute replicated, and
activations that are sent although another placement of one argument would send fewer bytes.

A warning names a better placement, found by planning the program with it. Without one it is given
only if most of the program's time goes there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from ..byte_sizes import human_bytes
from ..errors import problem
from ..ops.nodes import origin_of
from ..partition import layout, plan
from ..partition.auto import fused_op_cost
from ..partition.auto.search import with_hardware_links
from ..partition.planner.plan_price import PlanPrice, implicit_bytes, implicit_price, plan_price
from ..partition.planner.share import share_of
from ..partition.propagate import WORTH
from ..partition.propagation.walk import op_name
from ..placement import spec_of
from ..types import MeshPlacements, Program
from . import everywhere
from .arguments import Arguments, Changes, placed_on

REPLICATED_SHARE = 0.01  # of a rank's FLOPs; more of them computed replicated is expensive
FEW_FLOPS = 1e9  # of a rank; fewer are never expensive: some microseconds
# replicated FLOPs, and their share, that are warned of without a better placement
MANY_FLOPS, MOST_FLOPS = 1e12, 0.5
MANY_BYTES = 2.0**30  # implicit bytes that are warned of without a better placement
IMPROVEMENT = 0.9  # a better placement needs at most this share of the bytes or the time
TRIES = 6  # placements that are tried for one warning
OPS_TO_SPLIT = 3  # number of ops from the sum with a bias to the split of its result
LARGE_PROGRAM = 2000  # ops; fewer placements are tried in a larger program
SPLITS = {torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default}
Placing = Callable[[Sequence[MeshPlacements]], plan.Plan]


@attrs.frozen(eq=False)
class BetterPlacement:
    """Other placements of arguments (and of the inputs that follow them), with the program's plan
    under them.

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
    """Return warnings about the expensive parts of a plan.

    Args:
        program: the Program.
        chosen: its plan.
        place: returns the plan for other placements of the inputs.
        arguments: how many inputs are arguments of the user.
    """
    graph = program.graph.graph
    warnings = []
    # other placements would take parameters off the stages of a pipeline
    if chosen.stage_axis is None and any(n > 1 for n in chosen.axes.sizes):
        search = _Search(program, chosen, place, arguments)
        if implicit_bytes(chosen, graph) >= WORTH:
            warnings += search.transfers()
        warnings += search.replicated_ops()
    return warnings


@attrs.frozen(eq=False)
class _Search:
    """The search for placements under which a program sends or computes less."""

    program: Program
    chosen: plan.Plan
    place: Placing
    arguments: int  # number of inputs that are arguments of the user

    @property
    def graph(self) -> torch.fx.Graph:
        return self.program.graph.graph

    @functools.cached_property
    def near(self) -> Arguments:
        return Arguments(self.graph, self.chosen, self.arguments)

    def price(self, chosen: plan.Plan) -> PlanPrice:
        """Return the price of a plan, weighed as `sf.auto` does."""
        over = attrs.evolve(chosen, axes=with_hardware_links(chosen.axes))
        return plan_price(over, self.graph, fused_op_cost.in_bytes)

    def transfers(self) -> Iterator[str]:
        """Yield a warning about implicitly sent activations, with a placement that sends fewer."""
        steps = everywhere.implicit_by_size(self.chosen, self.graph)
        if not steps:
            return
        before = implicit_bytes(self.chosen, self.graph)
        splits = [row for row in steps if parts_of_next_split(row[0].node) > 1]
        for step, axis in dict.fromkeys([steps[0], *splits[:1]]):
            better = self.best(
                self.near.nearest(step.node, TRIES),
                axis,
                self.sends_less(before),
                is_sharded=True,
                blocks=parts_of_next_split(step.node),
            )
            if better is not None:
                how_many = "most" if step is steps[0][0] else "many"
                yield self.transfer_warning(step, axis, better, how_many)
                return
        if self.mostly_sends():
            yield self.transfer_warning(*steps[0], None, "most")

    def mostly_sends(self) -> bool:
        """Return whether implicit collectives take longer than all compute of a rank."""
        over = attrs.evolve(self.chosen, axes=with_hardware_links(self.chosen.axes))
        implicit = implicit_price(over, self.graph)
        is_much = implicit_bytes(self.chosen, self.graph) >= MANY_BYTES
        return is_much and implicit > self.price(self.chosen).computed

    def transfer_warning(
        self, step: plan.Sending, axis: int, better: BetterPlacement | None, how_many: str
    ) -> str:
        """Return the warning about one redistribution, with its collective, its bytes and the
        better placement.
        """
        before = implicit_bytes(self.chosen, self.graph)
        kind = next(move.kind for move in step.moves if move.axis == axis)
        name = self.chosen.axes.names[axis]
        got = (
            f"a rank sends {human_bytes(before)} of activations in implicit collectives, "
            f"{how_many} of them by {kind} over {name} for {op_name(step.node)}"
        )
        if better is None:
            got += (
                "; the communication takes longer than the computation, and no other placement of "
                "one argument reduces the communication"
            )
            return self.warning(got, "in_placements=sf.auto", step.node)
        after = implicit_bytes(better.plan, self.graph)
        fix = f"{better}, with which it sends {human_bytes(after)}"
        return self.warning(got, fix, step.node)

    def sends_less(self, before: float) -> Callable[[plan.Plan], bool]:
        """Return a test of plans: are clearly fewer bytes implicit, and no more sent in all?"""
        total = self.price(self.chosen).nbytes

        def sends_less(other: plan.Plan) -> bool:
            after = implicit_bytes(other, self.graph)
            price = self.price(other)
            return after < min(IMPROVEMENT * before, before - WORTH) and price.nbytes < total

        return sends_less

    def replicated_ops(self) -> Iterator[str]:
        """Yield a warning for each axis whose ranks all compute the same ops, with a placement
        that shares them.
        """
        every = sum(flops for _, _, flops in everywhere.local_flops(self.chosen))
        for axis, name in enumerate(self.chosen.axes.names):
            rows = [
                row
                for row in everywhere.local_flops(self.chosen)
                if self.is_replicated(row[0], axis)
            ]
            replicated = sum(flops for _, _, flops in rows)
            if replicated < max(FEW_FLOPS, REPLICATED_SHARE * every):
                continue
            _, node, _ = max(rows, key=lambda row: row[2])
            data = self.near.data(2) if self.near.groups.parameters else []
            near = [*data, *self.near.nearest(node, TRIES)]
            better = self.best(near, axis, self.runs_faster(), is_sharded=False)
            if better is None and replicated < max(MANY_FLOPS, MOST_FLOPS * every):
                continue
            n = self.chosen.axes.sizes[axis]
            share = f"{replicated / every:.0%} of a rank's FLOPs"
            everyone = f"all {n} ranks of {name}"
            most = f"most of them by {op_name(node)}"
            got = f"{share} are computed replicated by {everyone}, {most}"
            if better is None:
                got += ", and no other placement of one argument splits this work"
            yield self.warning(got, str(better or "in_placements=sf.auto"), node)

    def is_replicated(self, step: plan.Apply, axis: int) -> bool:
        """Return whether all ranks of an axis compute the same values in an op."""
        if self.chosen.axes.sizes[axis] == 1:
            return False
        slots = [(slot.value, slot.placements) for slot in (*step.outs, *step.ins)]
        return share_of(slots, self.chosen.axes.sizes, axis) == 1.0

    def runs_faster(self) -> Callable[[plan.Plan], bool]:
        """Return a test of plans: does a rank compute clearly fewer FLOPs, in less time?"""
        now = self.price(self.chosen)
        every = sum(flops for _, _, flops in everywhere.local_flops(self.chosen))

        def runs_faster(other: plan.Plan) -> bool:
            price = self.price(other)
            flops = sum(flops for _, _, flops in everywhere.local_flops(other))
            return flops < (1 - REPLICATED_SHARE) * every and price.total < IMPROVEMENT * now.total

        return runs_faster

    def best(
        self,
        near: Sequence[int],
        axis: int,
        is_better: Callable[[plan.Plan], bool],
        *,
        is_sharded: bool,
        blocks: int = 1,
    ) -> BetterPlacement | None:
        """Plan the program with other placements of one argument; return the fastest that helps,
        or None.

        Args:
            near: the arguments to try.
            axis: on which their placements change.
            is_better: whether a plan is better.
            is_sharded: whether they are sharded on that axis now.
            blocks: as how many equal blocks their dims are viewed, too.
        """
        most = TRIES if len(self.graph.nodes) < LARGE_PROGRAM else 2
        attempts = [
            changes
            for i in dict.fromkeys(near)
            for changes in (
                *self.block_changes(i, near, axis, blocks),
                *self.other_dims(i, axis, is_sharded=is_sharded),
            )
        ]
        best: tuple[PlanPrice, BetterPlacement] | None = None
        for changes in attempts[:most]:
            placed = self.near.with_followers(changes)
            candidate = self.place(
                [placed.get(k, slot.placements) for k, slot in enumerate(self.chosen.ins)]
            )
            price = self.price(candidate)
            is_cheapest = best is None or price.total < best[0].total
            if is_cheapest and is_better(candidate):
                best = price, self.better(changes, candidate)
        return None if best is None else best[1]

    def other_dims(self, i: int, axis: int, *, is_sharded: bool) -> Iterator[Changes]:
        """Yield placements that evenly shard another dim of an argument over an axis."""
        if isinstance(self.chosen.ins[i].placements[axis], str) != is_sharded:
            yield from ({i: marks} for marks in self.near.on_dims(i, axis))

    def block_changes(
        self, i: int, near: Sequence[int], axis: int, blocks: int
    ) -> Iterator[Changes]:
        """Yield an argument in blocks, together with those of its module that are sharded alike,
        such as a weight's bias.
        """
        module = module_path(self.program.in_paths[i])
        neighbours = [k for k in near if module_path(self.program.in_paths[k]) == module]
        size_of = lambda k: self.chosen.ins[k].value.shape[self.chosen.ins[k].placements[axis]]
        for marks in self.block_placements(i, axis, blocks):
            changes = {i: marks}
            for k in neighbours:
                for other in self.block_placements(k, axis, blocks):
                    if size_of(k) == size_of(i):
                        changes[k] = other
            yield changes

    def block_placements(self, i: int, axis: int, blocks: int) -> Iterator[MeshPlacements]:
        """Yield the placement that views the sharded dim as equal blocks and shards each block."""
        slot = self.chosen.ins[i]
        mark = slot.placements[axis]
        n = self.chosen.axes.sizes[axis]
        if blocks == 1 or not isinstance(mark, int):
            return
        size = slot.value.shape[mark]
        is_alone = [*slot.placements].count(mark) == 1
        if is_alone and size and size % (blocks * n) == 0:
            strided = layout.joined(mark, 1, outer=blocks)
            yield placed_on(slot.placements, axis, strided)

    def better(self, changes: Changes, candidate: plan.Plan) -> BetterPlacement:
        """Build the BetterPlacement of some changes, with the specs before and after as text."""
        rows = []
        for i, marks in changes.items():
            slot = self.chosen.ins[i]
            dims = slot.value.dim()
            before = spec_of(slot.placements, dims, self.chosen.axes)
            after = spec_of(marks, dims, self.chosen.axes)
            rows.append((self.program.in_paths[i], repr(before), repr(after)))
        return BetterPlacement(rows, candidate)

    def warning(self, got: str, fix: str, node: torch.fx.Node) -> str:
        """Format a warning with the source line and the module of an op."""
        return problem(self.program.name, got, fix=fix, **origin_of(node))


def module_path(path: str) -> str:
    """Return the path of an argument without its last name."""
    end = max(path.rfind("."), path.rfind("["))
    return path[: max(end, 0)]


def parts_of_split(node: torch.fx.Node) -> int:
    """Return the number of equal parts into which an op splits its input; 1 for other ops."""
    if node.target not in SPLITS:
        return 1
    parts = node.meta["val"]
    return 1 if len({tuple(x.shape) for x in parts}) > 1 else len(parts)


def parts_of_next_split(node: torch.fx.Node) -> int:
    """Return the number of equal parts into which an op, or one of the next ops, splits a value."""
    nodes = [node]
    for _ in range(OPS_TO_SPLIT):
        nodes += [user for x in nodes for user in x.users if user not in nodes]
    return next((n for n in map(parts_of_split, nodes) if n > 1), 1)
