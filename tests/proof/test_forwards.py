"""An audit names the first module at which the forward of ranks departs from that of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from tests.proof.catalogue import sequence_parallel, tensor_parallel

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Scaled(nn.Module):
    """Multiplies by a number, which a rank of several may have wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_wrong = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1
        return x * (1 + is_wrong)


def step(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Scaled(), nn.Linear(4, 2)).double()
    F.mse_loss(model(x), y).backward()
    return model


def reduced(x: torch.Tensor, y: torch.Tensor) -> Any:
    r, n = dist.get_rank(), dist.get_world_size()
    model = step(x[r::n], y[r::n])
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    return model


def notes_of(family: Any, name: str) -> str:
    (entry,) = [x for x in family.entry if x.step.__name__ == name]
    found = sf.audit(entry.fault, entry.single, *entry.args, world=entry.world, mesh=entry.mesh)
    return "\n".join(found.notes)


def test_the_module_that_returns_other_values_is_named_with_its_ranks() -> None:
    notes = sf.audit(reduced, step, X, Y, world=2).notes
    assert notes[-1] == (
        "the first module whose output differs is 1 (Scaled), on rank 1; its input equals "
        "that of one device"
    )


class Shifted(nn.Module):
    """Adds what only a rank of several adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (dist.get_rank() if dist.is_initialized() else 0)


class Summed(nn.Module):
    """A product whose terms ranks of several share, and the sum of their terms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = nn.Linear(4, 2, bias=False).double()
        r, n = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.part = nn.Linear(4 // n, 2, bias=False).double()
        self.part.weight = nn.Parameter(whole.weight.detach().chunk(n, 1)[r].clone())
        self.shifted = Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x)
        if dist.is_initialized() and dist.get_world_size() > 1:
            y = SumOfRanks.apply(y)
        return self.shifted(y)


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g


def test_a_term_of_a_sum_over_ranks_is_no_departure() -> None:
    x = torch.cat([X, X[:, :1]], 1)

    def single(x: torch.Tensor) -> Any:
        model = Summed()
        model(x).square().mean().backward()
        return model

    def distributed(x: torch.Tensor) -> Any:
        model = Summed()
        model(x.chunk(dist.get_world_size(), 1)[dist.get_rank()]).square().mean().backward()
        return model

    notes = sf.audit(distributed, single, x, world=2).notes
    assert "output differs is shifted (Shifted), on rank 1" in notes[-1]


@pytest.mark.parametrize(
    ("family", "name", "text"),
    [
        (sequence_parallel, "positions_begin_at_each_part", "whose input differs is kv (Linear)"),
        (sequence_parallel, "a_window_becomes_full_attention", "whose input differs is out"),
        (sequence_parallel, "labels_are_shifted_within_each_part", "the labels differ"),
        (tensor_parallel, "a_bias_is_added_by_every_rank", "whose output differs is Block, on"),
        (tensor_parallel, "ids_of_other_ranks_are_not_masked", "other values is Vocabulary, on"),
    ],
)
def test_faults_of_forwards(family: Any, name: str, text: str) -> None:
    assert text in notes_of(family, name)


def test_a_fault_of_the_backward_names_no_module() -> None:
    notes = notes_of(tensor_parallel, "gradients_of_shards_are_averaged_over_the_world")
    assert notes == "the loss of step 0 is right: the difference is in the backward"


def test_a_script_is_run_again_for_it(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "class Shifted(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + dist.get_rank()\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(3, 4), Shifted(), nn.Linear(4, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(2, 3)).square().mean().backward()\n"
        "for p in model.parameters():\n"
        "    dist.all_reduce(p.grad, dist.ReduceOp.AVG)\n"
        "optimizer.step()\n"
    )
    notes = sf.audit(str(script), None, world=2).notes
    assert "the first module whose output differs is 1 (Shifted), on rank 1" in notes[-1]
