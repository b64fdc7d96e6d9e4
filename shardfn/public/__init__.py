"""The lazy import of the public names of shardfn. The first use of a public name imports the public
names of the core, because torch.distributed.tensor takes long to import. The first use of a name of
an optional package imports this package.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from types import ModuleType
from typing import Any

PACKAGE = sys.modules[__name__.rpartition(".")[0]]


def attribute(name: str) -> Any:
    """One public name of the package. The first use of a name imports all of the same file: those
    of the core, or those of the rooms over it.
    """
    if name not in public_names():
        text = f"module {PACKAGE.__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=PACKAGE)
    public = _imported("public.names")
    if name not in public:
        public = _of_rooms(name)
    return public[name]


def _of_rooms(name: str) -> dict[str, Any]:
    """The public names of the rooms over the core.

    Raises:
        ImportError: this package lacks a room.
    """
    try:
        return _imported("public.rooms")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{PACKAGE.__name__}."):
            raise
        got = (
            f"{PACKAGE.__name__}.{name} needs {error.name}, which this installation does not "
            "include"
        )
        raise ImportError(got, name=error.name) from error


def _imported(file: str) -> dict[str, Any]:
    """The public names of a file, which are then names of the package too.

    Raises:
        AttributeError: the file is being imported. Python then looks for a module of the name.
    """
    names = module(file)
    if getattr(names.__spec__, "_initializing", False):
        raise AttributeError(f"{names.__name__} is being imported")
    public = {each: getattr(names, each) for each in public_names() if hasattr(names, each)}
    vars(PACKAGE).update(public)
    return public


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


def service(room: str) -> Any:
    """What a room does for the core; None if this package lacks the room."""
    try:
        return module(f"{room}.service").SERVICE
    except ModuleNotFoundError as error:
        if error.name != f"{PACKAGE.__name__}.{room}":
            raise
        return None


errors = module("errors")  # imports torch
extensions = module("extensions")
extensions.serve(extensions.Job, functools.partial(service, "jobs"))
extensions.serve(extensions.Eager, functools.partial(service, "eager"))
extensions.serve(extensions.Digests, functools.partial(service, "proof"))
extensions.serve(extensions.Pictures, functools.partial(service, "pictures"))
extensions.serve(extensions.Reports, functools.partial(service, "reports"))
