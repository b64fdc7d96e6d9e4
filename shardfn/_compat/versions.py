"""The versions of torch that shardfn knows: the only statement of them."""

from __future__ import annotations

import functools
import os
import warnings

import torch

from ..errors import TorchVersionError

OLDEST, NEWEST = (2, 13), (2, 15)
VERSION = "0.1.0"  # of shardfn
ANY = "SHARDFN_ANY_TORCH"  # set to 1, another torch is tried, with a warning


def release(version: str) -> tuple[int, ...]:
    """Parse (major, minor) from a version. () if it is not numeric.

    Example:
        >>> (release("2.13.0+cpu"), release("2.15.0.dev20260101"), release("unknown"))
        ((2, 13), (2, 15), ())
    """
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


RUNNING = release(torch.__version__)


def known() -> str:
    """Format the supported versions for messages.

    Example:
        >>> known()
        '2.13 to 2.15'
    """
    return " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))


def requirement() -> str:
    """Format the supported versions as a pip requirement.

    Example:
        >>> requirement()
        'torch>=2.13,<2.16'
    """
    return f"torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


def fix() -> str:
    """Return the advice that errors give about another version of torch."""
    return f"pip install '{requirement()}', or set {ANY}=1 to try the installed torch"


def is_known() -> bool:
    """Check whether the running torch is a supported version."""
    return OLDEST <= RUNNING <= NEWEST


@functools.cache
def require_known() -> None:
    """Refuse a torch outside of the supported versions, once a process.

    Raises:
        TorchVersionError: it is older or newer, and the user does not want to try.
    """
    if not is_known():
        refuse(f"this is torch {torch.__version__}")


def refuse(problem: str, *more: str) -> None:
    """Raise TorchVersionError about the running torch; warn in place of it if
    SHARDFN_ANY_TORCH=1.

    Args:
        problem: the first reason, to follow "shardfn 0.1.0 knows torch 2.13 to 2.15; ".
        more: a line for each other one.

    Raises:
        TorchVersionError: names the versions, and every reason.
    """
    lines = (
        f"shardfn {VERSION} knows torch {known()}; {problem}",
        *more,
        f"got: torch {torch.__version__}",
        f"needed: torch {known()}; python -m shardfn doctor lists what the installed torch lacks",
        f"try: {fix()}",
    )
    text = "\n  ".join(lines)
    if os.environ.get(ANY) != "1":
        raise TorchVersionError(text, fix=fix())
    warnings.warn(text, stacklevel=2)
