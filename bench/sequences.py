"""Causal attention on a sequence over 2 and 4 real ranks, `make bench-sequences`: by placement,
beside a ring by hand with torch.distributed, the same arithmetic.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor.experimental import context_parallel

import shardfn as sf
from shardfn import P

BATCH, HEADS, GROUPS, TOKENS, WIDTH = 1, 8, 4, 2048, 64
ROUNDS, WARM = 21, 3
TARGET = 1.05  # of the ring by hand, of the same layout
aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]
Step = Callable[[], tuple[float, Tensors]]
Shards = Callable[[torch.Tensor], torch.Tensor]


def tensors() -> Tensors:
    """Queries, keys and values of the whole sequence, the same on each rank."""
    torch.manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS)
    return tuple(torch.randn(BATCH, n, TOKENS, WIDTH) for n in heads)


def loss(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mean square of causal attention, with grouped heads."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.square().mean()


def chunk(x: torch.Tensor) -> torch.Tensor:
    """The chunk of this rank."""
    return x.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


def pair(x: torch.Tensor) -> torch.Tensor:
    """The early and the late chunk of this rank, in a zigzag."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(2 * n, 2)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], 2)


def by_placement(of_sequence: Any, way: str) -> Step:
    """The step of shardfn."""
    mesh = sf.make_mesh((dist.get_world_size(),), ("cp",))
    where = P(None, None, of_sequence)
    gradient = sf.value_and_grad(loss, argnums=(0, 1, 2))
    step = sf.shard(gradient, mesh, (where,) * 3, attention={"cp": way})
    placed = sf.distribute(tensors(), mesh, where)

    def run() -> tuple[float, Tensors]:
        value, gradients = step(*placed)
        return value.to_local().item(), tuple(g.to_local() for g in gradients)

    return run


class Around:
    """A tensor on its way from the rank before this one to the next."""

    def __init__(self, x: torch.Tensor) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        self.sent = x  # is read until it has arrived
        self.arrived = torch.empty_like(x)
        sends = dist.P2POp(dist.isend, x, (rank + 1) % n)
        receives = dist.P2POp(dist.irecv, self.arrived, (rank - 1) % n)
        self.work = dist.batch_isend_irecv([sends, receives])

    def wait(self) -> torch.Tensor:
        """The tensor of the rank before."""
        for work in self.work:
            work.wait()
        return self.arrived


@attrs.frozen
class Visible:
    """What a rank sees of the chunk that has arrived: rows of its queries, rows of keys."""

    queries: slice
    keys: slice
    causal: bool = False


def visible(step: int, zigzag: bool) -> Visible | None:
    """What a rank sees in a step; None if nothing."""
    rank, n = dist.get_rank(), dist.get_world_size()
    every, half = slice(None), TOKENS // n // 2
    if step == 0:
        return Visible(every, every, causal=True)
    is_before = (rank - step) % n < rank
    if zigzag:
        early, late = slice(0, half), slice(half, None)
        return Visible(every, early) if is_before else Visible(late, every)
    return Visible(every, every) if is_before else None


class Ring(torch.autograd.Function):
    """Causal attention to keys and values that travel around the ranks, by hand."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, zigzag: bool
    ) -> torch.Tensor:
        n = dist.get_world_size()
        out = torch.zeros_like(query)
        rows = query.new_full(query.shape[:-1], float("-inf"))
        block = torch.stack([key, value])
        for step in range(n):
            coming = Around(block) if step < n - 1 else None
            seen = visible(step, zigzag)
            if seen is not None:
                k, v = block[:, :, :, seen.keys]
                q = query[:, :, seen.queries]
                o, r = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, seen.causal)
                if step == 0:
                    out, rows = o, r
                else:
                    before = rows[:, :, seen.queries]
                    total = torch.logaddexp(before, r)
                    part = out[:, :, seen.queries]
                    part.mul_((before - total).exp_().unsqueeze(-1))
                    part.addcmul_(o, (r - total).exp_().unsqueeze(-1))
                    before.copy_(total)
            if coming is not None:
                block = coming.wait()
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.zigzag = zigzag
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, rows = ctx.saved_tensors
        n = dist.get_world_size()
        block = torch.stack([key, value])
        of_query = torch.zeros_like(query)
        of_block = torch.zeros_like(block)
        with_block = None
        for step in range(n):
            coming = Around(block) if step < n - 1 else None
            seen = visible(step, ctx.zigzag)
            terms = None
            if seen is not None:
                k, v = block[:, :, :, seen.keys]
                part = (x[:, :, seen.queries] for x in (grad, query))
                rest = (x[:, :, seen.queries] for x in (out, rows))
                terms = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *part, k, v, *rest, 0.0, seen.causal
                )
            if with_block is not None:
                of_block = with_block.wait()
            if seen is not None and terms is not None:
                of_query[:, :, seen.queries] += terms[0]
                for mine, term in zip(of_block, terms[1:], strict=True):
                    mine[:, :, seen.keys] += term
            with_block = Around(of_block)  # after the last step: home
            if coming is not None:
                block = coming.wait()
        assert with_block is not None
        return of_query, *with_block.wait(), None


def by_hand(own: Shards, zigzag: bool) -> Step:
    """The ring with torch.distributed, eager."""
    leaves = [own(x).requires_grad_() for x in tensors()]
    count = BATCH * HEADS * TOKENS * WIDTH

    def run() -> tuple[float, Tensors]:
        value = Ring.apply(*leaves, zigzag).square().sum() / count
        gradients = torch.autograd.grad(value, leaves)
        total = value.detach().clone()
        dist.all_reduce(total)
        return total.item(), gradients

    return run


def torchs() -> str:
    """What torch's own context parallel says on these devices."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    leaves = tensors()
    options = {"buffer_seq_dims": [2, 2, 2], "no_restore_buffers": {*leaves}}
    try:
        with context_parallel(mesh, buffers=[*leaves], **options):
            loss(*(x.requires_grad_() for x in leaves)).backward()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"refuses: {type(error).__name__}: {lines[0]}"
    return "runs"


@attrs.frozen
class Layout:
    """A layout of the sequence, the steps by placement for it, and its ring by hand."""

    name: str
    of_sequence: Any
    ways: tuple[str, ...]
    own: Shards


LAYOUTS = (
    Layout("chunks", "cp", ("ring", "gather", "ulysses"), chunk),
    Layout("zigzag", sf.zigzag("cp"), ("ring", "gather"), pair),
)


def on_rank(rank: int, size: int, folder: str, rounds: int) -> None:
    """Time the steps of each layout in turn on one rank."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    for layout in LAYOUTS:
        steps = {way: by_placement(layout.of_sequence, way) for way in layout.ways}
        hand = by_hand(layout.own, layout.name == "zigzag")
        check_equal({"by hand": hand, **steps}, layout.own)
        found = timed({"by hand": hand, **steps}, rounds)
        if rank == 0:
            print_rows(size, layout.name, found)
    dist.barrier()
    dist.destroy_process_group()


def timed(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """The median milliseconds of each step, and of processor time of all ranks together."""
    wall: dict[str, list[float]] = {who: [] for who in steps}
    busy: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(rounds):
        for who, step in steps.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            step()
            own = time.process_time() - used
            dist.barrier()
            wall[who].append(1e3 * (time.perf_counter() - start))
            busy[who].append(1e3 * own)
    found = {}
    for who in steps:
        total = torch.tensor(statistics.median(busy[who]))
        dist.all_reduce(total)
        found[who] = statistics.median(wall[who]), total.item()
    return found


def print_rows(size: int, layout: str, found: dict[str, tuple[float, float]]) -> None:
    """Print the rows of one layout."""
    ms, busy = found["by hand"]
    for way, (own, used) in found.items():
        verdict = ""
        if way == "ring":
            verdict = " met" if own <= TARGET * ms else " missed"
        who = "ring by hand" if way == "by hand" else f"shardfn, {way}"
        ratios = f"{own / ms:.2f}{verdict} | {used:.0f} | {used / busy:.2f}"
        print(f"| {size} | {layout} | {who} | {own:.1f} | {ratios} |", flush=True)


def check_equal(steps: dict[str, Step], own: Shards) -> None:
    """Warm the steps, and assert that their losses and gradients are those of one device."""
    leaves = [x.requires_grad_() for x in tensors()]
    wanted = loss(*leaves)
    expected = [own(g) for g in torch.autograd.grad(wanted, leaves)]
    for who, step in steps.items():
        value, gradients = [step() for _ in range(WARM)][-1]
        assert abs(value - wanted.item()) < 1e-5 * abs(wanted.item()), (who, value, wanted)
        for got, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-8)


def torchs_on_rank(rank: int, size: int, folder: str) -> None:
    """Try torch's own context parallel, in processes of its own, since it changes torch."""
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    answer = torchs()
    if rank == 0:
        print(f"torch's context_parallel on CPU {answer}", flush=True)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps on 2 and 4 ranks, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sequences")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        f"Causal attention of {TOKENS} tokens, {HEADS} heads of queries and {GROUPS} of keys, "
        f"{WIDTH} wide, float32; value and gradient; medians of {args.rounds}, steps in turn, one "
        f"thread each, {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(torchs_on_rank, (2, folder), 2)
    print("| ranks | sequence | step | ms | ratio | processor ms of all ranks | ratio |")
    print("|---|---|---|---:|---:|---:|---:|")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (size, folder, args.rounds), size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
