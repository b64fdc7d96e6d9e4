"""Warnings of options of mesh axes that nothing in a program uses, at the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from message import without_line
from worlds import simulated

import shardfn as sf
from shardfn import P

ROWS = (torch.ones(2, 4, 8, 4),) * 3
SEQUENCE = P(None, None, "cp")


def fused(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v)


def by_hand(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT).softmax(-1) @ v


def with_dropout(q: Any, k: Any, v: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def in_a_loop(q: Any, k: Any, v: Any) -> Any:
    return sf.scan(lambda x, _: (fused(x, k, v), None), q, None, length=2)[0].sum()


def warned(fn: Callable[..., Any], args: Any, placed: Any, n: int = 2, **options: Any) -> list[Any]:
    """The warnings of two lowerings."""
    with simulated(cp=n) as mesh, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = sf.shard(fn, mesh, placed, backend="aten", **options)
        run.lower(*args)
        run.lower(*args)
    return seen


@pytest.mark.parametrize("fn", [by_hand, with_dropout])
def test_attention_that_is_no_op(fn: Any) -> None:
    (seen,) = warned(fn, ROWS, SEQUENCE, attention={"cp": "ring"})
    assert without_line(seen.message) == (
        f"shard({fn.__name__}), attention: attention={{'cp': 'ring'}} has no effect, because the "
        "program has no attention op\n"
        "  needed: F.scaled_dot_product_attention, on a CPU without dropout; flex_attention, and "
        "attention written as matrix products and a softmax, are other ops\n"
        "  try: no attention= for 'cp'; docs/sequences.md lists what is recognised"
    )
    assert seen.filename == __file__


@pytest.mark.parametrize("fn", [fused, in_a_loop, sf.grad(in_a_loop, (0, 1, 2))])
def test_attention_that_is_one(fn: Any) -> None:
    assert not warned(fn, ROWS, SEQUENCE, attention={"cp": "gather"})


def test_an_axis_of_one_rank_needs_none() -> None:
    assert not warned(by_hand, ROWS, SEQUENCE, n=1, attention={"cp": "ring"})


def of_experts(x: Any, w: Any, ids: Any) -> Any:
    return torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1)


def of_one_expert(x: Any, w: Any, ids: Any) -> Any:
    return x @ w[0] + ids[:, None]


@pytest.mark.parametrize("fn", [of_experts, of_one_expert])
def test_rows_without_a_dispatch(fn: Any) -> None:
    args = torch.ones(8, 4), torch.ones(4, 4, 4), torch.arange(8) % 4
    seen = warned(fn, args, P("cp"), rows={"cp": "1.5x"})
    assert len(seen) == (fn is of_one_expert)
    if seen:
        assert without_line(seen[0].message) == (
            "shard(of_one_expert), rows: rows={'cp': '1.5x'} has no effect, because no tokens are "
            "sent to the ranks of their experts over this axis\n"
            "  needed: tokens that are multiplied by the weights of their experts, with the "
            "weights sharded on their first dim over the axis\n"
            "  try: no rows= for 'cp'; docs/experts.md lists what is recognised"
        )
