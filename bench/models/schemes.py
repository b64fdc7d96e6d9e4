"""How each model is placed: meshes, and placements of its parameters and of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import shardfn as sf
from shardfn import P

Params = dict[str, torch.Tensor]
Placed = dict[str, P]


def replicated(net: torch.nn.Module, params: Params) -> Placed:
    return {name: P() for name in params}


def fully_sharded(net: torch.nn.Module, params: Params) -> Placed:
    """Every parameter on its first dim."""
    return {name: P("dp") if x.dim() else P() for name, x in params.items()}


def tensor_parallel(net: torch.nn.Module, params: Params) -> Placed:
    """By the model's own plan, if it has one. Otherwise matrices on their last dim, and tensors of
    more dims on their first.
    """
    plan: Any = getattr(net, "tp_plan", None)
    if plan:
        return sf.placements(params, plan, axis="tp")
    dims = {2: P(None, "tp"), 3: P("tp"), 4: P("tp")}
    return {name: dims.get(x.dim(), P()) for name, x in params.items()}


def expert_parallel(net: torch.nn.Module, params: Params) -> Placed:
    """By the model's own plan for experts."""
    plan: Any = net.ep_plan
    return sf.placements(params, plan, axis="ep")


def always(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    return True


def has_experts(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    return bool(getattr(net, "ep_plan", None))


def reads_words(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether all inputs are words: (examples, sequence)."""
    return all(x.dim() == 2 and not x.is_floating_point() for x in inputs)


class Scheme(NamedTuple):
    """A mesh, and where things lie on it. Inputs are sharded over "dp" and "ep", if there are those
    axes, and on their sequence over "cp".
    """

    name: str
    sizes: dict[str, int]
    placed: Callable[[torch.nn.Module, Params], Placed]
    fits: Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], bool] = always

    @property
    def ranks(self) -> int:
        count = 1
        for n in self.sizes.values():
            count *= n
        return count

    def mesh(self) -> Any:
        return sf.make_mesh(tuple(self.sizes.values()), tuple(self.sizes))

    def rows(self, inputs: tuple[torch.Tensor, ...]) -> tuple[P, ...]:
        """Placements of the inputs: of those with a row for each example."""
        over = tuple(axis for axis in ("dp", "ep") if axis in self.sizes)
        batch = P(over or None, *(["cp"] if "cp" in self.sizes else []))
        return tuple(batch if len(x) == len(inputs[0]) else P() for x in inputs)


SCHEMES = (
    Scheme("data parallel", {"dp": 4}, replicated),
    Scheme("fully sharded", {"dp": 4}, fully_sharded),
    Scheme("tp", {"tp": 4}, tensor_parallel),
    Scheme("dp x tp", {"dp": 2, "tp": 2}, tensor_parallel),
    Scheme("5 ranks, uneven", {"dp": 5}, fully_sharded),
    Scheme("dp x ep", {"dp": 2, "ep": 2}, expert_parallel, has_experts),
    Scheme("sequence", {"cp": 4}, replicated, reads_words),
)
PROCESSES = Scheme("2 processes", {"dp": 2}, fully_sharded)
