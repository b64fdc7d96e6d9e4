"""An index that is out of range raises an error, on every mesh, as it does in torch. Where the
indexed dim is sharded, no rank takes it for an element of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(30.0, dtype=torch.float64).reshape(5, 3, 2)


def set_item(x: Any, i: Any) -> Any:
    y = x.clone()
    y[i] = 0.0
    return y


def wide(i: Any) -> Any:
    return i[:, None, None].expand(len(i), 3, 2)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "x[i]": lambda x, i: x[i],
    "x[i, j]": lambda x, i: x[i, i % 3],
    "select": lambda x, i: x[i[0]],
    "index_select": lambda x, i: x.index_select(0, i),
    "take": lambda x, i: x.take(i * 6),
    "gather": lambda x, i: x.gather(0, wide(i)),
    "embedding": lambda x, i: F.embedding(i, x[:, 0]),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x[:, 0], torch.tensor([0]), mode="sum"),
    "nll_loss": lambda x, i: F.nll_loss(x[:, 0, 0].expand(len(i), 5), i, reduction="none"),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:, 0, 0].expand(len(i), 5), i),
    "x[i] = 0": set_item,
    "scatter": lambda x, i: x.scatter(0, wide(i), 1.0),
    "scatter of a tensor": lambda x, i: x.scatter(0, wide(i), x),
    "scatter_add": lambda x, i: x.scatter_add(0, wide(i), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, wide(i), x, "amax"),
    "index_add": lambda x, i: x.index_add(0, i, x[: len(i)]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[: len(i)]),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), x[0], accumulate=True),
    "one_hot": lambda x, i: F.one_hot(i, 5) @ x[:, 0].long(),
    "bincount": lambda x, i: torch.bincount(i, minlength=5)[:5] * x[:, 0, 0],
}
# ops that torch has for any number
GROW = ("bincount",)


@pytest.mark.parametrize("name", OPS)
def test_an_index_out_of_range_is_an_error_on_a_sharded_dim(name: str) -> None:
    fn = OPS[name]
    with simulated(a=3) as mesh:
        run = sf.shard(fn, mesh, (P("a"), P()))
        inside = torch.tensor([4, 0])
        torch.testing.assert_close(sf.full(run(X, inside)), fn(X, inside))
        for at in ([5, 1], [14, 0], [-6, 2]):
            i = torch.tensor(at)
            if name not in GROW:
                with pytest.raises((IndexError, RuntimeError)):
                    fn(X, i)
            with pytest.raises((IndexError, RuntimeError), match="range|bound"):
                run(X, i)


@pytest.mark.parametrize("name", ["x[i]", "embedding", "scatter_add", "x[i] = 0"])
def test_of_a_dim_that_two_axes_shard(name: str) -> None:
    fn = OPS[name]
    with simulated(a=2, b=2) as mesh:
        run = sf.shard(fn, mesh, (P(("a", "b")), P()))
        inside = torch.tensor([4, 0])
        torch.testing.assert_close(sf.full(run(X, inside)), fn(X, inside))
        with pytest.raises((IndexError, RuntimeError), match="range|bound"):
            run(X, torch.tensor([5, 1]))


@pytest.mark.parametrize("number", [5, -1])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_number_without_a_class_is_an_error(backend: Any, number: int) -> None:
    fn = sf.jit(lambda i: F.one_hot(i, 5), backend=backend)
    with pytest.raises((IndexError, RuntimeError), match="range|bounds"):
        fn(torch.tensor([1, number]))
    assert torch.equal(fn(torch.tensor([[4, 0]])), F.one_hot(torch.tensor([[4, 0]]), 5))
