"""A Llama of 70 billion parameters on 1,024 ranks, by scan, with recomputation: layouts beside the
best that is made by hand, and what `sf.auto` chooses beside the textbook.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import attrs

import shardfn as sf
from shardfn import P
from shardfn.hardware import SENT
from shardfn.partition import GLOBAL, propagate
from shardfn.partition.auto import fused_op_cost
from shardfn.partition.planner.plan_price import PlanPrice, plan_price
from shardfn.partition.planner.start_costs import with_hardware_links

from . import chosen, llama

GIB = 2**30
LAYERS = 80
WITHIN = 1.05
BATCHES = (256, 1024)
AUTO = {(128, 8): "80GiB", (1024,): "80GiB"}


def sized(rows: int) -> llama.Sizes:
    """The sizes with so many rows in a batch."""
    return attrs.evolve(llama.SEVENTY, batch=rows)


def price(program: Any, plan: Any) -> PlanPrice:
    """The price of a plan over the links of an H100's nodes."""
    over = attrs.evolve(plan, axes=with_hardware_links(plan.axes))
    return plan_price(over, program.graph.graph, fused_op_cost.in_bytes)


def shown(found: PlanPrice) -> str:
    """A price in GiB and seconds."""
    return f"{found.nbytes / GIB:.1f} GiB, {found.total / SENT:.2f} s"


def planned(rows: int, embedding: P, planner: str, pinned: P | None = None) -> PlanPrice:
    """The price of a step."""
    fn = sf.bucketed_grad(functools.partial(llama.loss, pinned=pinned, remat=True))
    places = (llama.placements(LAYERS, True, embedding), P("dp"))
    with sf.fake_world(1024, numerics=False):
        mesh = sf.make_mesh((128, 8), ("dp", "tp"))
        traced = sf.shard(fn, mesh, places).trace(*llama.shapes(LAYERS, True, sized(rows)))
        plan = propagate(traced.program, *traced.placements(), planner=planner)
    return price(traced.program, plan)


def layouts(every: dict[str, P]) -> None:
    """Print a line for each layout of the embedding and each batch."""
    for rows in BATCHES:
        hand = [planned(rows, place, "greedy", P("dp")) for place in every.values()]
        best = min(hand, key=lambda found: found.total)
        print(f"remat, {rows} rows, by hand: {shown(best)}", flush=True)
        for name, place in every.items():
            found = planned(rows, place, GLOBAL)
            print(f"remat, {rows} rows, emb {name}: {shown(found)}", flush=True)
            assert found.total <= WITHIN * best.total, "dearer than the plan made by hand"


def auto() -> None:
    """Print what `sf.auto` chooses for 256 rows."""
    step = chosen.sgd(functools.partial(llama.loss, remat=True))
    for sizes, memory in AUTO.items():
        with sf.fake_world(1024, numerics=False):
            mesh = sf.make_mesh(sizes, ("dp", "tp")[: len(sizes)])
            start = time.process_time()
            found = sf.shard(step, mesh, sf.auto, memory=memory)
            low = found.lower(*llama.shapes(LAYERS, True, sized(256)))
            seconds = time.process_time() - start
        cost = shown(price(low.traced.program, low.partition))
        peak = low.memory.peak / GIB
        print(f"sf.auto on {sizes} in {memory}: {cost}, peak {peak:.1f} GiB, {seconds:.0f} s")
