"""What the report of a large step costs: a Llama of 70 billion parameters on 1,024 ranks, and a
mixture of experts of the size of DeepSeek-V3 on 2,048: `python -m bench.reports`.
"""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.planner import llama
from bench.planner.llama import normed, turned
from shardfn import P

Tensor = torch.Tensor
GIB = 2**30


def llama_step(params: Any, tokens: Tensor) -> Any:
    """One step of gradient descent on a Llama whose layers are stacked, with recomputation."""
    loss = functools.partial(llama.loss, pinned=P("dp"), remat=True)
    value, grads = sf.bucketed_grad(loss)(params, tokens)
    return sf.tree_map(lambda p, g: p - 1e-4 * g, params, grads), value


def lowered_llama(layers: int = 80, ranks: tuple[int, int] = (128, 8)) -> Any:
    """The step, lowered for rank 0: fully sharded over dp, tensor parallel over tp."""
    where = llama.placements(layers, True, P("dp", "tp"))
    with sf.fake_world(ranks[0] * ranks[1], numerics=False):
        mesh = sf.make_mesh(ranks, ("dp", "tp"))
        step = sf.shard(llama_step, mesh, (where, P("dp")), (where, P()), planner="greedy")
        return step.lower(*llama.shapes(layers, True))


# DeepSeek-V3: width, layers, heads, features of a head, ranks of the compressed queries and keys,
# experts, experts of a token, features of an expert, words
WIDTH, LAYERS, HEADS, HEAD, LATENT_Q, LATENT = 7168, 58, 128, 128, 1536, 512
EXPERTS, CHOSEN, INNER, WORDS = 256, 8, 2048, 129280


def attended(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """Attention whose queries, keys and values are made from compressed ones. (B, T, D)"""
    split = lambda y: y.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
    q = split(x @ p["q_down"] @ p["q_up"])
    latent = x @ p["kv_down"]
    k, v = split(latent @ p["k_up"]), split(latent @ p["v_up"])
    out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ p["o"]


def experts(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    """A shared expert, and the chosen ones of each row. (rows, D)"""
    scores, places = (x @ p["router"]).float().sigmoid().topk(CHOSEN, -1)
    scores = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
    expert, order = places.reshape(-1).sort()
    ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
    rows = x[order // CHOSEN]
    gate, up = (torch._grouped_mm(rows, p[name], offs=ends) for name in ("gate", "up"))
    made = torch._grouped_mm(F.silu(gate) * up, p["down"], offs=ends)
    weighted = made * scores.reshape(-1)[order].unsqueeze(1)
    shared = (F.silu(x @ p["s_gate"]) * (x @ p["s_up"])) @ p["s_down"]
    return shared + torch.zeros_like(x).index_add(0, order // CHOSEN, weighted)


def layer(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    x = x + attended(normed(x, p["n1"]), p)
    return x + experts(normed(x, p["n2"]).flatten(0, 1), p).view_as(x)


def expert_loss(params: Any, tokens: Tensor) -> Tensor:
    x = sf.constrain(params["emb"][tokens], P(("dp", "ep")))
    one = sf.checkpoint(layer)
    x, _ = sf.scan(lambda c, p: (one(c, p), None), x, params["layers"])
    logits = normed(x, params["n"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def expert_step(params: Any, tokens: Tensor) -> Any:
    value, grads = sf.bucketed_grad(expert_loss)(params, tokens)
    return sf.tree_map(lambda p, g: p - 1e-4 * g, params, grads), value


def lowered_experts(ranks: tuple[int, int] = (32, 64), batch: int = 4096) -> Any:
    """The step, lowered for rank 0: experts over ep, all else fully sharded over both axes."""
    every = ("dp", "ep")
    one = dict(
        n1=((WIDTH,), P()),
        n2=((WIDTH,), P()),
        q_down=((WIDTH, LATENT_Q), P(every)),
        q_up=((LATENT_Q, HEADS * HEAD), P(None, every)),
        kv_down=((WIDTH, LATENT), P(every)),
        k_up=((LATENT, HEADS * HEAD), P(None, every)),
        v_up=((LATENT, HEADS * HEAD), P(None, every)),
        o=((HEADS * HEAD, WIDTH), P(every)),
        router=((WIDTH, EXPERTS), P()),
        gate=((EXPERTS, WIDTH, INNER), P("ep", None, "dp")),
        up=((EXPERTS, WIDTH, INNER), P("ep", None, "dp")),
        down=((EXPERTS, INNER, WIDTH), P("ep", "dp")),
        s_gate=((WIDTH, INNER), P(None, every)),
        s_up=((WIDTH, INNER), P(None, every)),
        s_down=((INNER, WIDTH), P(every)),
    )
    of = lambda *shape: sf.ShapeDtype(shape, torch.bfloat16)
    stacked = {name: of(LAYERS, *shape) for name, (shape, _) in one.items()}
    layers = {name: P(None, *spec.parts) for name, (_, spec) in one.items()}
    params = dict(emb=of(WORDS, WIDTH), n=of(WIDTH), head=of(WIDTH, WORDS), layers=stacked)
    where = dict(emb=P(None, every), n=P(), head=P(every), layers=layers)
    with sf.fake_world(ranks[0] * ranks[1], numerics=False):
        mesh = sf.make_mesh(ranks, ("dp", "ep"))
        options = dict(planner="greedy", rows={"ep": "1.25x"})
        step = sf.shard(expert_step, mesh, (where, P(every)), (where, P()), **options)
        return step.lower(params, sf.ShapeDtype((batch, 4096), torch.int64))


STEPS: dict[str, Callable[[], Any]] = {"llama": lowered_llama, "experts": lowered_experts}


def main(argv: Sequence[str] | None = None) -> int:
    """Print, for each step, the seconds of its lowering and of its report, and the page's size."""
    parser = argparse.ArgumentParser(prog="python -m bench.reports")
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--path", help="of the page")
    options = parser.parse_args(argv)
    print("| step | lowered in | report in | most memory | page |")
    print("|---|---:|---:|---:|---:|")
    for name, make in STEPS.items():
        if options.only not in (None, name):
            continue
        path = Path(options.path or f"{tempfile.mkdtemp()}/report.html")
        start = time.perf_counter()
        lowered = make()
        took = time.perf_counter() - start
        page = lowered.report(path=path)
        reported = time.perf_counter() - start - took
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        size = path.stat().st_size / 1e6
        print(
            f"| {name} | {took:.1f} s | {reported:.1f} s | {most:.1f} GiB | {size:.2f} MB |",
            flush=True,
        )
        print(page, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
