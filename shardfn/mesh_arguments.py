"""Checks of the arguments of `make_mesh`, before any communication between processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from .errors import PlacementError


def check_tuples(shape: Any, axis_names: Any) -> None:
    """Check that a shape and axis names are sequences.

    Raises:
        PlacementError: one of them is not a sequence.
    """
    if all(isinstance(x, Sequence) and not isinstance(x, str) for x in (shape, axis_names)):
        return
    fix = "make_mesh((2, 4), ('dp', 'tp'))"
    got = f"shape {shape!r}, axis names {axis_names!r}"
    needed = "a tuple of sizes and a tuple of axis names"
    raise PlacementError.of("make_mesh", got, needed=needed, fix=fix)


def check_shape(shape: tuple[Any, ...], names: tuple[Any, ...]) -> None:
    """Check that the sizes are positive ints, and that each axis has a name of its own.

    Raises:
        PlacementError: they do not.
    """
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in shape):
        raise PlacementError.of("make_mesh", f"shape {shape}", needed="positive ints")
    bad = [n for n in names if not (isinstance(n, str) and n.isidentifier())]
    if bad:
        got, needed = f"axis names {bad}", "names like dp or tp"
        raise PlacementError.of("make_mesh", got, needed=needed)
    if len(shape) != len(names) or len(set(names)) != len(names):
        got, needed = (f"shape {shape}, axis names {names}", "a different name for each axis")
        raise PlacementError.of("make_mesh", got, needed=needed)


def checked_type(device_type: str) -> str:
    """The type of a device.

    Raises:
        PlacementError: torch knows no device type of that name.
    """
    try:
        if torch.device(device_type).index is None:
            return device_type
    except (RuntimeError, TypeError, ValueError, OverflowError):
        pass
    fix = "device_type='cpu' or 'cuda', without a number"
    got = f"device_type is {device_type!r}"
    raise PlacementError.of("make_mesh, device_type", got, needed="a device type", fix=fix)


def refuse_absent(device_type: str) -> None:
    """Refuse a type of device that this machine has none of: torch captures no program for it.

    Raises:
        PlacementError: torch sees no such device.
    """
    if device_type == "meta":
        return
    try:
        is_there = torch.get_device_module(device_type).is_available()
    except RuntimeError:  # no module for it
        is_there = False
    if is_there:
        return
    fix = (
        "device_type='cpu', also in a fake world; `python -m shardfn doctor` lists the devices "
        "that torch finds"
    )
    got = f"torch finds no device of type {device_type!r}"
    raise PlacementError.of("make_mesh, device_type", got, fix=fix)


def checked_timeout(timeout: Any) -> float | None:
    """A timeout in seconds.

    Raises:
        PlacementError: it is not a positive number, nor a timedelta.
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if is_number and 0 < seconds < math.inf:
        return float(seconds)
    needed = "a positive number of seconds, or a timedelta"
    raise PlacementError.of(
        "make_mesh, timeout", f"timeout is {timeout!r}", needed=needed, fix="timeout=60"
    )
