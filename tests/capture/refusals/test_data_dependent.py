"""Functions whose shapes or steps depend on values: each refused by name, with what to write
instead; and that works.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from versions import needs_torch

import shardfn as sf
from shardfn import P
from shardfn.capture.refusals import data_dependent

X = torch.linspace(-2, 3, 20, dtype=torch.float64).reshape(5, 4)
I = torch.tensor([3, 0, 1, 1, 2])
ROWS = P("a")
STATIC = "torch.nonzero_static(x, size=n), which pads to a size that you choose"
SHAPE, READ = (
    "the shape of {}'s result depends on the values of tensors",
    "{} reads a tensor's value while the function is traced",
)
BRANCH, NUMBER = (
    "the function branches on a tensor's value",
    "uses a tensor's value as a Python number: an index, a size or a count",
)
COUNTED = "torch.bincount(x, minlength=n), where all numbers are below n"
SORTED = "s = torch.sort(x).values; s[1:] != s[:-1] marks where a new value begins"
KEEP = "keep the value a tensor: no .item(), bool() or int()"
INDEX = "x.index_select(dim, i.reshape(1)) or torch.gather; or pass the number as an argument"
Call = Callable[[torch.Tensor, torch.Tensor], Any]

# name: the function, what the error says of it, what it says to try
REFUSED: dict[str, tuple[Call, str, str]] = {
    "nonzero": (lambda x, i: x.nonzero(), SHAPE.format("nonzero"), STATIC),
    "nonzero as tuple": (
        lambda x, i: torch.nonzero(x, as_tuple=True)[0],
        SHAPE.format("nonzero"),
        STATIC,
    ),
    "argwhere": (lambda x, i: torch.argwhere(x), SHAPE.format("argwhere"), STATIC),
    "where": (
        lambda x, i: torch.where(x > 0)[0],
        SHAPE.format("torch.where(condition)"),
        f"torch.where(condition, a, b), or {STATIC}",
    ),
    "mask": (
        lambda x, i: x[x > 0],
        SHAPE.format("x[mask]"),
        f"torch.where(mask, x, 0), x * mask, or {STATIC}",
    ),
    "mask of rows": (
        lambda x, i: x[i > 0],
        SHAPE.format("x[mask]"),
        f"torch.where(mask, x, 0), x * mask, or {STATIC}",
    ),
    "masked_select": (
        lambda x, i: x.masked_select(x > 0),
        SHAPE.format("masked_select"),
        "torch.where(mask, x, 0), or x * mask",
    ),
    "unique": (lambda x, i: torch.unique(i), SHAPE.format("unique"), SORTED),
    "unique counts": (lambda x, i: i.unique(return_counts=True)[1], SHAPE.format("unique"), SORTED),
    "unique rows": (lambda x, i: torch.unique(x, dim=0), SHAPE.format("unique"), SORTED),
    "unique_consecutive": (
        lambda x, i: torch.unique_consecutive(i),
        SHAPE.format("unique_consecutive"),
        "x[1:] != x[:-1], which marks where a new run begins",
    ),
    "bincount": (lambda x, i: torch.bincount(i), SHAPE.format("bincount"), COUNTED),
    "bincount minlength": (
        lambda x, i: torch.bincount(i, minlength=0),
        SHAPE.format("bincount"),
        COUNTED,
    ),
    "repeat_interleave": (
        lambda x, i: torch.repeat_interleave(x, i, dim=0),
        SHAPE.format("repeat_interleave"),
        "repeat_interleave(x, repeats, dim, output_size=n)",
    ),
    "tensor_split": (
        lambda x, i: x.tensor_split(torch.tensor([1, 3]))[0],
        SHAPE.format("tensor_split"),
        "pass a number of sections or a tuple of numbers in place of a tensor of indices",
    ),
    "one_hot": (lambda x, i: F.one_hot(i), SHAPE.format("one_hot"), "one_hot(x, num_classes=n)"),
    "ctc_loss": (
        lambda x, i: torch.ctc_loss(x[:, None], i[:1].reshape(1, 1), i[1:2], i[1:2]),
        SHAPE.format("ctc_loss"),
        "torch.nn.functional.ctc_loss",
    ),
    "pack_padded_sequence": (
        lambda x, i: pack_padded_sequence(x[:, None], i[:1]).data,
        *data_dependent.PACKED,
    ),
    "item": (lambda x, i: x * x.sum().item(), READ.format(".item()"), KEEP),
    "int": (lambda x, i: x * int(i.sum()), READ.format(".item()"), KEEP),
    **{
        f"math.{name}": (
            lambda x, i, name=name: x * getattr(math, name)(x.sum().item()),
            READ.format(f"math.{name}"),
            f"torch.{name} of the tensor itself, without .item(), in place of math.{name}",
        )
        for name in ("exp", "log", "isnan")
    },
    "math of a tensor": (
        lambda x, i: x * math.sqrt(x.sum()),
        READ.format("math.sqrt"),
        "torch.sqrt of the tensor itself, without .item(), in place of math.sqrt",
    ),
    "math that torch has not": (
        lambda x, i: x * math.fsum([x.sum()]),
        READ.format("math.fsum"),
        KEEP,
    ),
    "tolist": (
        lambda x, i: x.sum().tolist(),
        READ.format(".tolist()"),
        "keep the value a tensor, or pass the list as an argument",
    ),
    "torch.Tensor": (
        lambda x, i: torch.Tensor([x.sum(), x.mean()]),
        READ.format("torch.Tensor([x, y])"),
        "torch.stack([x, y])",
    ),
    "torch.FloatTensor": (
        lambda x, i: torch.FloatTensor([x.sum(), x.mean()]),
        READ.format("torch.Tensor([x, y])"),
        "torch.stack([x, y])",
    ),
    "equal": (
        lambda x, i: torch.equal(x, x + 1),
        READ.format("torch.equal"),
        "(a == b).all(), which stays a tensor",
    ),
    "allclose": (
        lambda x, i: x if torch.allclose(x, x) else -x,
        READ.format("allclose"),
        "torch.isclose(a, b).all(), which stays a tensor",
    ),
    "bool": (lambda x, i: x if bool(x.sum()) else -x, BRANCH, "torch.where(condition, a, b)"),
    "if": (lambda x, i: x if x.sum() > 0 else -x, BRANCH, "torch.where(condition, a, b)"),
    "is_nonzero": (
        lambda x, i: x if torch.is_nonzero(x.sum()) else -x,
        BRANCH,
        "torch.where(condition, a, b)",
    ),
    "range": (lambda x, i: sum(x for _ in range(int(i.sum()))), f"the function {NUMBER}", INDEX),
    "size": (lambda x, i: torch.zeros(i.sum()), f"zeros {NUMBER}", INDEX),
    "count": (lambda x, i: x.topk(i[0])[0], f"topk {NUMBER}", INDEX),
}


def run(fn: Callable[..., Any], n: int = 2, placed: Any = ROWS) -> Any:
    with sf.fake_world(n):
        return sf.full(sf.shard(fn, sf.make_mesh((n,), ("a",)), placed, backend="aten")(X, I))


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_function_that_needs_a_value_is_refused_with_what_to_write_instead(name: str) -> None:
    fn, said, fix = REFUSED[name]
    with pytest.raises(sf.CaptureError) as caught:
        run(fn)
    error, text = (caught.value, re.sub(re.escape(__file__) + r":\d+", "HERE", str(caught.value)))
    assert text == (
        f"shard(<lambda>): {said}\n  at: HERE\n  needed: one pure graph of tensor ops\n  try: {fix}"
    )
    first = fn.__code__.co_firstlineno
    assert error.fix == fix and first <= int(error.source.rsplit(":", 1)[1]) <= first + 2, (
        "the line that calls it"
    )


def test_every_row_of_the_table_is_refused_above() -> None:
    texts = {(text, fix) for _, text, fix in REFUSED.values()}
    for problem, call, fix in data_dependent.FUNCTIONS.values():
        assert (problem.format(what=call), fix) in texts


UNSAID = needs_torch("2.13", "it says no more than 'Expected FakeTensor'")


@pytest.mark.parametrize("around", [pytest.param("grad", marks=UNSAID), "vmap"])
def test_they_are_refused_by_name_inside_other_transforms(around: str) -> None:
    fns = {
        "grad": lambda row: lambda x, i: sf.grad(lambda x: row(x).sum())(x),
        "vmap": lambda row: lambda x, i: torch.func.vmap(row)(x),
    }
    for row, said in ((lambda x: x[x > 0], "x[mask]"), (lambda x: x * x.sum().item(), ".item()")):
        with pytest.raises(sf.CaptureError, match=re.escape(said)):
            run(fns[around](row))


def test_a_function_of_math_in_a_module_that_runs_is_refused_by_name() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * math.exp(x.sum())

    fn, params, buffers = sf.functionalize(Scaled())
    with pytest.raises(
        sf.CaptureError, match=re.escape("as float(x), math.exp(x) and torch.")
    ) as caught:
        sf.jit(lambda x: fn(params, buffers, x), backend="aten")(X)
    assert caught.value.fix == (
        "keep the value a tensor: torch.exp(x) in place of math.exp(x), torch.stack([x, y]) in "
        "place of torch.Tensor([x, y])"
    )


def first_of_each(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    s = torch.sort(i).values
    return torch.cat([torch.ones_like(s[:1], dtype=torch.bool), s[1:] != s[:-1]]).sum()


# name: what the errors say to write, and what it stands for
INSTEAD: dict[str, tuple[Call, Call]] = {
    "nonzero": (
        lambda x, i: torch.nonzero_static(x > 1, size=8),
        lambda x, i: torch.nonzero(x > 1),
    ),
    "padded": (
        lambda x, i: torch.nonzero_static(x > 1, size=20, fill_value=-1)[-1],
        lambda x, i: torch.tensor([-1, -1]),
    ),
    "mask": (lambda x, i: torch.where(x > 0, x, 0).sum(), lambda x, i: x[x > 0].sum()),
    "product": (lambda x, i: (x * (x > 0)).sum(), lambda x, i: x.masked_select(x > 0).sum()),
    "assignment": (
        lambda x, i: x.index_put((x > 0,), x.new_tensor(7)),
        lambda x, i: torch.where(x > 0, 7.0, x),
    ),
    "unique": (first_of_each, lambda x, i: torch.tensor(len(i.unique()))),
    "runs": (
        lambda x, i: (i[1:] != i[:-1]).sum() + 1,
        lambda x, i: torch.tensor(len(torch.unique_consecutive(i))),
    ),
    "bincount": (
        lambda x, i: torch.zeros(6, dtype=i.dtype).scatter_add(0, i, torch.ones_like(i)),
        lambda x, i: torch.bincount(i, minlength=6),
    ),
    "one_hot": (
        lambda x, i: F.one_hot(i, num_classes=6).sum(0),
        lambda x, i: torch.bincount(i, minlength=6),
    ),
    "repeat_interleave": (
        lambda x, i: torch.repeat_interleave(x, i, dim=0, output_size=7),
        lambda x, i: torch.repeat_interleave(x, i, dim=0),
    ),
    "tensor_split": (
        lambda x, i: x.tensor_split((1, 3))[1],
        lambda x, i: x.tensor_split(torch.tensor([1, 3]))[1],
    ),
    "torch.Tensor": (
        lambda x, i: torch.stack([x.sum(), x.mean()]),
        lambda x, i: torch.tensor([x.sum(), x.mean()]),
    ),
    "equal": (lambda x, i: (x == x + 0).all(), lambda x, i: torch.tensor(torch.equal(x, x + 0))),
    "allclose": (
        lambda x, i: torch.isclose(x, x + 1).all(),
        lambda x, i: torch.tensor(torch.allclose(x, x + 1)),
    ),
    "branch": (lambda x, i: torch.where(x.sum() > 0, x, -x), lambda x, i: x if x.sum() > 0 else -x),
    "index": (lambda x, i: x.index_select(0, i[1].reshape(1))[0], lambda x, i: x[i[1]]),
    "count_nonzero": (
        lambda x, i: torch.count_nonzero(x > 0),
        lambda x, i: torch.tensor(len(x[x > 0])),
    ),
}


@pytest.mark.parametrize("name", list(INSTEAD))
def test_what_the_errors_say_to_write_works(name: str) -> None:
    instead, meant = INSTEAD[name]
    wanted = meant(X, I)
    for n, placed in ((2, P("a")), (3, P("a")), (3, (P(None, "a"), P())), (2, P())):
        got = run(instead, n, placed)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)
