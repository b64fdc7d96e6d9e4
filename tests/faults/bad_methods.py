"""The methods of what public functions return, for random bad arguments: of stages, transformed
functions, plans, worlds, records of memory and time, strategies, optimizers, loaders.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn import P
from shardfn.hardware import H100

X = torch.ones(4, 3)
W = {"w": torch.ones(3, 3)}
# these would write wherever a bad path says
LEFT_OUT = {"BucketPlan.save", "Compiled.save"}
# what stages call of each other
INNER = {
    *(
        "asked",
        "asking",
        "asking_for",
        "entering",
        "inline",
        "leaving",
        "mesh_of_ranks",
        "on_ranks",
    ),
    *(
        "of_one_rank",
        "options",
        "outermost",
        "placed_so",
        "of_global_tensors",
        "staged",
        "halves",
        "run",
    ),
    *("renumbered", "rows", "links", "cells", "as_constant", "needs"),
}
# parameters that are passed on to functions of one's own
PASSED_ON = {
    ("Optim.schedule", "args"),
    ("Optim.schedule", "options"),
    ("Schedule.step", "metrics"),
}
OPTIM, SCALE, AVERAGE = sf.optim(torch.optim.AdamW, lr=1e-3), sf.loss_scale(), sf.ema(0.9)
# right values of parameters, by their names
GOOD = {
    "kind": "all_reduce",
    "nbytes": 8.0,
    "n": 2,
    "flops": 8.0,
    "dtype": torch.float32,
    "hardware": "H100",
    "params": W,
    "grads": W,
    "index": 0,
    "at": 1,
    "text": "{}",
    "make": torch.optim.lr_scheduler.ConstantLR,
    "stage": 0,
    "finite": torch.tensor(True),
    "rank": 0,
    "where": "mm",
}
STATES = {"Optim": OPTIM.init(W), "LossScale": SCALE.init(), "Ema": AVERAGE.init(W)}


def good_values(name: str) -> dict[str, Any]:
    """A right value for each parameter of a method without a default."""
    return GOOD | {"state": STATES.get(name.split(".", maxsplit=1)[0])}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of parameters and of rows."""
    return ((x @ params["w"]) ** 2).sum()


class Model(torch.nn.Module):
    """A module with a transformed method."""

    @sf.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A value of rows."""
        return x.sum()


def outside() -> list[Any]:
    """Objects that are made outside of worlds."""
    plans = sf.plan(torch.sin, sf.ShapeDtype((4, 3)), meshes=[(2,)])
    return [plans, plans.best, sf.schedules.gpipe(2, 2)]


def objects(mesh: Any) -> list[Any]:
    """An object of each public class that has methods. Runs in a world of 2 ranks."""
    train = sf.shard(sf.bucketed_grad(loss), mesh, (P(), P("dp")), backend="aten")
    lowered = train.lower(W, X)
    decay = OPTIM.schedule(torch.optim.lr_scheduler.StepLR, step_size=2)
    run = sf.inspect_ranks(train, W, X)
    return [
        *(
            train,
            Model.forward,
            Model().forward,
            sf.linearize(torch.sin, X)[1],
            sf.vjp(torch.sin, X)[1],
        ),
        *(train.trace(W, X), lowered, train.compile(W, X), lowered.plan, lowered.memory),
        *(lowered.time("H100"), lowered.schedule, lowered.placements, sf.explain(train, W, X)),
        *(sf.strategy("ddp", W, mesh), sf.saved_residuals(lambda x: loss(W, x), X)),
        *(OPTIM, decay, SCALE, AVERAGE, run, run[0]),
        *(sf.Link(1e-6, 1e9), H100, lowered.collectives[0]),
        *(
            sf.fake_world(2),
            sf.pin(torch.nn.Linear(3, 3), {"": P()}),
            sf.loader([X] * 3, mesh, P("dp")),
        ),
    ]


def names_of(kind: type) -> dict[str, str]:
    """The public methods of a class of ours: their names where they are defined, and here."""
    found = {}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        method = getattr(method, "__func__", method)
        if name.startswith("_") or name in INNER or not inspect.isfunction(method):
            continue
        if len(inspect.signature(method).parameters) == 1:  # itself
            continue
        if method.__module__.startswith("shardfn") and method.__qualname__ not in LEFT_OUT:
            found[method.__qualname__] = name
    return found


def methods(objects: list[Any]) -> dict[str, Callable[..., Any]]:
    """The public methods of objects, bound, by their names where they are defined."""
    return {where: getattr(x, name) for x in objects for where, name in names_of(type(x)).items()}


def returned() -> set[str]:
    """The public methods of all that public functions, and those methods, say to return."""
    left: list[Any] = [getattr(sf, name) for name in sf.__all__]
    seen: set[Any] = set()
    found: set[str] = set()
    while left:
        x = inspect.unwrap(left.pop())
        if _is_ours(x):
            names = names_of(x)
            found |= names.keys()
            left += [getattr(x, name) for name in names.values()]
            left += [row.fget for row in vars(x).values() if isinstance(row, property)]
        words = re.findall(r"\w+", str(getattr(x, "__annotations__", {}).get("return", "")))
        kinds = [getattr(x, "__globals__", {}).get(word) for word in words]
        new = {kind for kind in kinds if _is_ours(kind)} - seen
        seen |= new
        left += new
    return found


def _is_ours(x: Any) -> bool:
    return (
        isinstance(x, type) and x.__module__.startswith("shardfn") and not issubclass(x, Exception)
    )
