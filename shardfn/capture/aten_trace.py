"""Tracing into ATen graphs by make_fx, and the record of one capture: decompositions, loops.

A loop is traced separately while the outer trace is paused. The outer graph has one op with the
number of the loop.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from .. import _compat
from ..errors import CaptureError
from ..ops import debug
from ..ops.loops import Loop, empty_results, inner_nodes
from ..ops.nodes import origin_of
from ..random.ambient import NoState, drawing_from
from . import annotations as sources
from .checkpoint.recompute import recompute
from .closure.closed_over_primals import Derivative, KnownDerivatives, derivative_of
from .control_flow import scan_residuals, trim_loops
from .drawing import draws
from .refusals.refused_writes import OF_BODY, refuse_collectives, refuse_mutation
from .rewrites import as_strided
from .rewrites.flat_lookups import flatten_lookups
from .rewrites.in_place_ops import without_writes
from .rewrites.padded_convolutions import join_padding
from .rewrites.reverse_cumulative import join_flips


@attrs.define(eq=False)
class Recording:
    """What one capture records while it traces: its loops, hooked parameters, derivative."""

    name: str
    table: dict[Any, Any]
    mode: Any
    loops: list[Loop] = attrs.field(factory=list)
    reading: list[int] = attrs.field(
        factory=list
    )  # the functions whose own rule is being traced, by id
    hooked: dict[Any, Any] = attrs.field(
        factory=dict
    )  # parameters with hooks: their values, and the values that go through the hooks
    # of the outermost derivative, which is not itself differentiated
    derivative: Derivative | None = None
    # the values of pipelines, where the outermost derivative is to read their gradients
    known: KnownDerivatives | None = None


_recording: contextvars.ContextVar[Recording] = contextvars.ContextVar("shardfn_recording")


@contextlib.contextmanager
def recording(
    name: str, table: dict[Any, Any], mode: Any, *, with_known: bool = False
) -> Iterator[Recording]:
    """The context with a new Recording."""
    known = KnownDerivatives() if with_known else None
    token = _recording.set(Recording(name, table, mode, known=known))
    try:
        yield _recording.get()
    finally:
        _recording.reset(token)


def is_recording() -> bool:
    """Whether a capture is active."""
    return _recording.get(None) is not None


def hooked_values() -> dict[Any, Any]:
    """The hooked values of parameters in the active capture. Empty outside of a capture."""
    at_work = _recording.get(None)
    return {} if at_work is None else at_work.hooked


def note_derivative(results: Sequence[torch.Tensor], primals: Sequence[torch.Tensor]) -> None:
    """Record which results of the active capture have derivatives, and which primals they
    reach.
    """
    record = _recording.get()
    record.derivative = derivative_of(results, primals, record.known)


def known_derivatives() -> KnownDerivatives | None:
    """The record of pipelines whose gradients the outermost derivative of the active capture reads;
    None if it reads none.
    """
    record = _recording.get(None)
    return None if record is None else record.known


@torch.library.custom_op("shardfn::looped", mutates_args=())
def looped(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The op that stands for a loop, by its number, in a graph that is being traced."""
    # torch asks for the values of results of constants: meta tensors say that there are none
    return [x.to("meta") for x in empty_results(_recording.get().loops[number])]


@looped.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return empty_results(_recording.get().loops[number])


# a body may show values: `trim` removes an unread one that does not
_compat.keep_effects(torch.ops.shardfn.looped.default)


def functional_graph(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], name: str, paths: Sequence[str]
) -> torch.fx.GraphModule:
    """Trace a function of fake tensors into one ATen graph without in-place writes."""
    table = _recording.get().table
    graph = _compat.trace_aten(fn, inputs, table)
    _drop_labels(graph.graph)
    _drop_failed_writes(graph.graph)
    _compat.write_out_zeros(graph)
    sources.attach(graph)  # before the graph is traced again, which keeps the annotations
    refuse_collectives(graph, name)
    writes = refuse_mutation(graph, name, paths)
    if writes and not without_writes(graph, writes, table):
        pure = torch.func.functionalize(torch.fx.Interpreter(graph).run, remove="mutations")
        with torch.no_grad():  # its derivatives are in the graph
            graph = _compat.trace_aten(pure, inputs, table)
    fold_loops(graph)
    return graph


def _drop_labels(graph: torch.fx.Graph) -> None:
    """Drop the ops that label a span of time for torch's profiler, as of `record_function`."""
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _drop_failed_writes(graph: torch.fx.Graph) -> None:
    """Drop the in-place ops that raised an error while they were traced, so that they have no
    value: what a module or an optimizer writes under `vmap` is tried without a batch dim first.
    """
    for node in reversed(graph.nodes):
        if not isinstance(node.target, _compat.OpOverload) or node.users or "val" in node.meta:
            continue
        schema = _compat.schema(node.target)
        if schema.is_mutable and schema.returns:
            graph.erase_node(node)


def traced(
    fn: Callable[..., Any], examples: Sequence[torch.Tensor], name: str, again: bool = False
) -> tuple[torch.fx.Graph, list[torch.Tensor]]:
    """Trace a function of tensors into a graph of its own. Returns the graph and its tensor
    constants, which are its last inputs. Also returns its tensor constants, which are its last
    inputs.

    Args:
        fn: the function.
        examples: tensors of the right shapes and dtypes.
        name: the name of the loop, for errors.
        again: whether it recomputes another loop's values, as a derivative does.

    Raises:
        CaptureError: it would draw different random numbers than that loop.
    """
    with (
        _compat.paused_tracing(),
        _compat.in_body(),
        torch.enable_grad(),
        _recording.get().mode,
        drawing_from(NoState()),
    ):
        inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in examples]
        graph = functional_graph(
            lambda *xs: [x.contiguous() for x in fn(*xs)], inputs, name, [OF_BODY] * len(inputs)
        )
        sources.attach(graph)
        as_strided.settle(graph, name, [], inside=True)
        constants = lifted_constants(graph, _recording.get().mode, name)
        if again:
            _refuse_random(graph.graph, name)
            debug.erase_debug_calls(graph.graph)
        body = simplified(graph.graph)
    return body, constants


def simplified(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph with trimmed loops, whose backward recomputes the residuals that checkpoints do
    not save.
    """
    join_flips(graph)
    scan_residuals.simplify(graph)
    out = recompute(graph)
    join_padding(out)
    flatten_lookups(out)
    trim_loops.trim(out)
    return out


def _refuse_random(graph: torch.fx.Graph, name: str) -> None:
    drawn = next(
        (n for n in inner_nodes(graph, once=True) if n.op == "call_function" and draws(n)), None
    )
    if drawn is not None:
        raise CaptureError.of(
            name,
            f"the differentiated function draws random numbers ({drawn.target}), which would "
            "differ in its derivative",
            fix="pass the random tensors as arguments, or as per-step inputs of a scan",
            **origin_of(drawn),
        )


def emit_loop(loop: Loop, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put a loop into the graph that is being traced."""
    loops = _recording.get().loops
    loops.append(loop)
    return looped([x.contiguous() for x in tensors], len(loops) - 1)


def fold_loops(module: torch.fx.GraphModule) -> None:
    """Replace each loop's number in a graph by an op that holds the loop's graphs."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.shardfn.looped.default:
            tensors, number = node.args
            node.target, node.args = _recording.get().loops[number], tuple(tensors)


def lifted_constants(
    graph: torch.fx.GraphModule, mode: _compat.FakeTensorMode, name: str
) -> list[torch.Tensor]:
    """Turn tensor constants of the function, such as torch.tensor([1, 2]), into inputs. Returns
    their values.
    """
    values = []
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        if not isinstance(value, torch.Tensor):
            (user, *_) = node.users
            fix = "replace the higher-order op by torch.where, or by a Python loop"
            raise CaptureError.of(
                name,
                f"the function uses the higher-order op {user.target}, which has no rule yet",
                fix=fix,
            )
        last = graph.graph.find_nodes(op="placeholder")
        with graph.graph.inserting_after(last[-1] if last else next(iter(graph.graph.nodes)).prev):
            holder = graph.graph.placeholder(f"constant_{len(values)}")
        holder.meta = {**node.meta, "val": mode.from_tensor(value)}
        node.replace_all_uses_with(holder)
        graph.graph.erase_node(node)
        values.append(value)
    graph.recompile()
    return values


@_compat.constant_in_graph
def begin_rule(key: int) -> bool:
    """Record that the rule of a function is being traced. Returns False if no derivative can
    need it any more.

    A rule may call its function again, which matters at most once for each derivative that is
    being taken.
    """
    reading = _recording.get().reading
    if reading.count(key) >= _compat.derivative_levels():
        return False
    reading.append(key)
    return True


@_compat.constant_in_graph
def is_in_rule() -> bool:
    """Whether the rule of a function is being traced."""
    return bool(_recording.get().reading)


@_compat.constant_in_graph
def end_rule() -> None:
    """Record that the rule has been traced."""
    _recording.get().reading.pop()
