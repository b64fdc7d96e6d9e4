"""A Llama of 70 billion parameters on 1024 ranks (dp 128, tp 8), its gradient captured and placed:
one op at a time, at once, and by hand with a constraint after the embedding.

    python -m bench.planner [LAYERS] [--scan]

Then the same by scan, with recomputation, and what `sf.auto` chooses (`dear.py`).

With `--auto`, the placements that `sf.auto` chooses for smaller models instead.
"""

from __future__ import annotations

import argparse
import functools
import time

import shardfn as sf
from shardfn import P
from shardfn.hardware import SENT
from shardfn.partition import GLOBAL, propagate
from shardfn.partition.planner.plan_price import PlanPrice, plan_price

from . import chosen, dear, llama

GIB = 2**30
SLOWEST = 60.0  # seconds of planning
WITHIN = 1.2  # of the plan made by hand
LAYOUTS = {
    'P("tp", "dp")': P("tp", "dp"),
    'P("dp", "tp")': P("dp", "tp"),
    'P(None, "dp")': P(None, "dp"),
    'P(None, ("dp", "tp"))': P(None, ("dp", "tp")),
}


def sent(
    layers: int, stacked: bool, embedding: P, planner: str, pinned: P | None = None
) -> tuple[PlanPrice, float]:
    """The price of a step, and the seconds that placing it takes."""
    fn = sf.bucketed_grad(functools.partial(llama.loss, pinned=pinned))
    places = (llama.placements(layers, stacked, embedding), P("dp"))
    with sf.fake_world(1024):
        mesh = sf.make_mesh((128, 8), ("dp", "tp"))
        traced = sf.shard(fn, mesh, places).trace(*llama.shapes(layers, stacked))
        start = time.process_time()
        plan = propagate(traced.program, *traced.placements(), planner=planner)
        seconds = time.process_time() - start
    return plan_price(plan, traced.program.graph.graph), seconds


def shown(price: PlanPrice) -> str:
    """What a rank sends in a step, and the seconds that this takes."""
    return f"{price.nbytes / GIB:.1f} GiB, {price.sent / SENT:.2f} s,"


def main() -> None:
    """Print a line for each layout of the embedding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layers", type=int, nargs="?", default=80)
    parser.add_argument("--scan", action="store_true", help="stack the layers")
    parser.add_argument("--auto", action="store_true", help="choose placements")
    given = parser.parse_args()
    if given.auto:
        chosen.main()
        return
    layers, stacked = given.layers, given.scan
    hand = [sent(layers, stacked, place, "greedy", P("dp"))[0] for place in LAYOUTS.values()]
    best = min(hand, key=lambda price: price.sent)
    print(f"by hand, the best of {len(LAYOUTS)} layouts: {shown(best)} a step")
    for name, embedding in LAYOUTS.items():
        alone, first = sent(layers, stacked, embedding, "greedy")
        planned, both = sent(layers, stacked, embedding, GLOBAL)
        print(
            f"emb {name}: one op at a time {shown(alone)} planned in {first:.1f} s; "
            f"at once {shown(planned)} planned in {both:.1f} s"
        )
        assert planned.sent <= WITHIN * best.sent, "dearer than the plan made by hand"
        assert both < SLOWEST, "slower than a minute"
    dear.layouts(LAYOUTS)
    dear.auto()


if __name__ == "__main__":
    main()
