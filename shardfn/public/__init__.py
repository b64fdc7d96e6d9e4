"""Public names are imported at the first use of one of them: they need torch.distributed.tensor,
which takes longer to import than all else.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
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
    """All public names."""
    names = module("public.names")
    return {each: getattr(names, each) for each in public_names()}


def module(name: str) -> ModuleType:
    """A module of the package, imported. Garbage is not collected meanwhile: imports make none,
    and collecting takes a fifth of their time. Afterwards all objects are old ones, or the next
    collection would read those of the import.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"{PACKAGE.__name__}.{name}")
    finally:
        if was:
            if not gc.get_freeze_count():  # what the user has frozen stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def attributes() -> list[str]:
    """The names that `dir` lists of the package."""
    return sorted({*vars(PACKAGE), *public_names()})


def public_names() -> tuple[str, ...]:
    """`__all__`, and the version."""
    return (*PACKAGE.__all__, "__version__")


errors = module("errors")  # imports torch
