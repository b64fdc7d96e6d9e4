"""Which autograd.Functions communicate, or ask for their rank, by the names in their code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import shardfn as sf
from shardfn.capture.rewrites.function_code import is_of_ranks


def _through_another(x: torch.Tensor) -> torch.Tensor:
    return _reduced(x)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x)
    return x


def _imported(x: torch.Tensor) -> torch.Tensor:
    from torch import distributed

    return x * distributed.get_rank()


def _nested(x: torch.Tensor) -> Any:
    return torch.utils._pytree.tree_map(lambda y: functional.all_reduce(y, "sum", "g"), x)


def _of_a_mesh(ctx: Any, x: torch.Tensor) -> torch.Tensor:
    return x * ctx.mesh.get_local_rank("tp")


def _closed_over() -> Any:
    reduce = dist.all_reduce
    return lambda x: reduce(x)


class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return sf.psum(x, "tp")


OF_RANKS = {
    "a helper": _through_another,
    "an import inside": _imported,
    "a function inside": _nested,
    "a method of what only a run shows": _of_a_mesh,
    "a closed-over collective": _closed_over(),
    "an op": lambda x: torch.ops._c10d_functional.wait_tensor(x),
    "a collective of shardfn": lambda x: sf.psum(x, "tp"),
    "another Function": lambda x: Other.apply(x),
}


def _gathered(ctx: Any, x: torch.Tensor) -> Any:
    ctx.rank = x.dim()
    everything = [y.gather(0, y) for y in x.unbind()]
    return everything, torch.scatter(x, 0, x, x)


def _recursive(x: torch.Tensor) -> torch.Tensor:
    return _recursive(x) if x.dim() else x


LOCAL = {
    "none": lambda x: x.sin(),
    "names of tensors' methods": _gathered,
    "itself": _recursive,
    "a helper without a name": lambda x: missing(x),  # noqa: F821
}


def _function(body: Any) -> Any:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x

        backward = staticmethod(body)

    return Own


@pytest.mark.parametrize("case", OF_RANKS)
def test_names_lead_to_a_collective_or_a_rank(case: str) -> None:
    assert is_of_ranks(_function(OF_RANKS[case]))


@pytest.mark.parametrize("case", LOCAL)
def test_a_function_of_one_tensor_stays_whole(case: str) -> None:
    assert not is_of_ranks(_function(LOCAL[case]))
