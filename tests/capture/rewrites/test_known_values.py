"""An index whose values are known during the capture has a size that is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn import P

torch.manual_seed(0)
X = torch.randn(4, 3, dtype=torch.float64)
ROWS, COLUMNS = [True, False, True, True], [True, False, True]
Fn = Callable[[torch.Tensor], torch.Tensor]


class Selection(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor(ROWS)]


SELECT = Selection()


def written_before(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[1] = True
    mask[2:] |= True
    return x[mask]


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    view = mask[1:]
    view[0] = True
    return x[mask]


def written_between(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor(COLUMNS)
    other = mask.clone()
    other[0] = False
    return x[:, mask] + x[:, other]


def assigned(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[torch.tensor(ROWS)] = x[:3] * 2
    return y


def multiplied(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, torch.tensor(COLUMNS)] *= x[:, :2]
    return y


KNOWN: dict[str, Fn] = {
    "a list of bools": lambda x: x[ROWS],
    "torch.tensor": lambda x: x[torch.tensor(ROWS)],
    "columns": lambda x: x[:, torch.tensor(COLUMNS)],
    "among other indices": lambda x: x[None, torch.tensor(ROWS), :, None],
    "two indices": lambda x: x[torch.tensor(ROWS), torch.tensor([0, 1, 2])],
    "not": lambda x: x[~torch.tensor(ROWS)],
    "no element": lambda x: x[torch.tensor([False] * 4)],
    "arange": lambda x: x[torch.arange(4) != 1],
    "off the diagonal": lambda x: (x @ x.T)[~torch.eye(4, dtype=torch.bool)].view(4, 3),
    "a triangle": lambda x: x[torch.ones(4, 3, dtype=torch.bool).triu()],
    "nonzero": lambda x: x[torch.tensor(ROWS).nonzero().squeeze(1)],
    "where": lambda x: x[torch.where(torch.tensor(ROWS))[0]],
    "masked_select": lambda x: x.masked_select(torch.tensor(COLUMNS)),
    "masked_select, wider": lambda x: x[0].masked_select(torch.tensor([[*COLUMNS], [True] * 3])),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 0),
    "unique": lambda x: x[:, torch.unique(torch.tensor([2, 0, 2]))],
    "a number": lambda x: x * torch.tensor([3, 4])[1].item(),
    "in a module": SELECT,
    "in a loop": lambda x: sf.map(lambda row: row[torch.tensor(COLUMNS)], x),
    "written before": written_before,
    "written through a view": written_through_a_view,
    "written between": written_between,
    "assigned": assigned,
    "multiplied in place": multiplied,
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_index_of_known_values_is_that_of_torch(name: str) -> None:
    fn = KNOWN[name]
    wanted = torch.stack([row[COLUMNS] for row in X]) if name == "in a loop" else fn(X)
    x = X.clone().requires_grad_()
    value = x[:, COLUMNS] if name == "in a loop" else fn(x)
    (slope,) = torch.autograd.grad(value.sin().sum(), x)
    for backend in ("aten", "inductor"):
        torch.testing.assert_close(sf.jit(fn, backend=backend)(X), wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(sf.grad(lambda x: fn(x).sin().sum())(X), slope, rtol=0, atol=1e-14)
    samples = sf.vmap(fn)(torch.stack([X, X]))
    torch.testing.assert_close(samples, torch.stack([wanted] * 2), rtol=0, atol=1e-14)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        for placements in (P("dp"), P(None, "dp")):
            step = sf.value_and_grad(lambda x: fn(x).sin().sum())
            sharded = sf.shard(step, mesh, in_placements=placements, backend="aten")
            torch.testing.assert_close(
                sf.full(sharded(X)), (wanted.sin().sum(), slope), rtol=0, atol=1e-14
            )


CLOSED_OVER = torch.tensor(ROWS)


def written_by_a_value(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor(ROWS)
    mask[0] = x.sum() > 0
    return x[mask]


def written_by_out(x: torch.Tensor) -> torch.Tensor:
    mask = torch.tensor(COLUMNS)
    torch.gt(x[0], 0, out=mask)
    return x[:, mask]


UNKNOWN: dict[str, Fn] = {
    "closed over": lambda x: x[CLOSED_OVER],
    "written by a value": written_by_a_value,
    "written by out=": written_by_out,
    "a carry": lambda x: sf.scan(lambda c, row: (~c, row[c]), torch.tensor(COLUMNS), x)[1],
    "a sample of vmap": lambda x: sf.vmap(lambda m: x[0][m])(torch.tensor([COLUMNS, COLUMNS])),
    "random": lambda x: x[torch.zeros(4, dtype=torch.int64).random_(0, 2) > 0],
    "drawn like it": lambda x: x[torch.rand_like(torch.tensor([0.5] * 4)) > 0.5],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_index_of_other_values_is_refused(name: str) -> None:
    with pytest.raises(sf.CaptureError, match="result depends on the values of tensors"):
        sf.jit(UNKNOWN[name], backend="aten")(X)


def test_what_a_collective_returns_is_not_known() -> None:
    fn = lambda x: x[:, sf.psum(torch.arange(3), "dp") > 2]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.CaptureError, match="result depends on the values of tensors"):
            sf.shard_map(fn, mesh, (P("dp"),), P("dp"))(X)
