"""The placements that `sf.auto` chooses for steps of a Llama, a GPT and a mixture of experts on
eight ranks, with and without a limit of memory, beside those that textbooks have.
"""

from __future__ import annotations

import collections
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P
from shardfn_demo import gpt

from . import llama

RANKS = 8
LLAMA = llama.Sizes(512, 4, 1408, 1024, 512, 128, torch.float32)
GPT = gpt.Config(context=128, width=256, layers=2)
TOKENS, EXPERTS, EACH = 8192, 8, 2
MIB = 2**20
PLACEMENT = re.compile(r"P\((?:[^()]|\([^()]*\))*\)")
Loss = Callable[..., torch.Tensor]


def sgd(loss: Loss) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(p: Any, *batch: torch.Tensor) -> Any:
        value, g = sf.value_and_grad(loss)(p, *batch)
        return sf.tree_map(lambda a, b: a - 0.1 * b, p, g), value

    return step


def adamw(loss: Loss) -> Callable[..., Any]:
    """A step of AdamW, whose state is an argument."""
    opt = sf.optim(torch.optim.AdamW, lr=1e-3)

    def step(p: Any, state: Any, *batch: torch.Tensor) -> Any:
        value, g = sf.value_and_grad(loss)(p, *batch)
        return *opt.update(p, g, state), value

    return step


def experts(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer of experts, over tokens sorted by expert."""
    weights, ids = torch.topk(torch.softmax(x @ p["router"], -1), EACH, -1)
    ids, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    h = F.silu(F.grouped_mm(x[order // EACH], p["up"], offs=ends))
    y = F.grouped_mm(h, p["down"], offs=ends) * weights.reshape(-1)[order][:, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0])
    rows = y[places].view(-1, EACH, y.shape[-1]).sum(1)
    return rows.float().square().mean()


@attrs.frozen
class Case:
    """A step, its arguments, and whether memory is limited: to the middle between the peaks of
    data parallelism and of full sharding.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    is_limited: bool = False
    batch: int = 1  # the number of its last arguments that are data


def shapes_of(tree: Any) -> Any:
    """The shapes of a tree of tensors."""
    return sf.tree_map(lambda x: sf.ShapeDtype(tuple(x.shape), x.dtype), tree)


def cases() -> list[Case]:
    """The steps."""
    params = gpt.init(GPT)
    state = shapes_of(sf.optim(torch.optim.AdamW, lr=1e-3).init(params))
    sizes = shapes_of(params)
    batch = lambda n: [sf.ShapeDtype((n, GPT.context), torch.int64)] * 2
    loss = functools.partial(gpt.loss_fn, heads=GPT.heads)
    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    moe = dict(router=of(512, EXPERTS), up=of(EXPERTS, 512, 2048), down=of(EXPERTS, 2048, 512))
    x = of(TOKENS, 512)
    many = llama.shapes(2, False, LLAMA)
    few = llama.shapes(2, False, attrs.evolve(LLAMA, batch=64))
    return [
        Case("Llama, SGD", sgd(llama.loss), many),
        Case("Llama, SGD", sgd(llama.loss), few, True),
        Case("GPT, SGD", sgd(loss), (sizes, *batch(2048)), batch=2),
        Case("GPT, AdamW", adamw(loss), (sizes, state, *batch(64)), True, batch=2),
        Case("experts, SGD", sgd(experts), (moe, x)),
        Case("experts, SGD", sgd(experts), (moe, x), True),
    ]


def row(case: Case) -> str:
    """A line for a step: what is chosen, its peak, its time, and those of textbooks."""
    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS,), ("x",))
        data = (P("x"),) * case.batch
        models = case.args[: -case.batch]
        whole = sf.shard(case.step, mesh, (*(P() for _ in models), *data))
        places = (*(sf.fsdp(x, mesh) for x in models), *data)
        by_hand = [whole.lower(*case.args), sf.shard(case.step, mesh, places).lower(*case.args)]
        most, least = (x.memory.peak for x in by_hand)
        memory = (most + least) // 2 if case.is_limited else None
        start = time.process_time()
        found = sf.shard(case.step, mesh, sf.auto, memory=memory).lower(*case.args)
        seconds = time.process_time() - start
    limit = f"{memory / MIB:.0f} MiB" if memory else "none"
    columns = [case.name, limit, described(found), *map(counted, (found, *by_hand))]
    return f"| {' | '.join(columns)} | {seconds:.0f} |"


def counted(lowered: Any) -> str:
    """The peak and the time of a step."""
    peak = lowered.memory.peak / MIB
    return f"{peak:.0f} MiB, {lowered.time('H100').total * 1e3:.2f} ms"


def described(found: Any) -> str:
    """How many arguments have which placement, and what is sent."""
    text = str(found.placements).splitlines()[2:-1]
    counts: collections.Counter[str] = collections.Counter()
    for line in text:
        parts = line.split()
        place = PLACEMENT.findall(line)[-1]
        counts[place] += int(parts[1])
    kinds = collections.Counter(c.kind for c in found.collectives)
    places = ", ".join(f"{n} `{place}`" for place, n in sorted(counts.items()))
    sent = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return f"{places}; {sent}"


def main() -> None:
    """Print the rows."""
    head = "program | limit | arguments by placement, and what is sent | chosen"
    print(f"| {head} | data parallel | fully sharded | seconds |")
    print("|---|---|---|---|---|---|---|")
    for case in cases():
        print(row(case), flush=True)
