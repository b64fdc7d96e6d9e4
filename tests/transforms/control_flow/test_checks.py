"""The checks of scan, cond and while_loop on their functions, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from message import without_line

import shardfn as sf
from shardfn.transforms.control_flow import _checks as checks

F64 = torch.float64
G = torch.Generator().manual_seed(7)
W = torch.randn(3, 3, generator=G, dtype=F64)
Q = torch.randn(5, 3, generator=G, dtype=F64)


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "other numbers of rows": (
        lambda: sf.scan(lambda c, x: (c, x["a"]), W, {"a": Q, "b": W}),
        sf.TreeError,
        "scan(<lambda>): xs['a'] has 5 rows\n  xs['b'] has 3 rows\n  needed: one number of "
        "steps\n  try: give xs whose leaves have the same size of dim 0, or length=",
    ),
    "a scalar has no rows": (
        lambda: sf.scan(lambda c, x: (c, x), W, torch.tensor(1.0)),
        sf.TreeError,
        "scan(<lambda>): xs has no rows, because it is a scalar\n  needed: one number of "
        "steps\n  try: give xs whose leaves have the same size of dim 0, or length=",
    ),
    "no rows and no length": (
        lambda: sf.scan(lambda c, x: (c, None), W),
        sf.TreeError,
        "scan(<lambda>): neither xs nor length is given\n  needed: one number of steps\n  "
        "try: give xs whose leaves have the same size of dim 0, or length=",
    ),
    "another length": (
        lambda: sf.scan(lambda c, x: (c, None), W, Q, length=4),
        sf.TreeError,
        "scan(<lambda>): xs has 5 rows\n  length is 4\n  needed: one number of steps\n  try: "
        "give xs whose leaves have the same size of dim 0, or length=",
    ),
    "a carry that is no tensor": (
        lambda: sf.scan(lambda c, x: (c, None), (W, 0), Q),
        sf.TreeError,
        "scan(<lambda>): init[1] is a int, and not a tensor\n  needed: a carry of tensors\n  "
        "try: use torch.tensor(x) for a value that changes from step to step; the function "
        "may close over constants",
    ),
    "a carry that changes its tree": (
        lambda: sf.scan(lambda c, x: ((c[0],), None), (W, W), Q),
        sf.TreeError,
        "scan(<lambda>): carry: the carries that leave lack [1]\n  needed: the same tree\n  "
        "try: return a carry with the same tree as the carry that the function gets",
    ),
    "a carry that changes its type": (
        lambda: sf.scan(lambda c, x: ((c[0].float(), c[1][:2]), None), (W, Q), Q),
        sf.TreeError,
        "scan(<lambda>): carry[0] enters a step as (3, 3) torch.float64, but leaves it as (3, "
        "3) torch.float32\n  carry[1] enters a step as (5, 3) torch.float64, but leaves it as "
        "(2, 3) torch.float64\n  needed: a carry of the same shapes and dtypes in every "
        "step\n  try: cast or reshape the carry before returning it, or start with a carry "
        "like the returned one",
    ),
    "branches that differ": (
        lambda: sf.cond(torch.tensor(True), lambda x: (x, x), lambda x: (x[0], x.float()), W),
        sf.TreeError,
        "cond(<lambda>, <lambda>): result[0]: true_fn returns (3, 3) torch.float64, false_fn "
        "(3,) torch.float64\n  result[1]: true_fn returns (3, 3) torch.float64, false_fn (3, "
        "3) torch.float32\n  needed: branches with the same results\n  try: cast or expand "
        "the result of one branch; use torch.tensor(x) for a number",
    ),
    "branches of other trees": (
        lambda: sf.cond(torch.tensor(True), lambda x: {"a": x}, lambda x: [x], W),
        sf.TreeError,
        "cond(<lambda>, <lambda>): result: the results of false_fn have a list, the "
        "results of true_fn have a dict\n"
        "  needed: branches with the same results\n  try: return the same tree from both branches",
    ),
    "several truths": (
        lambda: sf.cond(Q > 0, torch.sin, torch.cos, Q),
        sf.TreeError,
        "cond(sin, cos), pred: (5, 3) torch.bool\n  needed: a bool, or a tensor with one "
        "element\n  try: use torch.where(pred, a, b), which chooses element by element, or "
        "sf.vmap",
    ),
    "a carry that is written to": (
        lambda: sf.scan(lambda c, x: (c.add_(x), None), Q[0].clone(), Q),
        sf.CaptureError,
        "scan, argument (a carry, a per-step input or a closed-over value): the function "
        "writes to this tensor in place\n  needed: a function without side effects\n  try: "
        "return the new value, or write to a clone(); for the buffers of a module use fn, "
        "params, buffers = sf.functionalize(module), whose fn returns new buffers; with "
        "DTensor parameters pass clones of the buffers to torch.func.functional_call(module, "
        "buffers, args) and return them",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_said(name: str) -> None:
    call, kind, text = REFUSALS[name]
    with pytest.raises(kind) as error:
        call()
    assert without_line(error.value) == text


CHECKS = [
    (lambda: checks.rows_of("f", ("xs",), (((5, 2), F64),), -1), "f, length: length is -1"),
    (
        lambda: checks.rows_of("f", ("xs",), ("float",), None),
        "xs has no rows, because it is not a tensor",
    ),
    (
        lambda: checks.check_carry("f", ("c",), ("NoneType",), True),
        "the carry of the loop holds no tensor, so the loop would never end",
    ),
    (lambda: checks.check_step("f", False, "list"), "the function returns a list"),
    (
        lambda: checks.branch_dtypes("f", ("r",), ("str",), ("str",), ("a",), ("b",)),
        "r: true_fn returns 'a', false_fn 'b'",
    ),
]


@pytest.mark.parametrize(("call", "text"), CHECKS, ids=range(len(CHECKS)))
def test_a_check_names_what_is_wrong(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(sf.TreeError) as caught:
        call()
    assert text in str(caught.value)
