"""The way in which a function must be captured, as determined by a failed attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from ..capture.dtensors.placement_checks import NeedsRanks
from ..capture.dtensors.uneven_shards import NeedsOwnSizes
from ..errors import CaptureError
from .options import Request

# what a function does that writes to a buffer of a module, in the words of its refusal
WRITES = (
    "a closed-over tensor: the function writes to this tensor in place",
    "the function changes an object outside of itself",
    "the function writes in place to an argument or a closed-over tensor",
    "writes to the memory of an argument",
)


@attrs.frozen(eq=False)
class Needs:
    """What a function needs: to be staged in another form, or else by its user to be changed.

    Args:
        error: why it was refused. Where no other form is left, it is raised.
        is_of_ranks: whether it is the code of one rank.
        mesh: of these ranks, if it is known.
        is_for_good: whether it is such code for all arguments.
        has_own_sizes: whether each rank needs a program of its own.
        may_write: whether it may write to buffers of modules.
        places: the attributes and items that it stores values in.
    """

    error: CaptureError
    is_of_ranks: bool = False
    mesh: Any = None
    is_for_good: bool = False
    has_own_sizes: bool = False
    may_write: bool = False
    places: tuple[Any, ...] = ()


def attempt(stage: Callable[..., Any], request: Request, args: Any, kwargs: Any) -> Any:
    """A stage of a function, or the `Needs` of the function in place of its result."""
    try:
        return stage(request, args, kwargs)
    except NeedsRanks as error:
        return Needs(error, is_of_ranks=True, mesh=error.mesh, is_for_good=error.is_for_good)
    except CaptureError as error:
        has_own_sizes = isinstance(error, NeedsOwnSizes)
        may_write = any(text in str(error) for text in WRITES)
        places = getattr(error.__cause__, "places", ())
        return Needs(error, has_own_sizes=has_own_sizes, may_write=may_write, places=places)
