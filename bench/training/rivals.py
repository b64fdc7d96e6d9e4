"""Who is timed by `bench.training.steps`: the Llama of examples/train_llama.py through shardfn's
strategies, DDP and FSDP2, with the same AdamW and the same rows on each rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardfn as sf
from shardfn import P
from shardfn.runtime import cache

RANKS = 2
OURS = ("ddp", "zero3")
DDP, DDP_COMPILED = "DDP eager", "DDP compiled"
FSDP, FSDP_COMPILED = "FSDP2 eager", "FSDP2 compiled"
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0
NORMS = "norm.weight"  # the parameters that do not decay end so

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "train_llama.py"


@attrs.frozen(kw_only=True)
class Rival:
    """One way to train, ready to run.

    Args:
        step: forward, backward, reduction and update; returns the loss of this rank's rows, or
            of all rows.
        params: the global parameters as they are now, by name.
        held: bytes that this rank holds between steps: shards, optimizer state, gradients.
        planned: bytes of the peak that the lowered program states; None if there is none.
    """

    step: Callable[[], Tensor]
    params: Callable[[], dict[str, Tensor]]
    held: Callable[[], int]
    planned: int | None = None


def example() -> Any:
    """The module of the example, whose folder is no package."""
    name = "train_llama"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def rows(args: argparse.Namespace, rank: int) -> Tensor:
    """The tokens of one rank, (batch / ranks, context)."""
    windows = example().Windows(args.context)
    tokens = torch.stack([windows[i] for i in range(args.batch)])
    return tokens.chunk(RANKS)[rank].clone()


def layer_bytes(params: dict[str, Tensor]) -> int:
    """The bytes of the parameters of the largest decoder layer."""
    layers: dict[str, int] = {}
    for name, w in params.items():
        head, _, tail = name.partition("layers.")
        if tail:
            number = head + tail.partition(".")[0]
            layers[number] = layers.get(number, 0) + w.nbytes
    return max(layers.values(), default=1)


def local_bytes(tensors: Any) -> int:
    """The bytes that this rank holds of tensors, memory that two share counted once."""
    storages = {}
    for x in tensors:
        local = x.to_local() if isinstance(x, DTensor) else x
        memory = local.untyped_storage()
        storages[memory.data_ptr()] = memory.nbytes()
    return sum(storages.values())


def shardfn_rival(args: argparse.Namespace, rank: int, name: str) -> Rival:
    """The step of the example through one of the strategies.

    A bucket holds one layer where parameters are sharded, as FSDP2 gathers them.
    """
    mesh = sf.make_mesh((RANKS,), ("dp",), device_type="cpu")
    fn, params, buffers = sf.functionalize(example().model(args))
    plan = sf.strategy(name, params, mesh)
    no_decay = {f"**{NORMS}": {"weight_decay": 0.0}}
    adamw = torch.optim.AdamW
    opt = sf.optim(adamw, lr=RATE, weight_decay=DECAY, groups=no_decay)
    where = opt.state_placements(plan.state, params)
    cap = layer_bytes(params)
    caps: dict[str, Any] = {"cap": cap, "first_cap": cap} if name == "zero3" else {}

    def loss_fn(params: Any, tokens: Tensor) -> Tensor:
        out, _ = fn(params, buffers, input_ids=tokens, labels=tokens)
        return out.loss

    def update(params: Any, state: Any, tokens: Tensor) -> Any:
        loss, grads = sf.bucketed_grad(loss_fn, **caps)(params, tokens)
        grads = sf.constrain(grads, plan.grads)
        grads, _ = sf.clip_by_global_norm(grads, CLIP)
        params, state = opt.update(params, grads, state)
        return params, state, loss

    train = sf.shard(
        update,
        mesh,
        in_placements=(plan.params, where, plan.batch),
        out_placements=(plan.params, where, P()),
        donate_argnums=(0, 1),
        backend=args.backend,
    )
    held = [
        sf.distribute(sf.tree_map(torch.clone, params), mesh, plan.params),
        sf.distribute(opt.init(params), mesh, where),
    ]
    batch = sf.from_local(rows(args, rank), mesh, plan.batch)
    lowered = train.lower(*held, batch)
    assert lowered.collectives, f"{name} sends nothing"

    def step() -> Tensor:
        held[0], held[1], loss = train(*held, batch)
        return sf.full(loss)

    def whole() -> dict[str, Tensor]:
        return {key: sf.full(w) for key, w in held[0].items()}

    leaves = lambda: torch.utils._pytree.tree_leaves(held)
    size = lambda: local_bytes(leaves())
    planned = lowered.memory.peak
    return Rival(step=step, params=whole, held=size, planned=planned)


def module_rival(args: argparse.Namespace, rank: int, name: str, compiled: bool) -> Rival:
    """The step through a module, autograd and torch's fused AdamW."""
    module = example().model(args)
    wrap = {"DDP": _ddp, "FSDP2": _fsdp}[name.partition(" ")[0]]
    model = wrap(module, compiled)
    named = list(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [w for key, w in named if not key.endswith(NORMS)]},
        {"params": [w for key, w in named if key.endswith(NORMS)]},
    ]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, RATE, weight_decay=DECAY, fused=True)
    tokens = rows(args, rank)

    def step() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def whole() -> dict[str, Tensor]:
        return {key: sf.full(w.detach()) for key, w in named}

    def held() -> int:
        moments = [
            x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
        ]
        own = local_bytes([w.detach() for _, w in named] + moments)
        is_ddp = isinstance(model, DistributedDataParallel)
        buckets = sum(w.nbytes for _, w in named) if is_ddp else 0
        return own + buckets  # the reducer keeps its buckets

    return Rival(step=step, params=whole, held=held)


def _ddp(module: nn.Module, compiled: bool) -> nn.Module:
    """DDP, whose gradients are views of its buckets."""
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if compiled:
        wrapped.compile(dynamic=False)
    return wrapped


def _fsdp(module: Any, compiled: bool) -> nn.Module:
    """Each layer sharded, and compiled on its own, then what is left."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in module.model.layers:
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def field(
    args: argparse.Namespace, rank: int, only: Sequence[str] | None = None
) -> Iterator[tuple[str, Rival]]:
    """Everyone who races, made one after the other, in the same order on all ranks.

    Args:
        args: of the example.
        rank: whose rows.
        only: names; DDP is always among them, as what others are compared with.
    """
    for name in OURS:
        if not only or name in only:
            yield name, shardfn_rival(args, rank, name)
    for name in (DDP, DDP_COMPILED, FSDP, FSDP_COMPILED):
        if not only or name in only or name == DDP:
            is_compiled = name.endswith("compiled")
            yield name, module_rival(args, rank, name, is_compiled)


def compilations() -> int:
    """How often this process has captured or compiled a graph, for whomever."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return sum(cache.counts.values()) + graphs


def mean_loss(loss: Tensor) -> float:
    """The mean over the ranks of a loss."""
    total = loss.detach().clone().double()
    dist.all_reduce(total)
    return total.item() / RANKS
