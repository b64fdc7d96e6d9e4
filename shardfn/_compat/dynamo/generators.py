"""Calls of a captured function that read or seed a generator of random numbers. Dynamo takes some
of their answers for constants.
"""

from __future__ import annotations

import random
from typing import Any

READS_GENERATOR = "a generator of random numbers is read or seeded"
MODULES = ("torch.random", "torch.cuda.random")


def _refuse() -> None:
    """Stop Dynamo with a text that `explained` recognizes."""
    from torch._dynamo import exc

    raise exc.UserError(exc.UserErrorType.ANTI_PATTERN, READS_GENERATOR)


def seeds(called: Any, kwargs: Any) -> str | None:
    """Refuse a call that reads or seeds a random generator, or that is passed one."""
    is_torchs = getattr(called, "__module__", "") in MODULES
    is_pythons = isinstance(getattr(called, "__self__", None), random.Random)
    is_any = is_torchs or is_pythons or is_given("generator", kwargs)
    return READS_GENERATOR if is_any else None


def refused_random(*_: Any) -> None:
    """Refuse a call of Python's `random`."""
    _refuse()


def numpy_called(call: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch Dynamo's call of a numpy function, which may be one of numpy.random."""
    owner = type(getattr(function.value, "__self__", None))
    module = getattr(function.value, "__module__", None) or owner.__module__
    if module.startswith("numpy.random"):
        _refuse()
    return call(function, *args, **kwargs)


def is_given(name: str, kwargs: Any) -> bool:
    """Return whether an argument is passed and is not None."""
    if name not in kwargs:
        return False
    variable = kwargs[name].realize()
    is_constant = variable.is_python_constant()
    return not (is_constant and variable.as_python_constant() is None)
