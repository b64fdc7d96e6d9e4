"""What a sweep of a large step costs: a Llama of 70 billion parameters on three meshes of 1,024
ranks, with two policies of recomputation, on two kinds of cards: `python -m bench.sweeps`.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner import llama
from shardfn import P
from shardfn.runtime import cache

MESHES = [{"dp": 128, "tp": 8}, {"dp": 256, "tp": 4}, {"dp": 1024, "tp": 1}]
GIB = 2**20  # in the units of getrusage


def step(params: Any, tokens: torch.Tensor, *, remat: str) -> Any:
    """One step of gradient descent on a Llama whose layers are stacked."""
    layer = sf.checkpoint(llama.layer, policy=remat)

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = sf.constrain(params["emb"][tokens], P("dp"))
        x, _ = sf.scan(lambda carry, p: (layer(carry, p), None), x, params["layers"])
        logits = llama.normed(x, params["n"]) @ params["head"]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    value, grads = sf.bucketed_grad(loss)(params, tokens)
    return sf.tree_map(lambda p, g: p - 1e-4 * g, params, grads), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--planner", default="greedy", help="greedy or global")
    given = parser.parse_args()
    where = llama.placements(given.layers, True, P("dp", "tp")), P("dp")
    start, captures = time.perf_counter(), cache.counts["captures"]
    found = sf.sweep(
        step,
        *llama.shapes(given.layers, True),
        meshes=MESHES,
        strategies={"fsdp x tp": where},
        remat=["nothing_saveable", "dots_saveable"],
        hardware=["H100", "H200"],
        planner=given.planner,
    )
    print(found)
    seconds, captures = time.perf_counter() - start, cache.counts["captures"] - captures
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB
    print(f"{len(found.rows)} rows, {captures} captures, {seconds:.0f} s, {peak:.2f} GiB")


if __name__ == "__main__":
    main()
