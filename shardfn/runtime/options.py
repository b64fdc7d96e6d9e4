"""The request of a transformed function to the compilation stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from ..axis_options import check_option
from ..compile import BACKENDS
from ..errors import ShardError
from ..partition import GLOBAL, PLANNERS
from .backward.followed import Followed
from .store import CallStore

IMPLICIT = ("allow", "warn", "error")
WARMUPS = (None, "aten")
SEEDS = ("state", "required")


def _known(kind: str, known: Any) -> Callable[[Any, Any, str], None]:
    def check(request: Any, attribute: Any, value: str) -> None:
        if value not in known:
            raise ShardError.of(
                request.name, f"{kind} is {value!r}", needed=f"one of {', '.join(map(str, known))}"
            )

    return check


def _recordable(request: Any, _: Any, value: bool) -> None:
    """Check that a function whose kernels are to be recorded (cuda_graphs) is compiled for fixed
    sizes.
    """
    if not isinstance(value, bool):
        got, needed = f"cuda_graphs is {value!r}", "True or False"
        raise ShardError.of(request.name, got, needed=needed)
    if value and request.backend != "inductor":
        got = (
            f"cuda_graphs=True does not work with backend={request.backend!r}, which runs op by op"
        )
        raise ShardError.of(request.name, got, fix="backend='inductor'")


def _of_axes(request: Any, attribute: Any, value: Any) -> None:
    """Check an option that names mesh axes."""
    check_option(request.name, attribute.name, value)


Differentiated = Callable[[Callable[..., Any], Followed], Callable[..., Any]]


class Around(NamedTuple):
    """The functions to apply around a call: to its arguments before, and to its result after."""

    entering: Callable[[Any, Any, Any, Any], Any]  # request, mesh, args, kwargs
    leaving: Callable[[Any], Any]


@attrs.frozen(eq=False)
class Request:
    """A function to capture, with its options for placement, compilation and calls."""

    name: str
    fn: Callable[..., Any]  # the function that Dynamo traces
    signature_of: Callable[..., Any]  # whose parameter names errors use
    mesh: Any = None
    needs_mesh: bool = False
    in_placements: Any = None
    out_placements: Any = None
    implicit_comm: str = attrs.field(default="allow", validator=_known("implicit_comm", IMPLICIT))
    planner: str = attrs.field(default=GLOBAL, validator=_known("planner", PLANNERS))
    # for mesh axes, how attention is sharded over them
    attention: Mapping[str, str] | None = attrs.field(default=None, validator=_of_axes)
    donate_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    backend: str = attrs.field(default="aten", validator=_known("backend", tuple(BACKENDS)))
    # the backend of the first calls, while the other compiles in the background
    warmup: str | None = attrs.field(default=None, validator=_known("warmup", WARMUPS))
    # whether the kernels of compiled code are recorded, and launched together
    cuda_graphs: bool = attrs.field(default=False, validator=_recordable)
    # the dims of arguments that may change between calls: `arguments.dynamic`
    dynamic: Any = None
    seed: str = attrs.field(default="state", validator=_known("seed", SEEDS))
    # by mesh axis, how many rows a rank can take that other ranks send to it
    rows: Mapping[str, int | str] | None = attrs.field(default=None, validator=_of_axes)
    # the function under the transforms of fn, and their key, if equal ones share captures
    structure: Callable[[], tuple[Callable[..., Any], Any]] | None = None
    # whether it may be the code of one rank, which capture finds out
    may_be_of_ranks: bool = False
    # of code of one rank, whose tensors are each rank's own
    around: Around | None = None
    # of that code: the coordinate of the rank whose code is read; nothing as long as ranks share a
    # program
    rank: tuple[int, ...] | None = None
    # whether each kind of rank has a program of its own, since shards are uneven
    has_own_sizes: bool = False
    # for each leaf of the arguments None, or the shape and strides of each rank's own tensor
    layouts: tuple[Any, ...] = ()
    # the nodes of Dynamo's graph whose constants differ by rank
    differing: frozenset[Any] = frozenset()
    # makes the function of the value and the gradients, where autograd follows a call
    differentiated: Differentiated | None = None
    # the tensors whose gradients fn returns beside the value
    followed: Followed | None = None
    store: CallStore = attrs.field(factory=CallStore, init=False)
