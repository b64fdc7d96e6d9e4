"""Indexing by a number that is a tensor, such as the step of a loop, reads and writes what it does
outside of a capture, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import close
from torch import Tensor
from torch.testing import assert_close

import shardfn as sf
from shardfn import P, ShardError

F64 = torch.float64
X = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
K = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
T = torch.tensor(2)
IDS = torch.tensor([0, 3])

READS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "number": lambda x, t: (x[t], x[:, t], x[..., t], x[t, t], x[-t], x[t - 3]),
    "new dim": lambda x, t: (x[t, None], x[None, :, t, None], x[:, None, ..., t]),
    "with indices": lambda x, t: (x[t, IDS], x[IDS, t], x[IDS[:, None], :, t], x[IDS, :, t]),
    "slice": lambda x, t: (x[t : t + 1], x[:, t : t + 3], x[t - 1 : 1 + t, t : t + 2]),
    "multiples": lambda x, t: (x[:, 2 * t : (t + 1) * 2], x[:, t * 3 - 5 : 3 * t + 1 : 3]),
    "small integers": lambda x, t: x[t.to(torch.int32), t.to(torch.int8)],
    "methods": lambda x, t: (x.select(1, t), x.narrow(1, t, 2), x.select(dim=-1, index=t)),
    "functions": lambda x, t: (torch.select(x, 1, t), torch.narrow(x, 1, t, 3)),
    "in turn": lambda x, t: x[t][:, t],
}


def writes(x: Tensor, t: Tensor) -> Tensor:
    x = x.clone()
    x[:, t] = K
    x[t] += 1
    x[:, t : t + 2] *= 2
    x[0, t] -= K[0]
    x[t, t, t] = 7
    x[1:3, t : t + 2, 1:] = x[1:3, :2, 1:].clone()
    x[..., t, None] += K[:, None, :1]
    x[t.to(torch.int32)] = 2.5
    x[IDS, t] = K[IDS]
    return x


def cached(x: Tensor, t: Tensor) -> Any:
    """A loop that writes to its own step, and reads by others."""

    def step(cache: Tensor, i: Tensor) -> Any:
        cache = cache.clone()
        cache[:, i] = cache[:, i - 1] * K + x[:, i]
        return cache, (cache[:, i : i + 1].sum(), x[t, i])

    return sf.scan(step, torch.zeros_like(x), torch.arange(7))


def counted(x: Tensor, t: Tensor) -> Any:
    def step(carry: Any) -> Any:
        x, i = carry
        x = x.clone()
        x[i, t : t + 2] = x[i, i]
        return x, i + 1

    return sf.while_loop(lambda carry: carry[1] < 5, step, (x, torch.tensor(0)))


def mapped(x: Tensor, t: Tensor) -> Any:
    return sf.vmap(lambda i: (x[i], x[:, i : i + 2], writes(x * i, t)))(torch.arange(3))


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **READS,
    "writes": writes,
    "cached": cached,
    "counted": counted,
    "mapped": mapped,
}


def python(fn: Callable[..., Any], t: Tensor) -> Any:
    """The program outside of a capture."""
    if fn is mapped:
        rows = [(X[i], X[:, i : i + 2], writes(X * i, t)) for i in range(3)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))
    if fn is cached:
        cache, sums, rows = torch.zeros_like(X), [], []
        for i in range(7):
            cache[:, i] = cache[:, i - 1] * K + X[:, i]
            sums.append(cache[:, i].sum())
            rows.append(X[t, i])
        return cache, (torch.stack(sums), torch.stack(rows))
    if fn is counted:
        x = X.clone()
        for i in range(5):
            x[i, t : t + 2] = x[i, i].clone()
        return x, torch.tensor(5)
    return fn(X, t)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_outside(name: str) -> None:
    check(name, "one")


@pytest.mark.parametrize("placed", ["rows", "columns", "both"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_a_mesh_gives_what_it_gives_outside(name: str, placed: str) -> None:
    check(name, placed)


def check(name: str, placed: str) -> None:
    fn = PROGRAMS[name]
    where = {"rows": P("a"), "columns": P(None, "b"), "both": P("a", "b")}
    with sf.fake_world(6):
        if placed == "one":
            run = sf.jit(fn, backend="aten")
        else:
            mesh = sf.make_mesh((2, 3), ("a", "b"))
            run = sf.shard(fn, mesh, (where[placed], P()), backend="aten")
        found = sf.full(run(X, T))
    close(found, python(fn, T))


def test_one_program_serves_every_number() -> None:
    run = sf.jit(lambda x, t: (x[:, t], x[:, t : t + 2], writes(x, t)), backend="aten")
    for t in (0, 1, 2):
        step = torch.tensor(t)
        assert_close(run(X, step), (X[:, t], X[:, t : t + 2], writes(X, step)))


def test_its_derivatives_are_those_of_the_program_outside() -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return (x[t] ** 2).sum() + (x[:, t : t + 2] ** 3).sum() + (writes(x, t) ** 2).sum()

    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x, T), x)
    assert_close(sf.grad(loss)(X, T), wanted)
    along = torch.func.jvp(lambda x: loss(x, T), (X,), (X.cos(),))[1]
    assert_close(sf.jvp(lambda x: loss(x, T), (X,), (X.cos(),))[1], along)


def into_view(x: Tensor, t: Tensor) -> None:
    x[:, t].mul_(2)


def later(x: Tensor, t: Tensor) -> None:
    y = x[t]
    y += 1
    x[t] = x[t] + y


def elsewhere(x: Tensor, t: Tensor) -> None:
    y = x[t].mul_(2)
    x[t - 1] = y


def inside_of_it(x: Tensor, t: Tensor) -> None:
    x[t][0] += 1


def by_list(x: Tensor, t: Tensor) -> None:
    torch._foreach_add_([x[t]], 1.0)


def by_out(x: Tensor, t: Tensor) -> None:
    torch.sqrt(x[0], out=x[t])


@torch.library.custom_op("tests_steps::double", mutates_args=("x",))
def double(x: Tensor) -> None:
    x.mul_(2)


WRITES = (into_view, later, elsewhere, inside_of_it, by_list, by_out)


@pytest.mark.parametrize(
    "write",
    [
        *WRITES,
        lambda x, t: F.relu(x[t], inplace=True),
        lambda x, t: x.select(1, t).zero_(),
        lambda x, t: double(x[t]),
        lambda x, t: x.narrow(1, t, 2).copy_(x[:, :2]),
    ],
)
def test_a_write_into_what_it_reads_is_refused(write: Callable[[Tensor, Tensor], Any]) -> None:
    def fn(x: Tensor, t: Tensor) -> Tensor:
        x = x.clone()
        write(x, t)
        return x

    with pytest.raises(ShardError, match=r"writes in place to x\[t\]"):
        sf.jit(fn, backend="aten")(X, T)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, t: x[:t],
        lambda x, t: x[t:],
        lambda x, t: x[t : 2 * t],
        lambda x, t: x[1 : t + 1],
        lambda x, t: x[::t],
    ],
)
def test_a_slice_whose_size_depends_on_values_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(ShardError, match="the size of the slice depends on a tensor value"):
        sf.jit(fn, backend="aten")(X, T)


@pytest.mark.parametrize("placed", [P("a"), P(None, "a")])
@pytest.mark.parametrize("t", [5, -6])
def test_a_number_out_of_range_is_an_error_and_not_another_element(t: int, placed: Any) -> None:
    for fn in (lambda x, t: x[t], lambda x, t: x[t : t + 4], lambda x, t: x[t - 3 : t]):
        with sf.fake_world(2), pytest.raises(Exception, match="out of range"):
            run = sf.shard(fn, sf.make_mesh((2,), ("a",)), (placed, P()), backend="aten")
            sf.full(run(X, torch.tensor(t if t < 0 else t + 1)))
