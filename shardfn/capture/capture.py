"""Stage 1: capture a Python function, with the transforms inside it, as one functional ATen
Program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from ..errors import CaptureError, ShardError
from ..ops import higher_order, placement
from ..random import ambient
from ..types import Program
from . import annotations as sources
from .closure import closed_over
from .closure.memoized import memoized
from .closure.primals import Derivative, follow_primals
from .closure.reads import Reads, held_reads
from .control_flow import endings
from .dtensors.values import DTensors, stand_in
from .dtensors.writes import refuse_writes
from .inputs import Inputs, holding
from .refusals import leaks, tensor_classes
from .refusals.explain import explained
from .replay import Replay
from .results import Result, program_of
from .rewrites import decompositions, functions, python_calls, strides
from .rewrites.custom_op_gradients import differentiated
from .shard_map import axis_names as named
from .shard_map import varying
from .trace import functional, lifted_constants, recording, simplified


@attrs.frozen(eq=False, repr=False)
class Captured:
    """A Program and the tensors that the function closes over. They follow its arguments as
    inputs.
    """

    program: Program
    outside: closed_over.ClosedOver
    mesh: Any  # the mesh whose names and sizes the Program depends on; usually None
    own_mesh: Any  # the mesh that a transform inside names, which a call's must equal; usually None
    brought_mesh: (
        Any  # the mesh of a shard_map inside, which a call without a mesh uses
    )
    reads: Reads  # the function's reads outside of its arguments
    strided: dict[
        int, bool
    ]  # inputs whose memory as_strided reads: `strided.settle`
    derivative: Derivative | None = None  # of a function with its gradients

    @property
    def closed_over(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the function closes over."""
        return self.outside.tensors


def capture(
    fn: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    paths: list[str],
    signature_of: Callable[..., Any] | None = None,
    device: str = "cpu",
    undecomposed: frozenset[Any] = frozenset(),
    mesh: Any = None,
    may_be_of_ranks: bool = False,
    gradients: tuple[str, ...] | None = None,
) -> Captured:
    """Capture a function on arguments like these.

    Args:
        fn: a pure function of pytrees.
        name: its name in errors and printed programs.
        args: its arguments; tensors and `ShapeDtype`s give only their shape, strides, dtype and
            device.
        kwargs: its keyword arguments.
        paths: the path of each leaf of (args, kwargs).
        signature_of: the user's function, for the line of errors without one.
        device: where `ShapeDtype`s live.
        undecomposed: ops that are not decomposed.
        mesh: the mesh of the call, which a shard_map inside may use.
        may_be_of_ranks: whether to raise NeedsRanks for the code of one rank.
        gradients: the paths of the tensors whose gradients fn returns beside its value. None if
            it returns the value alone.

    Returns:
        The Program and the closed-over tensors.

    Raises:
        CaptureError: the function is not one pure graph.
    """
    for part in (placement, endings):
        part.install()
    mode = _compat.fake_mode()
    handled = sys.exception()  # the user may be calling from an `except`
    user_fn, (fn, args, kwargs) = fn, holding(fn, args, kwargs)
    inputs = Inputs.like(args, kwargs, paths, device, mode, name)
    try:
        reading = memoized(
            lambda memo: _read(
                fn,
                inputs,
                mode,
                decompositions.table(undecomposed),
                named.scope(mesh, device, may_be_of_ranks),
                device,
                memo,
            )
        )
    except ShardError:
        raise
    except Exception as error:
        if own := _own(error, handled):
            raise own from None
        raise explained(error, signature_of or user_fn, name, paths, fn) from error
    return _captured(reading, inputs, user_fn, gradients)


class Reading(NamedTuple):
    """A function that has been read."""

    graph: torch.fx.GraphModule
    outside: closed_over.ClosedOver  # the tensors that it closes over
    out: Result
    names: named.Scope  # with the meshes that it names
    reads: Reads  # its other reads
    derivative: Derivative | None  # the facts of its outermost derivative


def _read(
    fn: Callable[..., Any],
    inputs: Inputs,
    mode: _compat.FakeTensorMode,
    table: Any,
    scope: Any,
    device: str,
    memo: _compat.Memo,
) -> Reading:
    """Trace a function with Dynamo, and replay its graph under make_fx."""

    @_compat.read_by_dynamo
    def call(args: Any, kwargs: Any) -> Any:
        named.begin()
        # Dynamo makes no graph of a function without any op (torch 2.13)
        return fn(*args, **kwargs), torch.zeros(())

    name = inputs.name
    tracing, watching = recording(name, table, mode), leaks.swept()
    with (
        _torchs(mode, device, memo),
        watching as watched,
        _compat.unwound(),
        tracing as recorded,
        scope as names,
    ):
        python, read = _compat.capture_python(call, inputs.positional)
        watched.rewind()
        tensor_classes.refuse_made(python, name)
        refuse_writes(python, name)
        varying.settle(python, name)
        follow_primals(python)
        graph, outside, out = _flatten(python, inputs, mode)
    reads = _reads(fn, (*read, *memo.reads), watched)
    return Reading(graph, outside, out, names, reads, recorded.derivative)


def _captured(
    reading: Reading,
    inputs: Inputs,
    fn: Callable[..., Any],
    gradients: tuple[str, ...] | None,
) -> Captured:
    """The record of a captured function."""
    graph, outside, out, names, reads, derivative = reading
    arguments = zip(inputs.paths, inputs.leaves, strict=True)
    outside = outside.named({"": fn, **dict(arguments)})
    sources.attach(graph)
    in_paths = (
        *inputs.tensor_paths,
        *outside.paths(),
    )
    memory = strides.settled(graph, inputs.name, in_paths, list(outside.tensors))
    graph = torch.fx.GraphModule(graph, simplified(graph.graph))
    if gradients is None:
        derivative = None
    else:
        out = out.beside(gradients)
    made = program_of(inputs.name, graph, in_paths, out)
    return Captured(made, outside, *names.meshes, reads, memory, derivative)


def _reads(
    fn: Callable[..., Any], read: Iterable[_compat.Read], watched: leaks.Watched
) -> Reads:
    """The reads of Dynamo, and the modes and constants of modules that it does not trace."""
    held = held_reads(held for _, held in watched.functions.values())
    return Reads(fn, (*read, *held, *watched.modes.values()))


@contextlib.contextmanager
def _torchs(
    mode: _compat.FakeTensorMode, device: str, memo: _compat.Memo
) -> Iterator[None]:
    """The context of a capture, with torch patched."""
    with (
        _compat.staging(),  # first, since the rest is global to the process
        mode,
        _compat.paused_gc(),
        _compat.patched(
            "capture",
            substitutes={**python_calls.TABLE, **_compat.substitutes()},
            custom_ops=differentiated(),
            functions=functions.applied,
            device=device,
            dtensors=DTensors(mode),
            memo=memo,
        ),
    ):
        yield


def _own(
    error: BaseException | None, handled: BaseException | None
) -> ShardError | None:
    """The ShardError that an error of Dynamo wraps, unless it was handled before."""
    while error is not None and error is not handled:
        if isinstance(error, ShardError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _refuse_closed_over(tensors: Sequence[torch.Tensor], name: str) -> None:
    if any(isinstance(x, leaks.LeakedTensor) for x in tensors):
        raise leaks.leaked(f"{name}, a tensor that it closes over")
    wrong = [
        x
        for x in tensors
        if (
            type(x) not in (torch.Tensor, torch.nn.Parameter)
            and not isinstance(x, DTensor)
        )
        or _is_around_others(x)
    ]
    if wrong:
        fix = "pass it as an argument, which carries its placement"
        raise CaptureError.of(
            name,
            f"it closes over a {_compat.class_name(wrong[0])}",
            needed="plain tensors",
            fix=fix,
        )


def _is_around_others(x: torch.Tensor) -> bool:
    """Whether a DTensor has local tensors that hold others."""
    if not isinstance(x, DTensor):
        return False
    local: Any = _compat.local_tensor(x)
    return any(map(_compat.holds_tensors, getattr(local, "shards", [local])))


class _Flat:
    """A function that Dynamo has read as one of flat tensors, the random state last; what a run
    finds stays here.

    Args:
        python: Dynamo's graph.
        inputs: of the capture.
        outside: the tensors that the function closes over.
    """

    def __init__(
        self,
        python: torch.fx.GraphModule,
        inputs: Inputs,
        outside: closed_over.ClosedOver,
    ) -> None:
        self.python, self.inputs = python, inputs
        self.positional = inputs.positional
        self.entering = (*inputs.tensors, *outside.tensors)
        self.result: Result | None = None
        self.ends: set[int] = (
            set()
        )  # the leaves that a gradient of a result reaches
        self.calls = 0  # random calls

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.entering, values[:-1], strict=True)
        source = ambient.Traced(values[-1])
        with ambient.drawing_from(source):
            known = {id(x): v for x, v in pairs}
            out = _replayed(self.python, self.positional, known)
        _tree.learn(out)
        tensor_classes.refuse_results(out, self.inputs.name)
        tensor_classes.refuse_told(out, self.inputs.name)
        self.result, self.calls = Result.of(out), source.calls
        leaves = list(filter(_tree.is_tensor, _tree.leaves(out)))
        self.ends = closed_over.reached_from(leaves)
        return leaves


def _flatten(
    python: torch.fx.GraphModule, inputs: Inputs, mode: _compat.FakeTensorMode
) -> tuple[torch.fx.GraphModule, closed_over.ClosedOver, Result]:
    """make_fx over Dynamo's graph: the ATen graph, the closed-over tensors, the results."""
    name = inputs.name
    outside = _entering(python, inputs.tensors, inputs.positional)
    _refuse_closed_over(outside.tensors, name)
    stand_ins = [_stand_in(x, mode) for x in outside.tensors]
    state = mode.from_tensor(ambient.PLACE.to(named.device()))
    flat = _Flat(python, inputs, outside)
    entering = [*inputs.tensors, *stand_ins, state]
    graph = functional(flat, entering, name, inputs.tensor_paths)
    higher_order.fold(graph)
    outside = outside.drawing(flat.calls)
    if not flat.calls:
        _drop_last_input(graph)
    constants = lifted_constants(graph, mode, name)
    tensor_classes.refuse_fakes([*outside.tensors, *constants], name)
    assert flat.result is not None
    return graph, outside.traced(stand_ins, flat.ends, constants), flat.result


def _drop_last_input(module: torch.fx.GraphModule) -> None:
    """Take away an input that nothing reads."""
    module.graph.erase_node(module.graph.find_nodes(op="placeholder")[-1])
    module.recompile()


def _replayed(
    python: torch.fx.GraphModule, positional: Any, values: dict[int, torch.Tensor]
) -> Any:
    """Replay Dynamo's graph, with values for the tensors of these ids."""

    def valued(tree: Any) -> Any:
        return _tree.map_held(lambda x: values.get(id(x), x), tree)

    entering = _compat.codegen_of(python.graph).process_inputs(*valued(positional))
    outputs = Replay(python).run(*map(valued, entering), enable_io_processing=False)
    out, _ = _compat.python_results(python, outputs)
    return out


def _stand_in(x: torch.Tensor, mode: _compat.FakeTensorMode) -> torch.Tensor:
    """A fake tensor for a closed-over tensor."""
    if isinstance(x, DTensor):
        return stand_in(x, mode)
    fake = mode.from_tensor(x.detach())
    if x.is_meta:
        with mode:
            fake = torch.empty_like(fake, device=named.device())
    return fake.requires_grad_(x.requires_grad)


def _entering(
    python: torch.fx.GraphModule, tensors: list[torch.Tensor], positional: Any
) -> closed_over.ClosedOver:
    """The input tensors of Dynamo's graph that are not arguments."""
    known = {id(x) for x in tensors}
    inputs = _compat.codegen_of(python.graph).process_inputs(*positional)
    # a value that Dynamo makes from an argument, such as x.T, is an input of its graph too, and a
    # fake tensor
    rows = zip(inputs, python.graph.find_nodes(op="placeholder"), strict=True)
    _tree.learn(list(inputs))
    held = [
        (x, _compat.opened(x)[1])
        for x in inputs
        if _compat.holds_tensors(x) and not _compat.is_fake(x)
    ]
    mine = [
        (x, node)
        for given, node in rows
        for x in _tree.leaves(given)
        if isinstance(x, torch.Tensor)
        and id(x) not in known
        and not _compat.is_fake(x)
        and not known.add(id(x))
    ]
    lines = tuple(
        next(
            filter(
                None, (sources.line_of(u.meta.get("stack_trace")) for u in n.users)
            ),
            None,
        )
        for _, n in mine
    )
    found = tuple(x for x, _ in mine)
    return closed_over.ClosedOver(found, lines=lines, holders=tuple(held))
