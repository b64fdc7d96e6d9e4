"""What it costs to place and schedule a large program, `make bench-schedule`: n nodes, a tenth
of them gradients to reduce.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import attrs
import torch

from shardfn import _compat
from shardfn import schedule as passes
from shardfn.buckets import BucketOptions
from shardfn.ops import placement
from shardfn.partition import emit, propagate
from shardfn.types import MeshAxes, Program

SIZES = (1_000, 5_000, 10_000, 20_000, 100_000)  # nodes
SCHEDULED, LIMIT = 10_000, 2.0  # nodes; seconds for their schedule and passes
LINEAR, GROWTH = (
    (1_000, 20_000),
    1.5,
)  # nodes; what a node of the larger program may take, of one of the smaller
AXES = MeshAxes(("dp",), (8,))
ROWS, COLUMNS = 16, 4
aten = torch.ops.aten


@attrs.frozen
class Seconds:
    """What each part took: choosing placements, writing one rank's graph, agreeing on buckets,
    and the passes.
    """

    plan: float
    emit: float
    schedule_plan: float
    passes: float

    @property
    def schedule(self) -> float:
        """Seconds for the schedule and its passes."""
        return self.schedule_plan + self.passes

    @property
    def whole(self) -> float:
        """All parts."""
        return sum(attrs.astuple(self))


def main(argv: Sequence[str] | None = None) -> int:
    """Time the programs, print the table, judge.

    Args:
        argv: `--most N`, `--repeats N`; None reads the command line.

    Returns:
        0 if scheduling stays under its limit and a node's time does not grow with the program,
        1 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.schedule", description="The cost of placing and scheduling."
    )
    parser.add_argument("--most", type=int, default=SIZES[-1], help="nodes of the largest program")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    timed(SIZES[0], 1)  # imports, and torch's own first-time work
    parts = [field.name for field in attrs.fields(Seconds)]
    print("microseconds of processor time a node, and seconds for the whole:")
    print(
        f"{'nodes':>10} {'reductions':>11} "
        + " ".join(f"{part:>9}" for part in (*parts, "whole", "seconds"))
    )
    found: dict[int, Seconds] = {}
    for nodes in (n for n in SIZES if n <= options.most):
        took = found[nodes] = timed(nodes, options.repeats if nodes < SIZES[-1] else 1)
        shares = " ".join(
            f"{1e6 * seconds / nodes:>9.1f}" for seconds in (*attrs.astuple(took), took.whole)
        )
        print(f"{nodes:>10} {reductions(nodes):>11} {shares} {took.whole:>9.2f}", flush=True)
    met, verdicts = judged(found)
    print("\n".join(verdicts))
    return int(not met)


def judged(found: dict[int, Seconds]) -> tuple[bool, list[str]]:
    """Whether the limits are kept by the sizes that were measured, and a line for each.

    Example:
        >>> judged({1_000: Seconds(0.1, 0.1, 0.0, 0.1), 20_000: Seconds(4.0, 4.0, 1.0, 3.0)})
        (False, ['Missed: a node of 20,000 takes 2.00 of one of 1,000; the limit is 1.50.'])
    """
    verdicts: list[tuple[bool, str]] = []
    if SCHEDULED in found:
        took = found[SCHEDULED].schedule
        said = (
            f"{SCHEDULED:,} nodes and {reductions(SCHEDULED):,} reductions are scheduled in "
            f"{took:.2f} s; the limit is {LIMIT:.0f}."
        )
        verdicts.append((took <= LIMIT, said))
    few, many = LINEAR
    if few in found and many in found:
        share = (found[many].whole / many) / (found[few].whole / few)
        verdicts.append(
            (
                share <= GROWTH,
                (
                    f"a node of {many:,} takes {share:.2f} of one of {few:,}; the limit is "
                    f"{GROWTH:.2f}."
                ),
            )
        )
    return all(met for met, _ in verdicts), [
        f"{'Met' if met else 'Missed'}: {said}" for met, said in verdicts
    ]


def reductions(nodes: int) -> int:
    """How many of the nodes are gradients to reduce."""
    return nodes // 10


def in_placements(nodes: int) -> list[tuple[int | str, ...]]:
    """The batch is cut, the parameters are whole."""
    return [(0,), *[("R",)] * reductions(nodes)]


def program(nodes: int) -> Program:
    """A chain of cheap ops on a batch; every tenth node is the gradient of a parameter."""
    graph, mode = torch.fx.Graph(), _compat.FakeTensorMode()
    with mode:
        batch, weight = torch.empty(ROWS, COLUMNS), torch.empty(COLUMNS)
        x = _holder(graph, "batch", batch)
        weights = [_holder(graph, f"w{i}", weight) for i in range(reductions(nodes))]
        aligned = []
        for i, w in enumerate(weights):
            for _ in range(8):
                x = _call(graph, batch, aten.mul.Tensor, x, 0.5)
            gradient = _call(graph, weight, aten.sum.dim_IntList, x, [0])
            wish = BucketOptions(f"w{i}", cap=1600, first_cap=160).text
            aligned.append(
                _call(graph, weight, torch.ops.shardfn.prim_align.default, gradient, w, wish)
            )
        graph.output(aligned)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    names = ("batch", *(f"w{i}" for i in range(len(weights))))
    return Program("chain", module, names, names[1:], (), None, str)


def _holder(graph: torch.fx.Graph, name: str, value: torch.Tensor) -> torch.fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _call(
    graph: torch.fx.Graph, value: torch.Tensor, target: object, *args: object
) -> torch.fx.Node:
    node = graph.call_function(target, args)
    node.meta.update(
        val=value, phase="backward", source="chain.py:1", custom={"gradients": "chain"}
    )
    return node


def timed(nodes: int, repeats: int) -> Seconds:
    """Median processor time of each part, to which other work on the machine adds nothing; what
    the schedule did is checked.
    """
    written, found = program(nodes), list[list[float]]()
    for _ in range(repeats):
        with _compat.paused_gc():  # as `lower` does
            clock = [time.process_time()]
            chosen = propagate(written, AXES, in_placements(nodes), [None] * reductions(nodes))
            clock.append(time.process_time())
            graph = emit(chosen, (0,), ("dp",), "cpu")
            clock.append(time.process_time())
            agreed = passes.plan_schedule(chosen, "chain")
            clock.append(time.process_time())
            done = passes.schedule(graph, agreed)[-1]
            clock.append(time.process_time())
            found.append([end - start for start, end in itertools.pairwise(clock)])
        started = [n.meta["batch"] for n in done.nodes if "collective" in n.meta]
        assert started == list(agreed.starts) and len(started) == len(agreed.plan.buckets) > 1
    return Seconds(*map(statistics.median, zip(*found, strict=True)))


if __name__ == "__main__":
    placement.install()
    raise SystemExit(main())
