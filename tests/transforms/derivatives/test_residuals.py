"""saved_residuals: what a backward keeps, with its bytes, the reason and the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from message import without_line
from worlds import simulated

import shardfn as sf
from shardfn.transforms import Residual

X, W = torch.ones(4, 3), torch.ones(3, 5)
CONSTANT = torch.arange(5.0)


def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = sf.checkpoint_name(x @ params["w"], "h")
    return (h.sin() * CONSTANT).exp()


LINES = re.compile(r"# \S+:\d+")


def test_the_table() -> None:
    table = sf.saved_residuals(fn, {"w": W}, X)
    assert (
        LINES.sub("# HERE", str(table))
        == """\
residuals of fn: 5 values, 288 B, of which 160 B were computed
  f32[3, 5]                      60 B  argument params['w']
  f32[4, 3]                      48 B  argument x
  f32[5]                         20 B  constant
  f32[4, 5]                      80 B  named 'h'                                    # HERE
  f32[4, 5]                      80 B  output of aten.exp                           # HERE"""
    )
    assert repr(table) == str(table)


def test_a_checkpointed_call_keeps_its_arguments_and_constants() -> None:
    table = sf.saved_residuals(sf.checkpoint(fn), {"w": W}, X)
    assert [r.why for r in table] == ["argument params['w']", "argument x", "constant"]
    assert table.activation_bytes == 0 and table.nbytes == 60 + 48 + 20


def test_records_are_data() -> None:
    table = sf.saved_residuals(fn, {"w": W}, X)
    named = table[3]
    assert (
        isinstance(named, Residual)
        and named == attrs.evolve(named)
        and len({*table}) == len(table) == 5
    )
    assert (named.shape, named.dtype, named.nbytes, named.is_activation) == (
        (4, 5),
        torch.float32,
        80,
        True,
    )
    assert named.source is not None and named.source.startswith(__file__)
    assert (table[0].source, table[0].is_activation) == (None, False)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        named.why = "no"  # type: ignore[misc]


def test_shapes_are_enough() -> None:
    shapes = {"w": sf.ShapeDtype((3, 5))}, sf.ShapeDtype((10**6, 3))
    table = sf.saved_residuals(fn, *shapes)
    assert table.activation_bytes == 2 * 4 * 5 * 10**6


def test_values_that_share_memory_count_once() -> None:
    table = sf.saved_residuals(lambda x: (x.t() * x.t().sin()).sum(), X)
    assert [(r.why, r.nbytes) for r in table] == [("argument x", 48), ("output of aten.sin", 48)]


def test_integers_and_masks_that_are_kept_are_told() -> None:
    table = sf.saved_residuals(lambda x, i: x[i].relu().sum(), X, torch.tensor([0, 2, 2]))
    assert {(r.why, r.dtype) for r in table} >= {("argument i", torch.int64)}
    assert all(r.dtype in (torch.int64, torch.bool, torch.float32) for r in table)


def test_every_floating_result_counts_and_others_do_not() -> None:
    two = lambda x: {"s": x.sin(), "n": (x > 0).sum(), "e": [x.exp()]}
    assert [r.why for r in sf.saved_residuals(two, X)] == ["argument x", "output of aten.exp"]


def test_a_sharded_function_keeps_the_same() -> None:
    with simulated(dp=2) as mesh:
        sharded = sf.shard(fn, mesh, (sf.P(), sf.P("dp")))
        table = sf.saved_residuals(sharded, {"w": W}, X)
    assert [r.why for r in table] == [r.why for r in sf.saved_residuals(fn, {"w": W}, X)]


def test_nothing_is_run_or_kept_of_the_function_itself() -> None:
    made = sf.saved_residuals(lambda x: 2 * x, X)
    assert (
        len(made) == 0
        and str(made) == "residuals of <lambda>: 0 values, 0 B, of which 0 B were computed"
    )


NOTHING: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "argument": (lambda i: i * 1.5, torch.arange(3), "no argument is a floating tensor"),
    "result": (lambda x: x > 0, X, "no result is a floating tensor"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_function_without_a_gradient_is_refused(case: str) -> None:
    function, x, said = NOTHING[case]
    with pytest.raises(sf.CaptureError) as caught:
        sf.saved_residuals(function, x)
    fix = "pass a function with floating-point arguments and results"
    assert (
        without_line(caught.value)
        == f"saved_residuals(<lambda>): {said}\n  needed: at least one\n  try: {fix}"
    )
