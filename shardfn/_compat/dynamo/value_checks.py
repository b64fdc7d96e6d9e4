"""The checks of values in torch.distributions, which a program without values leaves out."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = str(Path(torch.__file__).parent / "distributions")
OF_PARAMETERS = "distribution", "__init__"
OF_SAMPLE = "distribution", "_validate_sample"
OF_BOTH = "distribution", "_all_true_or_runtime_assert"  # in torch 2.15
CHECKS = {  # the file and the function that stop where a value is wrong, and the answer that passes
    OF_PARAMETERS: True,
    OF_SAMPLE: True,
    OF_BOTH: True,
    ("geometric", "__init__"): True,
    ("continuous_bernoulli", "__init__"): True,
    ("wishart", "__init__"): False,
    ("kl", "_kl_binomial_binomial"): False,
}
METHODS = ("all", "any")


def check_passed(frame: types.FrameType | None) -> bool | None:
    """Return the answer with which a torch.distributions value check passes; None outside of
    torch.distributions.
    """
    return _answer(frame, "f_back")


def function_passed(
    call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a function by which a distribution may check values. Parameters are
    not checked where none of their values is known.
    """
    place = _place(tx.f_code)
    name = getattr(function.value, "__name__", "")
    checks = (name, place) in (
        ("is_dependent", OF_PARAMETERS),
        ("_is_all_true", OF_PARAMETERS),
        ("_is_all_true", OF_SAMPLE),
        ("_is_all_true", OF_BOTH),
    )
    return _constant(True) if checks else call(function, tx, args, kwargs)


def method_passed(
    call: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a tensor method by which a distribution may check values."""
    answer = None if name not in METHODS or args or kwargs else _answer(tx, "parent")
    return call(tensor, tx, name, args, kwargs) if answer is None else _constant(answer)


def _answer(frame: Any, caller: str) -> bool | None:
    """Return the answer by which a check passes, itself or through its constraint.

    Args:
        frame: that asks, of Python or of Dynamo.
        caller: its attribute that is the frame around it.
    """
    while frame is not None:
        place = _place(frame.f_code)
        if place is None or place[0] != "constraints":
            return CHECKS.get(place)
        frame = getattr(frame, caller)
    return None


def _place(code: types.CodeType) -> tuple[str, str] | None:
    """Return the file and function name of code in torch.distributions; None elsewhere."""
    file = Path(code.co_filename)
    return (file.stem, code.co_name) if str(file.parent) == FOLDER else None


def _constant(x: bool) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(x)
