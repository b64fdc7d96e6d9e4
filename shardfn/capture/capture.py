"""Stage 1: capture a Python function, with the transforms inside it, as one functional ATen
Program.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import attrs
import torch

from .. import _compat, tracebacks
from ..errors import CaptureError, ShardError
from ..ops import debug, placement
from ..random import earlier_draws
from ..types import Program
from . import annotations as sources
from .aten_trace import simplified
from .closure import closed_over_tensors
from .closure.closed_over_primals import Derivative, follow_primals
from .closure.lazy_attributes import read_with_lazy_attributes
from .closure.reads import Reads, reads_of_constants
from .control_flow import control_flow_ops, pullbacks_in_bodies
from .dtensors import partial_terms, uneven_shards
from .dtensors.placement_checks import NeedsRanks
from .dtensors.shared_memory_writes import refuse_writes
from .inputs import Arguments, Inputs, holding, inputs_like
from .reading import python_rerun
from .reading.aten_from_dynamo import flatten
from .reading.capture_settings import Settings, tracing
from .reading.container_objects import lost_changes, refuse_lost, remade_tree
from .reading.symbolic_sizes import Template, refuse_strict
from .refusals import data_dependent, leaked_values, tensor_subclasses, torch_errors
from .refusals.refused_writes import refuse_array_writes
from .refusals.unscaled_float16 import refuse_unscaled
from .result_tree import Result, program_of
from .rewrites import as_strided, masked_writes, tensor_indices
from .rewrites.python_substitutes import Misuse
from .shard_map import axis_names as named
from .shard_map import varying


@attrs.frozen(eq=False, repr=False)
class Captured:
    """A Program and the tensors that the function closes over. They follow its arguments as
    inputs.
    """

    program: Program
    outside: closed_over_tensors.ClosedOver
    mesh: Any  # the mesh whose names and sizes the Program depends on; usually None
    own_mesh: Any  # the mesh that a transform inside names, which a call's must equal; usually None
    brought_mesh: Any  # the mesh of a shard_map inside, which a call without a mesh uses
    reads: Reads  # the function's reads outside of its arguments
    strided: dict[int, bool]  # inputs whose memory as_strided reads: `strided.settle`
    derivative: Derivative | None = None  # of a function with its gradients
    # why it has no gradients, of a call that autograd follows
    no_derivative: CaptureError | None = None
    # what captures it for other sizes; None if it is for these alone
    template: Template | None = None
    # why the sizes of dynamic dims are constants of it
    fixed: str = ""
    # what the function has asked of its argument tensors, and what they answered
    facts: _compat.Facts = ()
    # of the code of a rank with sizes of its own: the local shapes that the program depends on,
    # and what is to be compared with that of other ranks
    cuts: tuple[Any, ...] = ()
    traits: Any = None

    @property
    def closed_over(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the function closes over."""
        return self.outside.tensors


def capture(
    fn: Callable[..., Any], name: str, arguments: Arguments, settings: Settings | None = None
) -> Captured:
    """Capture a function on arguments like these.

    Args:
        fn: a pure function of pytrees.
        name: its name in errors and printed programs.
        arguments: its arguments; tensors and `ShapeDtype`s give only their shape, strides, dtype
            and device.
        settings: the others of the capture.

    Returns:
        The Program and the closed-over tensors.

    Raises:
        CaptureError: the function is not one pure graph.
    """
    for part in (placement, control_flow_ops, tensor_indices, masked_writes, earlier_draws):
        part.install()
    handled = sys.exception()  # the user may be calling from an `except`
    given = Given.of(fn, arguments)
    settings = attrs.evolve(settings or Settings(), name=name)
    with debug.show_constants_at_end(name), _compat.made_or_not():
        return _captured_on(given, settings, handled)


def _captured_on(given: Given, settings: Settings, handled: BaseException | None) -> Captured:
    if not settings.dynamic:
        return _constant(given, settings, handled)
    found, reason = _dynamic(given, settings)
    if found is not None and found.template is not None:
        found.template.refuse_constants(settings)
        return found
    found = _constant(given, attrs.evolve(settings, dynamic={}), handled)
    refuse_strict(settings, given.arguments.paths, reason)
    return attrs.evolve(found, fixed=reason)


def capture_again(template: Template, arguments: Arguments, settings: Settings) -> Captured | None:
    """Capture a function for other sizes of its arguments. Reads no Python.

    Args:
        template: the function as Dynamo has read it, for sizes like these.
        arguments: the arguments.
        settings: those of the capture.

    Returns:
        The capture. None for sizes that fail, whose error a capture of their own says.
    """
    fn, user_fn = template.fns
    given = Given(fn, user_fn, holding(fn, arguments)[1])
    mode = _compat.fake_mode()
    inputs = given.inputs(mode, settings)
    try:
        with tracing(settings, mode, _compat.Memo()) as state:
            names = template.scope.over(settings.mesh)
            flat = flatten(template.python, inputs, mode)
        reading = Reading(*flat, names, template.reads, state.recorded.derivative)
        found = _captured(reading, inputs, user_fn, settings.gradients)
    except Exception:
        return None
    return attrs.evolve(found, template=template, facts=template.facts)


class Given(NamedTuple):
    """A function and its arguments, as Dynamo takes them."""

    fn: Callable[..., Any]
    user_fn: Callable[..., Any]
    arguments: Arguments

    @classmethod
    def of(cls, fn: Callable[..., Any], arguments: Arguments) -> Given:
        """A function that closes over its object arguments."""
        held, others = holding(fn, arguments)
        return cls(held, fn, others)

    def inputs(self, mode: _compat.FakeTensorMode, settings: Settings) -> Inputs:
        """The fake inputs."""
        found = inputs_like(self.arguments, settings.device, mode, settings.name)
        for i, dims in settings.dynamic.items():
            _compat.read_as_symbols(found.fakes[i], [*dims])
        return found

    def named(self, failed: Exception) -> Any:
        """What `explain.named` finds in an error of the function."""
        return torch_errors.cause_in_tables(failed, self.arguments.paths, self.fn)


class Reading(NamedTuple):
    """A function that has been read."""

    graph: torch.fx.GraphModule
    outside: closed_over_tensors.ClosedOver  # the tensors that it closes over
    out: Result
    names: named.Scope  # with the meshes that it names
    reads: Reads  # its other reads
    derivative: Derivative | None  # the facts of its outermost derivative
    template: Template | None = None  # reads it for other sizes
    traits: Any = None  # what is to be compared with that of other ranks


def _constant(given: Given, settings: Settings, handled: BaseException | None) -> Captured:
    """The capture of a function, with sizes as numbers."""
    mode = _compat.fake_mode()
    inputs = given.inputs(mode, settings)
    try:
        reading = _reading(given, inputs, mode, settings)
        return _captured(reading, inputs, given.user_fn, settings.gradients)
    except ShardError as error:
        if not isinstance(error, Misuse):
            raise
        failed: Exception = error
    except Exception as error:
        own = _own(error, handled)
        if own is not None and not isinstance(own, Misuse):
            raise own from None
        failed = own or error
    _raise_users(given, settings, failed)
    if isinstance(failed, Misuse):
        raise failed
    if tracebacks.is_raised_by_shardfn(failed) and given.named(failed) is None:
        tracebacks.note_fault(failed)
        raise failed
    fn = settings.signature_of or given.user_fn
    raise torch_errors.capture_error_of(
        failed, fn, settings.name, given.arguments.paths, given.fn
    ) from failed


def _raise_users(given: Given, settings: Settings, failed: Exception) -> None:
    """Raise the exception of the user's that stopped a capture, if there is one."""
    cause = given.named(failed)
    is_known = cause is not None
    may_be_ambiguous = cause == data_dependent.BRANCH  # on a tensor of many elements
    if is_known and not (may_be_ambiguous or _compat.is_observed(failed)):
        return
    # the code of a rank may call methods that only DTensors have, and stop before
    line = torch_errors.line_of(failed) if settings.rank is not None else None
    _run_again(
        given, settings, lambda error: python_rerun.is_users_error(error, line, is_known=is_known)
    )
    if not _compat.is_of_tracing(failed):  # fake tensors do not have it when Dynamo reads
        _run_again(given, settings, python_rerun.has_text_of(failed), failed)


def raise_users(
    fn: Callable[..., Any], arguments: Arguments, settings: Settings, failed: Exception
) -> None:
    """Raise the error of a program that ran as one of the user's function, with its frames, if
    that has it too.

    Args:
        fn: the function.
        arguments: its arguments.
        settings: those of the capture.
        failed: the error.
    """
    given = Given.of(fn, arguments)
    _run_again(given, settings, python_rerun.has_text_of(failed), failed)


def _run_again(
    given: Given,
    settings: Settings,
    is_users: Callable[[Exception], bool],
    failed: Exception | None = None,
) -> None:
    """Run a function as Python does, on fake tensors, and raise its error if it is the user's."""
    mode = _compat.fake_mode()
    inputs = given.inputs(mode, settings)
    call = _called(given.fn, inputs.name, inputs.objects)
    with tracing(settings, mode, _compat.Memo(), inputs.named_tensors) as state:
        run = lambda: call(*inputs.positional)
        python_rerun.raise_users(settings.name, given.user_fn, run, is_users, failed)
        state.watched.rewind()


def _dynamic(given: Given, settings: Settings) -> tuple[Captured | None, str]:
    """The capture of a function, with the sizes of dynamic dims as symbols while it is read. None
    if it cannot be read so, with the reason. An error of the user's comes back from the capture
    with numbers.
    """
    mode = _compat.fake_mode()
    inputs = given.inputs(mode, settings)
    try:
        reading = _reading(given, inputs, mode, settings)
        found = _captured(reading, inputs, given.user_fn, settings.gradients)
    except (NeedsRanks, uneven_shards.NeedsOwnSizes):
        raise
    except Exception as error:
        return None, _first_line(error)
    return attrs.evolve(found, template=reading.template), ""


def _reading(
    given: Given, inputs: Inputs, mode: _compat.FakeTensorMode, settings: Settings
) -> Reading:
    """A function, read as often as it takes."""
    return read_with_lazy_attributes(
        lambda memo: _compat.with_uses(lambda: _read(given, inputs, mode, settings, memo))
    )


def _read(
    given: Given,
    inputs: Inputs,
    mode: _compat.FakeTensorMode,
    settings: Settings,
    memo: _compat.Memo,
) -> Reading:
    """Trace a function with Dynamo, and replay its graph under make_fx."""
    fn, name = given.fn, inputs.name
    call = _called(fn, name, inputs.objects)
    with tracing(settings, mode, memo, inputs.named_tensors) as state:
        with _compat.patched("symbols") if settings.dynamic else contextlib.nullcontext():
            python, read, sizes_of = _compat.capture_python(call, inputs.positional, inputs.tensors)
        state.watched.rewind()
        masked_writes.join_masks(python)
        tensor_subclasses.refuse_made(python, name)
        refuse_writes(python, name)
        refuse_array_writes(python, name)
        tensor_indices.refuse_writes(python, name)
        partial_terms.read_local_tensors(python)
        traits = uneven_shards.traits(python) if settings.rank else None
        uneven_shards.mark_differing(python, name, settings.differing)
        follow_primals(python)
        pullbacks_in_bodies.compute_outer_primals(python, name)
        varying.make_varying(python, name)
        # the conditions on sizes, now that all that looks at the graph has done so
        sizes = sizes_of() if settings.dynamic else None
        flat = flatten(python, inputs, mode)
    reads = _reads(fn, (*read, *memo.reads), state.watched)
    template = None
    if sizes is not None:
        fns = fn, given.user_fn
        names = inputs.tensor_names
        dynamic = settings.dynamic
        facts = inputs.asked.facts()
        template = Template(python, sizes, dynamic, names, reads, state.names, fns, facts)
    derivative = state.recorded.derivative
    return Reading(*flat, state.names, reads, derivative, template, traits)


def _called(fn: Callable[..., Any], name: str, how: Any) -> types.FunctionType:
    """The call of a function, as Dynamo reads it; `how` makes the objects among its arguments."""

    @_compat.read_by_dynamo
    def call(args: Any, kwargs: Any) -> Any:
        named.begin()
        debug.forget_constants()
        records: list[Any] = []
        args, kwargs = remade_tree(_compat.owned((args, kwargs)), how, records)
        out = fn(*args, **kwargs)
        refuse_lost(name, lost_changes(records, out))
        # Dynamo makes no graph of a function without any op (torch 2.13)
        return out, torch.zeros(())

    return call


def _captured(
    reading: Reading, inputs: Inputs, fn: Callable[..., Any], gradients: tuple[str, ...] | None
) -> Captured:
    """The record of a captured function."""
    graph, outside, out, names, reads, derivative, _, traits = reading
    arguments = zip(inputs.paths, inputs.leaves, strict=True)
    outside = outside.named({"": fn, **dict(arguments)})
    sources.attach(graph)
    refuse_unscaled(graph, inputs.name)
    in_paths = (*inputs.tensor_paths, *outside.paths())
    memory = as_strided.settled(graph, inputs.name, in_paths, list(outside.tensors))
    graph = _compat.graph_module(graph, simplified(graph.graph))
    if gradients is None:
        derivative = None
    else:
        out = out.beside(gradients)
    program = program_of(inputs.name, graph, in_paths, out)
    found = Captured(program, outside, *names.meshes, reads, memory, derivative)
    facts = inputs.asked.facts()
    inputs.asked.leaves = ()  # a fake tensor of the graph keeps no argument alive
    return attrs.evolve(found, cuts=tuple(names.cuts), traits=traits, facts=facts)


def _reads(
    fn: Callable[..., Any], read: Iterable[_compat.Read], watched: leaked_values.WatchedFunctions
) -> Reads:
    """The reads of Dynamo, and the modes and constants of modules that it does not trace."""
    held = reads_of_constants(held for _, held in watched.functions.values())
    return Reads(fn, (*read, *held, *watched.modes.values()))


def _own(error: BaseException | None, handled: BaseException | None) -> ShardError | None:
    """The ShardError that an error of Dynamo wraps, unless it was handled before."""
    while error is not None and error is not handled:
        if isinstance(error, ShardError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
