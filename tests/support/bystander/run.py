"""The programs before `import shardfn`, after it, after transforms, and beside captures.

python -m bystander.run NAME ...
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bystander import programs, state
from bystander.programs import W, X, Y, tried

EVERY = {**programs.EAGER, **state.SHARED, **programs.COMPILING}
# torch keeps settings for each thread: another one sees the defaults.
OF_A_THREAD = ("configs",)
# torch.fx traces in one thread at a time, and torch.compile's lock does not cover make_fx.
UNLOCKED = ("make_fx",)
# Two threads that trace at once may also meet in torch, so this phase is run on demand.
RACES = "SHARDFN_BYSTANDER_RACES"
HELD = {
    name: program
    for name, program in EVERY.items()
    if name not in programs.COMPILING and name not in OF_A_THREAD
}
# Python's catch_warnings, which torch uses in both threads, is not safe between threads.
RACED = ("warnings.filters",)
BESIDE = {name: program for name, program in EVERY.items() if name not in (*OF_A_THREAD, *UNLOCKED)}
ALL = {**EVERY, **programs.IN_GROUP, **state.AFTERWARDS}
COMPILED = [name for name in ALL if name in programs.COMPILING or name.endswith(", compiled")]


def answers(table: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What every program of a table answers."""
    return {name: tried(program) for name, program in table.items()}


def in_thread(table: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The same in a thread of its own."""
    result: dict[str, str] = {}
    thread = threading.Thread(target=lambda: result.update(answers(table)), name="bystander")
    thread.start()
    thread.join()
    return result


def transforms(sf: Any) -> list[Callable[[], Any]]:
    """Every kind of transform, of functions that nobody has seen."""
    P = sf.P
    F = torch.nn.functional
    loss = lambda x: (F.gaussian_nll_loss(x, Y, Y) + torch.cov(x).sum()).sum()
    power = lambda x: programs.power(x, 3.0).sum()
    with torch.random.fork_rng():  # its weights are drawn
        module, params, buffers = sf.functionalize(nn.Linear(7, 3).double())

    @sf.custom_vjp
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    tripled.defvjp(lambda x: (x * 3, ()), lambda res, g: (g * 3,))
    calls = [
        lambda: sf.jit(lambda x: loss(x) + 1, backend="aten")(X),
        lambda: sf.jit(lambda x: (x.sin() * 2).sum())(W),  # Inductor
        lambda: sf.grad(loss)(X),
        lambda: sf.grad(power)(W),
        lambda: sf.vmap(lambda x: x.sin())(X),
        lambda: sf.jvp(lambda x: (x * torch.ones(7).view(7)).sum(), (X,), (X,)),
        lambda: sf.hessian(lambda x: (x.sin() * x).sum())(W[:2]),
        lambda: sf.scan(lambda c, x: (c + x.sum(), c * x), W.sum(), X),
        lambda: sf.cond(W.sum() > 0, torch.sin, torch.cos, W),
        lambda: sf.while_loop(lambda x: (x < 9).all(), lambda x: x * 2, W + 1),
        lambda: sf.grad(lambda x: sf.checkpoint(torch.sin)(x).sum())(W),
        lambda: sf.grad(lambda x: tripled(x).sum())(W),
        lambda: sf.grad(lambda p: module(p, buffers, X)[0].sum())(params),
        lambda: sf.jit(lambda a: torch.linalg.lstsq(a.T, W[:, None]).solution, backend="aten")(X),
        lambda: sf.jit(
            lambda x: F.ctc_loss(x.log_softmax(-1), programs.TARGETS, (6, 5), (3, 2)),
            backend="aten",
        )(programs.LOGITS),
        lambda: sf.jit(lambda z: torch.istft(z, 8, 2, window=programs.WINDOW), backend="aten")(
            programs.SPECTRUM
        ),
    ]

    def sharded() -> None:
        with sf.fake_world(4):
            mesh = sf.make_mesh((2, 2), ("a", "b"))
            x = X[:4, :4].contiguous()
            run = sf.shard(sf.grad(lambda x: x.sin().sum()), mesh, P("a", "b"))
            sf.full(run(x))
            inside = lambda x: sf.psum(x.sum(0, keepdim=True), "a")
            mapped = sf.shard_map(inside, mesh, P("a"), P())
            sf.full(sf.jit(mapped, backend="aten")(x))
            step = sf.bucketed_grad(lambda p, x: (x @ p["w"]).sum())
            p = {"w": torch.ones(4, 3, dtype=torch.float64)}
            sf.shard(step, mesh, (None, P("a")), backend="aten")(p, x)

    return [*calls, sharded]


def held(sf: Any) -> list[dict[str, str]]:
    """The programs while a capture stands still: as Dynamo reads, and as its graph is traced."""
    found: list[dict[str, str]] = []

    def look() -> None:
        found.append(in_thread(HELD))

    class Held(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look()
            return x * 2

    fn, params, buffers = sf.functionalize(Held())
    sf.grad(lambda x: fn(params, buffers, x)[0].sum())(W)
    return found


def beside(sf: Any) -> dict[str, str]:
    """The programs in one thread while another captures function after function."""
    found: dict[str, str] = {}
    thread = threading.Thread(target=lambda: found.update(answers(BESIDE)), name="bystander")
    thread.start()
    count = 0
    while thread.is_alive():
        count += 1
        power = lambda x, k=count: (programs.power(x, 3.0) * k).sum()
        sf.grad(power)(W)
        sf.jit(lambda x, k=count: torch.cov(x) * k, backend="aten")(X)
    thread.join()
    return found


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    answers(ALL)  # what torch makes for good at a first use is there from now on
    asked = {name: ALL[name] for name in names}
    result: dict[str, Any] = {"before": answers(asked)}
    import shardfn as sf

    assert sf.jit  # the first public name imports them all
    result["imported"] = answers(asked)
    for call in transforms(sf):
        call()
    races = bool(os.environ.get(RACES))
    if races:
        result["afterwards"] = answers(asked)
    result["as Dynamo reads"], result["as its graph is traced"] = held(sf)[:2]
    if races:
        result["beside captures"] = beside(sf)
    result["at last"] = answers(asked)
    for phase in ("beside captures", "at last"):
        for name in RACED:
            result.get(phase, {}).pop(name, None)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
