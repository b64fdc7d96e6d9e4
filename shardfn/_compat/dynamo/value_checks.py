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
METHODS = {"all": True, "any": False}  # what a check asks of a tensor, and the answer that passes
CHECKS = {  # the file and the function that stop where a value is wrong
    OF_PARAMETERS,
    OF_SAMPLE,
    ("geometric", "__init__"),
    ("continuous_bernoulli", "__init__"),
    ("wishart", "__init__"),
    ("kl", "_kl_binomial_binomial"),
}


def is_check(code: types.CodeType) -> bool:
    """Whether code stops where a parameter or a sample of a distribution is wrong."""
    return _place(code) in (OF_PARAMETERS, OF_SAMPLE)


def function_passed(
    call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Dynamo's call of a function, by which a distribution may check values. Parameters are not
    checked where none of their values is known.
    """
    from torch._dynamo.variables import ConstantVariable

    place = _place(tx.f_code)
    name = getattr(function.value, "__name__", "")
    checks = (name, place) in (
        ("is_dependent", OF_PARAMETERS),
        ("_is_all_true", OF_PARAMETERS),
        ("_is_all_true", OF_SAMPLE),
    )
    return ConstantVariable.create(True) if checks else call(function, tx, args, kwargs)


def method_passed(
    call: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Dynamo's call of a tensor's method, by which a distribution may check values."""
    from torch._dynamo.variables import ConstantVariable

    if name not in METHODS or args or kwargs or not _is_checking(tx):
        return call(tensor, tx, name, args, kwargs)
    return ConstantVariable.create(METHODS[name])


def _is_checking(tx: Any) -> bool:
    """Whether a check runs, itself or by its constraint."""
    while (place := _place(tx.f_code)) and place[0] == "constraints" and tx.parent:
        tx = tx.parent
    return place in CHECKS


def _place(code: types.CodeType) -> tuple[str, str] | None:
    """The file of torch.distributions and the function of code. None elsewhere."""
    file = Path(code.co_filename)
    return (file.stem, code.co_name) if str(file.parent) == FOLDER else None
