"""Public names are imported at the first use of one of them: they need torch.distributed.tensor,
which takes longer to import than all else.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

PACKAGE = sys.modules[__name__.rpartition(".")[0]]


def attribute(name: str) -> Any:
    """One public name of the package. The first use imports them all."""
    if name not in public_names():
        raise AttributeError(f"module {PACKAGE.__name__!r} has no attribute {name!r}")
    public = _imported()
    vars(PACKAGE).update(public)
    return public[name]


def _imported() -> dict[str, Any]:
    """All public names. Garbage is not collected meanwhile: imports make none, and collecting
    takes a fifth of their time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        from . import names
    finally:
        if was:
            gc.enable()
    return {each: getattr(names, each) for each in public_names()}


def attributes() -> list[str]:
    """The names that `dir` lists of the package."""
    return sorted({*vars(PACKAGE), *public_names()})


def public_names() -> tuple[str, ...]:
    """`__all__`, and the version."""
    return (*PACKAGE.__all__, "__version__")
