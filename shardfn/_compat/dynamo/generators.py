"""Calls of a captured function that read or seed a generator of random numbers. Dynamo takes some
of their answers for constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

READS_GENERATOR = "a generator of random numbers is read or seeded"
GENERATORS = (
    torch.manual_seed,
    torch.seed,
    torch.initial_seed,
    torch.get_rng_state,
    torch.set_rng_state,
    torch.random.fork_rng,
    torch.Generator,
    torch.cuda.manual_seed,
    torch.cuda.manual_seed_all,
    torch.cuda.seed,
    torch.cuda.initial_seed,
    torch.cuda.get_rng_state,
    torch.cuda.set_rng_state,
)


def _refuse() -> None:
    """Stop Dynamo with a text that `explained` recognizes."""
    from torch._dynamo import exc

    raise exc.UserError(exc.UserErrorType.ANTI_PATTERN, READS_GENERATOR)


def refused_seed(
    call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """A call of any function, which may be one of a generator, or be given one."""
    called = getattr(function, "fn", None) or getattr(function, "value", None)
    if any(called is fn for fn in GENERATORS) or _is_given("generator", kwargs):
        _refuse()
    return call(function, tx, args, kwargs)


def refused_generator(
    call: Callable[..., Any],
    tensor: Any,
    tx: Any,
    name: str,
    args: Any,
    kwargs: Any,
) -> Any:
    """A call of a tensor's method, which may be given a generator."""
    if _is_given("generator", kwargs):
        _refuse()
    return call(tensor, tx, name, args, kwargs)


def refused_random(*_: Any) -> None:
    """A call of Python's `random`."""
    _refuse()


def _is_given(name: str, kwargs: Any) -> bool:
    """Whether an argument is passed, and is not None."""
    if name not in kwargs:
        return False
    variable = kwargs[name].realize()
    is_constant = variable.is_python_constant()
    return not (is_constant and variable.as_python_constant() is None)
