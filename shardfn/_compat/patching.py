"""The record of one patch of torch, how it is entered, and whether this torch has its places."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import attrs

from . import threads, versions

NEVER = "not known"
REFUSE: Literal["refuse"] = "refuse"
DEGRADE: Literal["degrade"] = "degrade"
OR = " or "  # between the names of a place in different versions of torch
SINCE = {  # a place that only later versions of torch have
    "torch._dynamo.variables:TensorVariable.lookup_tp_getset_member": (2, 15),
    "torch._dynamo.variables.misc:ContextVarVariable._get_value": (2, 15),
    "torch.autograd.function:_bind_default_args": (2, 15),
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._restore_spmd_types": (2, 15),
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl": (2, 15),
}
INHERITED = {  # a method, and the class whose method it ends in, before torch 2.15
    "torch._dynamo.variables:UserMethodVariable.call_function": (
        "torch._dynamo.variables:UserFunctionVariable"
    )
}


def methods(owner: str, *names: str) -> tuple[str, ...]:
    """Build the places of methods from their class and names."""
    return tuple(f"{owner}.{name}" for name in names)


def each(new: Callable[..., Any], *places: str) -> dict[str, Callable[..., Any]]:
    """Build a `calls` table that gives several places the same replacement."""
    return dict.fromkeys(places, new)


@attrs.frozen(kw_only=True, eq=False)
class Patch:
    """A patch of torch: one reason, and all places where torch is changed for it.

    A place is "module:attribute", or several of them joined by OR, of which the first that exists
    counts. `calls` replaces functions and methods. A replacement takes the patch's argument if it
    has one, then torch's function, and then the arguments of the call. Only the capturing thread
    calls it (`threads.overridden`). `enter` is a context manager that changes something else.

    Args:
        what: the change, as a noun.
        why: what torch does instead.
        until: the torch version that ends it.
        on_missing: "refuse" if programs would be other without it, "degrade" if they would only be
            slower or their errors less clear.
        lost: what a user loses without it.
        calls: place -> replacement.
        enter: the context manager.
        places: those that `enter` needs.
        takes: the name of its argument of `patched`. None leaves the patch out.
        is_mine: whether a call is to be replaced.
        if_imported: whether it counts only once the user has imported the modules of its places.
    """

    what: str
    why: str
    lost: str
    until: str = NEVER
    on_missing: Literal["refuse", "degrade"] = REFUSE
    calls: Mapping[str, Callable[..., Any]] = types.MappingProxyType({})
    enter: Callable[..., AbstractContextManager[Any]] | None = None
    places: tuple[str, ...] = ()
    takes: str | None = None
    is_mine: Callable[[], bool] = threads.is_capturing
    if_imported: bool = False

    def is_imported(self) -> bool:
        """Check whether the modules of all its places have been imported."""
        places = (*self.calls, *self.places)
        return all(place.partition(":")[0] in sys.modules for place in places)

    def missing(self) -> tuple[str, ...]:
        """List the places that this torch lacks, or has with other arguments."""
        gone = [place for place in self.places if is_due(place) and resolve(place) is None]
        for place, new in self.calls.items():
            if not is_due(place):
                continue
            resolved = resolve(place)
            before = 1 if self.takes is None else 2  # torch's function, and the patch's argument
            if resolved is None or not takes_calls(new, before, threads.torchs(getattr(*resolved))):
                gone.append(place)
        return tuple(gone)


def enter(row: Patch, argument: tuple[Any, ...], stack: contextlib.ExitStack) -> None:
    """Enter a patch on an exit stack, in the places that this torch has.

    Args:
        row: the patch.
        argument: its argument, if it takes one.
        stack: leaves it again.

    Raises:
        TorchVersionError: a place is missing that keeps programs right.
    """
    if row.if_imported and not row.is_imported():
        return
    gone = row.missing()
    if row.on_missing == REFUSE:
        refuse([(row, place) for place in gone])
    for place, new in row.calls.items():
        resolved = None if place in gone else resolve(place)
        if resolved is None or _ends_in_patched(place, resolved[0]):
            continue
        new = functools.partial(new, *argument) if argument else new
        stack.enter_context(threads.overridden(*resolved, new, row.is_mine))
    if row.enter is not None and not {*row.places}.intersection(gone):
        stack.enter_context(row.enter(*argument))


def refuse(gone: Sequence[tuple[Patch, str]]) -> None:
    """Refuse a torch that lacks the places of some patches; with SHARDFN_ANY_TORCH=1, warn.

    Args:
        gone: each missing place, with its patch. If there is none, nothing happens.

    Raises:
        TorchVersionError: names all of them.
    """
    texts = [f"{place}: {row.lost}" for row, place in gone]
    if texts:
        versions.refuse(f"this torch lacks {texts[0]}", *(f"nor {text}" for text in texts[1:]))


def resolve(place: str) -> tuple[Any, str] | None:
    """Resolve a place to (module or class, attribute name). None if this torch lacks it.

    Every patch asks here, and nowhere else.
    """
    for text in place.split(OR):
        module, _, inside = text.partition(":")
        path, _, name = inside.rpartition(".")
        with contextlib.suppress(AttributeError, ImportError):
            owner = pkgutil.resolve_name(f"{module}:{path}")
            getattr(owner, name)
            return owner, name
    return None


def is_due(place: str) -> bool:
    """Check whether this version of torch should have a place, by SINCE."""
    return SINCE.get(place, ()) <= versions.RUNNING


@functools.cache
def takes_calls(new: Callable[..., Any], before: int, original: Any) -> bool:
    """Check that a replacement's signature accepts every call that torch's own function accepts.

    Args:
        new: the replacement.
        before: how many arguments it gets before those of the call.
        original: torch's function. One of C has no signature, and is taken to fit.
    """
    try:
        torchs = [*inspect.signature(original).parameters.values()]
    except (TypeError, ValueError):
        return True
    ours = [*inspect.signature(new).parameters.values()]
    ours = [x for k, x in enumerate(ours) if k >= before or x.kind not in _BY_PLACE]
    kinds = {x.kind for x in ours}
    if any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in torchs):
        return True  # torch's own says nothing of its arguments
    if inspect.Parameter.VAR_POSITIONAL not in kinds and _most(torchs) > _most(ours):
        return False
    by_name = {x.name for x in torchs if x.kind is inspect.Parameter.KEYWORD_ONLY}
    is_named = inspect.Parameter.VAR_KEYWORD in kinds or by_name <= {x.name for x in ours}
    return is_named and _least(ours) <= _least(torchs)


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _most(parameters: Sequence[inspect.Parameter]) -> int:
    """Count the positional parameters of a signature."""
    return sum(x.kind in _BY_PLACE for x in parameters)


def _least(parameters: Sequence[inspect.Parameter]) -> int:
    """Count the positional parameters without a default."""
    return sum(x.kind in _BY_PLACE and x.default is x.empty for x in parameters)


def _ends_in_patched(place: str, owner: Any) -> bool:
    """Check whether a method calls its base class's method, which is patched too, so that one
    patch is enough.
    """
    base = INHERITED.get(place)
    return base is not None and issubclass(owner, pkgutil.resolve_name(base))
