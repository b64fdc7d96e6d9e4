"""A value of every kind that has a picture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import shardfn as sf
from shardfn import P

NAMES = ("w1", "w3", "w4")


def step(params: Any, batch: Any) -> Any:
    x, y = batch

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            x = torch.tanh(x @ params[name])
        return ((x @ params["w2"] - y) ** 2).mean()

    loss, grads = sf.bucketed_grad(loss_fn, cap="4KB", first_cap="1KB")(params, x)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, Any]:
    params = {name: torch.ones(16, 16) for name in NAMES} | {"w2": torch.ones(16, 4)}
    return params, (torch.ones(30, 16), torch.ones(30, 4))


def lowered(backend: str = "inductor") -> Any:
    """A training step on 2 by 4 ranks."""
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        where = {"w1": P(None, "tp"), "w3": P(), "w4": P(), "w2": P("tp", None)}
        train = sf.shard(step, mesh, (where, P("dp")), backend=backend)
        return train.lower(*arguments())


def explanation() -> Any:
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        where = {"w1": P(None, "tp"), "w3": P(), "w4": P(), "w2": P("tp", None)}
        return sf.explain(sf.shard(step, mesh, (where, P("dp"))), *arguments())


def strategy() -> Any:
    with sf.fake_world(8):
        mesh = sf.make_mesh((8,), ("dp",))
        return sf.strategy("zero3", arguments()[0], mesh)


def stages() -> Any:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("pp", "tp"))
        return sf.strategy("pipeline", arguments()[0], mesh).params


def table() -> Any:
    return sf.placements(arguments()[0], {"w1": P("dp"), "w*": P(None, "tp")})


def placed(x: torch.Tensor, spec: Any) -> Any:
    with sf.fake_world(8):
        return sf.distribute(x, sf.make_mesh((2, 4), ("dp", "tp")), spec)


def terms() -> Any:
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        return sf.from_local(torch.arange(6.0).reshape(2, 3), mesh, [Partial(), Shard(0)])


def large() -> Any:
    with sf.fake_world(1024, numerics=False):
        mesh = sf.make_mesh((128, 8), ("dp", "tp"))
        return sf.distribute(torch.zeros(4096, 1024), mesh, P("dp", "tp"))


def many_blocks() -> Any:
    with sf.fake_world(2):
        return sf.distribute(torch.zeros(1000), sf.make_mesh((2,), ("tp",)), P("tp*100"))


X = torch.arange(30.0)


def swept(memory: str | None = None, hardware: tuple[str, ...] = ("H100", "A100")) -> Any:
    """Strategies on three meshes."""
    strategies = ["ddp", "zero3", "hsdp"]
    meshes = [{"dp": 8}, {"replica": 2, "dp": 4}, {"dp": 2}]
    options = {"memory": memory, "hardware": hardware}
    return sf.sweep(step, *arguments(), meshes=meshes, strategies=strategies, **options)


def pipelined() -> Any:
    """A step in two stages."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("pp",))
        where = ([P(pp=0), P(pp=0), P(pp=1), P(pp=1)], P())
        run = sf.shard(sf.pipelined_grad(loss, 4), mesh, where, backend="aten")
        return run.lower([sf.ShapeDtype((256, 256))] * 4, sf.ShapeDtype((1024, 256)))


EXAMPLES: dict[str, Callable[[], Any]] = {
    "even": lambda: placed(torch.zeros(24, 64), P("dp", "tp")),
    "uneven": lambda: placed(X.reshape(6, 5), P("dp", "tp")),
    "strided": lambda: placed(torch.arange(48.0).reshape(24, 2), P("tp*3", "dp")),
    "zigzag": lambda: placed(torch.arange(16), P(sf.zigzag("tp"))),
    "four dims": lambda: placed(torch.zeros(4, 3, 64, 48), P("dp", None, "tp")),
    "one stage": lambda: placed(torch.ones(4, 6), P("tp", dp=1)),
    "replicated": lambda: placed(X[:4], [Replicate(), Replicate()]),
    "terms": terms,
    "one element": lambda: placed(torch.tensor(-2.5), P()),
    "complex": lambda: placed(torch.tensor([1.25 - 3j, 2]), P("dp")),
    "flags": lambda: placed(torch.tensor([True, False, True]), P("tp")),
    "no element": lambda: placed(torch.zeros(0, 3), P("dp")),
    "large mesh": large,
    "many blocks": many_blocks,
    "table": table,
    "table of stages": stages,
    "strategy": strategy,
    "lowered": lowered,
    "lowered op by op": lambda: lowered("aten"),
    "placements": lambda: lowered().placements,
    "memory": lambda: lowered().memory,
    "time": lambda: lowered().time("A100"),
    "time of a pipeline": lambda: pipelined().time("A100"),
    "explanation": explanation,
    "no collective": lambda: sf.explain(sf.jit(torch.sin), X),
    "bucket plan": lambda: lowered().plan,
    "empty plan": lambda: sf.BucketPlan("f", "(dp=2)"),
    "1F1B": lambda: sf.schedules.one_f_one_b(4, 8),
    "ZBV": lambda: sf.schedules.zbv(3, 5),
    "large schedule": lambda: sf.schedules.one_f_one_b(64, 128),
    "sweep": swept,
    "sweep under a limit": lambda: swept("40KB", ("H200",)),
    "sweep that does not fit": lambda: swept("1KB", ("H200",)),
    "schedule that waits": lambda: sf.Schedule("a<b", [[("BW", 0, 0), ("F", 0, 0)], [("F", 1, 0)]]),
}


@functools.cache
def example(name: str) -> Any:
    """One of the values, made once."""
    return EXAMPLES[name]()


def every() -> Iterator[str]:
    return iter(EXAMPLES)
