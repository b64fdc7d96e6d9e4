"""What `checkpoint` saves on GPT blocks, and what it costs: residual bytes, peak memory, time
of compiled forward and backward.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

import shardfn as sf
from bench.timing import times
from shardfn import P
from shardfn_demo import gpt

BATCH, CONTEXT, WIDTH, HEADS = 8, 128, 256, 4
BLOCKS, ROUNDS = 4, 15
SAVED, SLOWER = 0.6, 1.4
POLICIES = {
    "checkpoint, nothing kept": sf.checkpoint_policies.nothing_saveable,
    "checkpoint, dots_with_no_batch_dims": sf.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
Step = Callable[[], Any]


def block(layer: Any, h: torch.Tensor) -> torch.Tensor:
    """One block of the demo's GPT: h is (B, T, C)."""
    h = h + gpt.attention(layer, gpt.normed(h, layer["ln1"]), heads=HEADS)
    return h + F.gelu(gpt.normed(h, layer["ln2"]) @ layer["up"]) @ layer["down"]


def loss_fn(layers: Any, h: torch.Tensor, *, through: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Blocks one after the other, and a mean."""
    for layer in layers:
        h = through(layer, h)
    return h.square().mean()


def inputs() -> tuple[Any, torch.Tensor]:
    """Parameters and activations."""
    config = gpt.Config(context=CONTEXT, width=WIDTH, heads=HEADS, layers=BLOCKS)
    h = torch.randn(BATCH, CONTEXT, WIDTH, generator=torch.Generator().manual_seed(1))
    return gpt.init(config)["layers"], h


def ours(
    through: Callable[..., torch.Tensor], mesh: Any, layers: Any, h: torch.Tensor
) -> tuple[Step, Any]:
    """A compiled step on a mesh of one rank, and its lowered program."""
    fn = sf.shard(
        sf.value_and_grad(functools.partial(loss_fn, through=through)), mesh, (P(), P("dp"))
    )
    return (lambda: fn(layers, h)), fn.lower(layers, h)


def eager(through: Callable[..., torch.Tensor], layers: Any, h: torch.Tensor) -> Step:
    """torch's own autograd, as it is."""

    def step() -> Any:
        leaves = sf.tree_map(lambda p: p.detach().requires_grad_(), layers)
        loss = loss_fn(leaves, h, through=through)
        loss.backward()
        return loss.detach(), sf.tree_map(lambda p: p.grad, leaves)

    return step


def theirs(layer: Any, h: torch.Tensor) -> torch.Tensor:
    """A block under torch.utils.checkpoint."""
    return torch.utils.checkpoint.checkpoint(block, layer, h, use_reentrant=False)


def products(lowered: Any) -> int:
    """How many matrix products a program holds."""
    return sum(node.target is torch.ops.aten.mm.default for node in lowered.program.graph.nodes)


def peak(step: Step) -> int:
    """The most bytes that one call allocates and holds at once, as torch's profiler sees it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        kept = step()
    del kept
    held = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def residual_bytes() -> dict[str, int]:
    """What one block keeps: its input and what it computes, without its parameters."""
    (layer, *_), h = inputs()
    kept = lambda fn: sum(
        r.nbytes for r in sf.saved_residuals(fn, layer, h) if not r.why.startswith("argument layer")
    )
    return {
        "kept": kept(block),
        **{name: kept(sf.checkpoint(block, policy=p)) for name, p in POLICIES.items()},
    }


def main() -> None:
    """Measure, check, print."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1
    )
    mesh, (layers, h) = sf.make_mesh((1,), ("dp",)), inputs()
    steps: dict[str, Step] = {}
    counted: dict[str, int] = {}
    for name, through in {
        "kept": block,
        **{n: sf.checkpoint(block, policy=p) for n, p in POLICIES.items()},
    }.items():
        steps[name], lowered = ours(through, mesh, layers, h)
        counted[name] = products(lowered)
    steps["eager, kept"], steps["eager, torch.utils.checkpoint"] = (
        eager(block, layers, h),
        eager(theirs, layers, h),
    )
    wanted = steps["eager, kept"]()
    for name, step in steps.items():
        got = step() if name.startswith("eager") else sf.full(step())
        sf.tree_map(
            functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5), got, wanted
        )
    # of the seven products of a block, the last is of no use to the backward
    assert counted["checkpoint, nothing kept"] == counted["kept"] + 5 * BLOCKS, counted
    assert counted["checkpoint, dots_with_no_batch_dims"] == counted["kept"], counted
    residuals, taken = residual_bytes(), times(steps, ROUNDS)
    print(
        f"{BLOCKS} blocks of B {BATCH}, T {CONTEXT}, C {WIDTH}; medians of {ROUNDS}, "
        "interleaved, processor time of one thread"
    )
    for name, step in steps.items():
        base = "eager, kept" if name.startswith("eager") else "kept"
        kept = residuals.get(name)
        of_block = (
            ""
            if kept is None
            else f"{kept / 2**20:6.2f} MiB a block ({1 - kept / residuals['kept']:4.0%} less)"
        )
        said = f"{taken[name] * 1e3:7.1f} ms ({taken[name] / taken[base]:.2f} x)"
        print(f"{name:<38} {said}  peak {peak(step) / 2**20:6.1f} MiB  {of_block}".rstrip())
    saved = 1 - residuals["checkpoint, nothing kept"] / residuals["kept"]
    slower = taken["checkpoint, nothing kept"] / taken["kept"]
    print(f"saved {saved:.0%} (at least {SAVED:.0%}) at {slower:.2f} x the time (at most {SLOWER})")
    assert saved >= SAVED, saved
    assert slower <= SLOWER, slower


if __name__ == "__main__":
    main()
