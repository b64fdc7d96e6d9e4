"""A mixture of experts on 2 and 4 real ranks, `make bench-experts`: a global function whose
experts are sharded, per-rank code with sf.ragged_all_to_all, and by hand
torch.distributed.all_to_all_single, the same arithmetic.
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

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import _functional_collectives as functional

import shardfn as sf
from shardfn import P

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 1024, 256, 512, 8, 2  # tokens of a rank
ROUNDS, WARM = 21, 3
ROWS = "1.25x"  # what a rank can take, of the rows that it sends
TARGETS = {"placements": 1.05, "per rank": 1.00}  # of the step by hand
SPECS = {"router": P(), "up": P("ep"), "down": P("ep")}
Step = Callable[[], tuple[float, Sequence[torch.Tensor]]]
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    """The router and all experts, the same on each rank."""
    torch.manual_seed(0)
    return {
        "router": torch.randn(WIDTH, EXPERTS) / WIDTH**0.5,
        "up": torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5,
        "down": torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5,
    }


def routed(w: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the numbers of the experts of each token, (tokens, CHOSEN)."""
    scores, places = (x @ w["router"]).softmax(-1).topk(CHOSEN, -1)
    return scores / scores.sum(-1, keepdim=True), places


def computed(
    w: Weights, rows: torch.Tensor, ends: torch.Tensor, is_row: torch.Tensor | None = None
) -> torch.Tensor:
    """The experts of a rank on bfloat16 rows in their order; ends: of the rows of each. Where rows
    follow the last end, a grouped product leaves memory as it is: `is_row` says where not.
    """
    known = lambda x: x if is_row is None else torch.where(is_row.unsqueeze(1), x, 0.0)
    hidden = torch._grouped_mm(rows, w["up"].bfloat16(), offs=ends)
    made = torch.nn.functional.gelu(known(hidden))
    return known(torch._grouped_mm(made, w["down"].bfloat16(), offs=ends))


def combined(
    x: torch.Tensor, scores: torch.Tensor, order: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Put rows back in the order of the tokens, and add those of each, weighted."""
    weighted = rows.float() * scores.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)


def local_loss(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """The loss of a rank's tokens, with sf.ragged_all_to_all. `up` and `down` are its experts."""
    own, ranks = w["up"].shape[0], sf.axis_size("ep")
    scores, places = routed(w, x)
    expert, order = places.reshape(-1).sort()
    of_each = sf.all_gather(torch.bincount(expert, minlength=EXPERTS), "ep")
    of_each = of_each.view(ranks, ranks, own)  # by sender and receiver
    counts = of_each.sum(2)
    rows, came = sf.ragged_all_to_all(x[order // CHOSEN].bfloat16(), counts, "ep", rows=ROWS)
    from_each = of_each.index_select(1, sf.axis_index("ep").reshape(1)).flatten()
    number = torch.arange(rows.shape[0])
    run = torch.searchsorted(from_each.cumsum(0), number, right=True)
    is_row = number < came.sum()
    by_expert = torch.where(is_row, run % own, own).argsort(stable=True)
    ends = from_each.view(ranks, own).sum(0).cumsum(0).to(torch.int32)
    made = computed(w, rows[by_expert], ends, is_row)
    made = torch.empty_like(made).index_copy(0, by_expert, made)
    back, _ = sf.ragged_all_to_all(made, counts.T, "ep", rows=order.shape[0])
    return sf.pmean(combined(x, scores, order, back).square().mean(), "ep")


def global_loss(w: Weights, x: torch.Tensor) -> torch.Tensor:
    """The loss of all tokens, as on one device."""
    scores, places = routed(w, x)
    expert, order = places.reshape(-1).sort()
    ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
    made = computed(w, x[order // CHOSEN].bfloat16(), ends)
    return combined(x, scores, order, made).square().mean()


def sharded(x: torch.Tensor, loss: Callable[..., torch.Tensor], **options: object) -> Step:
    """A step of shardfn, whose loss is that of all tokens."""
    mesh = sf.make_mesh((dist.get_world_size(),), ("ep",))
    step = sf.shard(sf.value_and_grad(loss), mesh, (SPECS, P("ep")), **options)
    placed = sf.distribute(weights(), mesh, SPECS)
    tokens = sf.from_local(x, mesh, P("ep"))

    def run() -> tuple[float, Sequence[torch.Tensor]]:
        value, gradients = step(placed, tokens)
        own = [gradients[name].to_local() for name in SPECS]
        return value.to_local().item(), own

    return run


def by_hand(x: torch.Tensor) -> Step:
    """The step of torch.distributed, eager: exact split sizes, read on the processor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    own = EXPERTS // size
    w = weights()
    for name in ("up", "down"):
        w[name] = w[name].chunk(size)[rank].clone()
    for p in w.values():
        p.requires_grad_()

    def run() -> tuple[float, Sequence[torch.Tensor]]:
        scores, places = routed(w, x)
        expert, order = places.reshape(-1).sort()
        counts = torch.bincount(expert, minlength=EXPERTS)
        from_each = torch.empty_like(counts)
        dist.all_to_all_single(from_each, counts, group=group)
        send = counts.view(size, own).sum(1).tolist()
        receive = from_each.view(size, own).sum(1).tolist()
        rows = x[order // CHOSEN].bfloat16()
        rows = functional.all_to_all_single_autograd(rows, receive, send, group)
        mine = torch.arange(own).repeat(size).repeat_interleave(from_each)
        by_expert = mine.argsort(stable=True)
        ends = from_each.view(size, own).sum(0).cumsum(0).to(torch.int32)
        made = computed(w, rows[by_expert], ends)
        made = torch.empty_like(made).index_copy(0, by_expert, made)
        back = functional.all_to_all_single_autograd(made, send, receive, group)
        loss = combined(x, scores, order, back).square().mean() / size
        gradients = list(torch.autograd.grad(loss, list(w.values())))
        dist.all_reduce(gradients[0])  # of the router
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item(), gradients

    return run


def on_rank(rank: int, size: int, folder: str, rounds: int) -> None:
    """Time both steps in turn on one rank."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(1 + rank)
    x = torch.randn(TOKENS, WIDTH)
    per_rank = sf.shard_map(local_loss, None, (SPECS, P("ep")), P())
    steps = {
        "placements": sharded(x, global_loss, rows={"ep": ROWS}),
        "per rank": sharded(x, per_rank),
        "by hand": by_hand(x),
    }
    check_equal(steps)
    taken: dict[str, list[float]] = {who: [] for who in steps}
    for k in range(rounds):
        order = [*steps][k % len(steps) :] + [*steps][: k % len(steps)]
        for who in order:
            dist.barrier()
            start = time.perf_counter()
            steps[who]()
            dist.barrier()
            taken[who].append(time.perf_counter() - start)
    if rank == 0:
        times = " | ".join(f"{1e3 * statistics.median(t):.1f}" for t in taken.values())
        ratios = " | ".join(compared(taken, who, target) for who, target in TARGETS.items())
        print(f"| {size} | {times} | {ratios} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def check_equal(steps: dict[str, Step]) -> None:
    """Warm the steps, and assert that their losses and gradients are equal."""
    results = [[step() for _ in range(WARM)][-1] for step in steps.values()]
    *others, (wanted, expected) = results
    for value, gradients in others:
        assert abs(value - wanted) < 1e-5 * abs(wanted), (value, wanted)
        for got, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-6)


def compared(taken: dict[str, list[float]], who: str, target: float) -> str:
    """The time of a step as a part of that by hand in the same round, and whether the target is
    met.
    """
    pairs = zip(taken[who], taken["by hand"], strict=True)
    ratio = statistics.median(own / hand for own, hand in pairs)
    return f"{ratio:.2f} {'met' if ratio <= target else 'missed'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Time the steps on 2 and 4 ranks, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.experts")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(
        f"{EXPERTS} experts of width {WIDTH} and {HIDDEN}, {TOKENS} tokens a rank, {CHOSEN} "
        f"experts each; value and gradient; medians of {args.rounds} rounds, another step first in "
        f"each; ratios in a round; one thread each, {os.cpu_count()} cores"
    )
    print("| ranks | placements ms | per rank ms | by hand ms | placements | per rank |")
    print("|---|---:|---:|---:|---:|---:|")
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(on_rank, (size, folder, args.rounds), size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
