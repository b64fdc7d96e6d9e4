"""Fake tensors, make_fx and decompositions, and questions about the active torch.func levels."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
)
from torch.autograd import forward_ad

from .fakes import answers
from .settings import of_fakes
from .threads import is_capturing, overridden

# Private members of torch, each by a name of ours.
schema = operator.attrgetter("_schema")  # of an op
overload_of = operator.attrgetter("_opoverload")  # of a custom op
namespace_of = operator.attrgetter("_namespace")  # of a custom op
backward_of = operator.attrgetter("_backward_fn")  # of a custom op
setup_context_of = operator.attrgetter("_setup_context_fn")  # of a custom op
name_of_op = operator.attrgetter("_opname")  # without namespace and overload
codegen_of = operator.attrgetter("_codegen")  # of a graph
sequence_number = operator.attrgetter("_sequence_nr")  # of an autograd node
version_of = operator.attrgetter("_version")  # of a tensor: how many in-place writes
coordinates_of = operator.methodcaller("_indices")  # of a sparse tensor: (dims, elements)
elements_of = operator.methodcaller("_values")  # of a sparse tensor
base_of = operator.attrgetter("_base")  # of a view: the tensor whose memory it shares

__all__ = ["FakeTensorMode", "OpOverload", "is_fake"]

Function = TypeVar("Function", bound=Callable[..., Any])
DATA_DEPENDENT = DataDependentOutputException

DYNAMIC_SHAPE = DynamicOutputShapeException
OF_TRACING = ("torch._dynamo.", "torch._subclasses.", "torch._guards", "torch.fx.")


def is_of_tracing(error: BaseException) -> bool:
    """Check whether an error is of a class that only torch's tracing raises, or that of
    torch.func for an op without a batching or derivative rule.
    """
    if isinstance(error, KeyError) and error.args:
        return type(error.args[0]).__name__ == "TransformType"
    return type(error).__module__.startswith(OF_TRACING)


def is_observed(error: BaseException) -> bool:
    """Check whether a Dynamo error stands for an exception that the user's Python raises."""
    return type(error.__cause__).__name__.startswith("Observed")


def _is_not_capturing() -> bool:
    """Check whether this thread is not capturing."""
    return not is_capturing()


def _is_of_another_thread(record: logging.LogRecord) -> bool:
    """Filter log records: keep those of threads that do not capture."""
    return _is_not_capturing()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's log of fake tensors in this thread, where shardfn raises an error of its
    own.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    is_first = _is_of_another_thread not in logger.filters
    logger.addFilter(_is_of_another_thread)
    try:
        yield
    finally:
        if is_first:
            logger.removeFilter(_is_of_another_thread)


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Disable the user's saved-tensor hooks. A capture saves no tensors, and torch.func refuses
    to run under such hooks.
    """
    hooks, disabled = torch._C._autograd, []
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        disabled.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(disabled):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def levels_left_on_error() -> Iterator[None]:
    """On an error, leave the torch.func levels that were entered inside of the context, and switch
    back what they had switched.
    """
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth = functorch.get_dynamic_layer_stack_depth()
    is_allowed = functorch.get_inplace_requires_grad_allowed()
    is_enabled = autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    except BaseException:
        with contextlib.suppress(
            RuntimeError
        ):  # torch asserts when the last level is left (torch 2.11)
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        functorch.set_inplace_requires_grad_allowed(is_allowed)
        if is_enabled:
            autograd._saved_tensors_hooks_enable()
        raise


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """Leave all torch.func levels that a failed trace has entered, and allow hooks on saved
    tensors again if a trace has left them disabled.
    """
    autograd = torch._C._autograd
    is_enabled, dual = autograd._saved_tensors_hooks_is_enabled(), in_dual_level()
    try:
        with levels_left_on_error():
            yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            if not dual:  # else it is the user's
                torch._C._exit_dual_level(level=0)
        raise
    if is_enabled:
        autograd._saved_tensors_hooks_enable()


@contextlib.contextmanager
def dual_level_counted() -> Iterator[None]:
    """Set torch.func.jvp's Python counters to a dual level that an fx graph has opened in C++."""
    from torch._functorch import eager_transforms

    with (
        mock.patch.object(eager_transforms, "JVP_NESTING", 1),
        mock.patch.object(forward_ad, "_current_level", 0),
    ):
        yield


def already_open() -> None:
    """Do nothing: close a dual level that other code has opened."""


def open_dual() -> Callable[[], None]:
    """Open the dual level of forward-mode AD, if it is not open. Returns a function that closes
    it.
    """
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return already_open
    return functools.partial(torch._C._exit_dual_level, level=level)


def is_wrapped(x: Any) -> bool:
    """Check whether a tensor is wrapped by a torch.func transform."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """Remove all torch.func wrappers of a tensor."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def in_dual_level() -> bool:
    """Check whether the user has opened a dual level (torch.autograd.forward_ad)."""
    return forward_ad._current_level >= 0


def carries_tangent(x: Any) -> bool:
    """Check whether a tensor has a tangent at any level of torch.func. An fx graph opens levels
    that torch.autograd.forward_ad does not count.
    """
    functorch = torch._C._functorch
    while is_wrapped(x):
        if not functorch.is_batchedtensor(x) and _tangent(x) is not None:
            return True
        x = functorch.get_unwrapped(x)
    return isinstance(x, torch.Tensor) and _tangent(x) is not None


def is_differentiated(x: torch.Tensor) -> bool:
    """Check whether a tensor requires a gradient at any level of torch.func."""
    while is_wrapped(x):
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def _tangent(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tangent of a dual tensor. None if it has none."""
    return torch._VF._unpack_dual(x, level=0)[1]


def has_tangent(x: torch.Tensor) -> bool:
    """Check whether a tensor has a tangent at the user's open dual level."""
    return forward_ad.unpack_dual(x).tangent is not None


@contextlib.contextmanager
def values() -> Iterator[None]:
    """Enter a context in which ops on real tensors run eagerly, outside of all modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextlib.contextmanager
def without_torch_functions() -> Iterator[None]:
    """Enter a context in which ops bypass all torch function modes."""
    with torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Enter a context in which ops run eagerly, outside of all modes and of all torch.func
    transforms.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Enter a context outside of all torch.func transforms."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def is_faking() -> bool:
    """Check whether a fake mode takes the next op. It does not while it runs one."""
    return torch._guards.active_fake_mode() is not None


def inside_transform() -> bool:
    """Check whether any torch.func transform is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed() -> bool:
    """Check whether torch.func's grad, jvp or vmap is active."""
    kinds = torch._C._functorch.TransformType
    return any(
        level.key() in (kinds.Grad, kinds.Jvp, kinds.Vmap)
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def is_forward_mode() -> bool:
    """Check whether torch.func's jvp is active."""
    jvp = torch._C._functorch.TransformType.Jvp
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == jvp for level in levels)


def derivative_levels() -> int:
    """Count the active torch.func transforms that differentiate: grad and jvp."""
    kinds = torch._C._functorch.TransformType
    return sum(
        level.key() in (kinds.Grad, kinds.Jvp)
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def level() -> int | None:
    """Return the level number of the innermost active torch.func transform. None without one."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return None if innermost is None else innermost.level()


def vmap_levels() -> frozenset[int]:
    """Return the level numbers of the active vmaps."""
    kind = torch._C._functorch.TransformType.Vmap
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return frozenset(level.level() for level in levels if level.key() == kind)


def samples_draw_apart() -> bool:
    """Check whether a vmap is active in which each sample draws random numbers of its own."""
    functorch = torch._C._functorch
    return any(
        functorch.CVmapInterpreterPtr(level).randomness() == functorch.RandomnessType.Different
        for level in functorch.get_interpreter_stack() or ()
        if level.key() == functorch.TransformType.Vmap
    )


def level_of(x: torch.Tensor) -> int:
    """Return the torch.func level at which a tensor is wrapped; -1 or less for an unwrapped
    tensor.
    """
    return torch._C._functorch.maybe_get_level(x)


def is_differentiating() -> bool:
    """Check whether the innermost torch.func transform is grad, and no torch function mode is
    still to handle the call.
    """
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is None or torch._C._len_torch_function_stack():
        return False
    return innermost.key() == torch._C._functorch.TransformType.Grad


def innermost_level() -> int:
    """Return the level number of the innermost torch.func transform, which must exist."""
    return torch._C._functorch.peek_interpreter_stack().level()


def mapped_index(size: int, level: int, device: str) -> torch.Tensor:
    """Make the index of the sample under the vmap at a level: a scalar tensor per sample."""
    with outside_transforms():  # else inner transforms take it for their own
        numbers = torch.arange(size, device=device)
    return torch._C._functorch._add_batch_dim(numbers, 0, level)


def fake_mode() -> FakeTensorMode:
    """Make a fake tensor mode for tracing, which refuses sizes and scalars that depend on
    values. Control flow reads its ShapeEnv.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with of_fakes():
        symbols = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols, static_shapes=True)


@contextlib.contextmanager
def metadata_per_thread() -> Iterator[None]:
    """Confine fx's node metadata to the capturing thread. Other threads record none, as if
    nothing were traced.
    """
    notes = torch.fx.traceback
    if notes.has_preserved_node_meta():  # another thread had turned them on before
        yield
        return
    with (
        overridden(notes, "has_preserved_node_meta", lambda _: False, _is_not_capturing),
        overridden(
            notes, "set_current_meta", lambda *_: contextlib.nullcontext(), _is_not_capturing
        ),
    ):
        yield


def trace_aten(
    fn: Callable[..., Any], args: Sequence[Any], decompositions: dict[Any, Any]
) -> torch.fx.GraphModule:
    """Trace a function of fake tensors with make_fx to one ATen graph whose nodes keep their
    source lines.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.fx.traceback.preserve_node_meta():
        traced = make_fx(fn, decompositions, tracing_mode="real")
        return traced(*args)


def traced_again(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a functional ATen graph in the active make_fx trace. Its ops are copied as they are,
    with their metadata, where the trace knows all inputs.

    Args:
        graph: from tensors to a list of tensors.
        inputs: fake tensors like its inputs.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    slots = [] if mode is None else [_slot_of(x, mode.tracer) for x in inputs]
    if mode is None or None in slots or not _are_plain(graph.graph):
        return torch.fx.Interpreter(graph).run(*inputs)
    *nodes, output = graph.graph.nodes
    feed = iter(slots)
    made: dict[Any, Any] = {node: next(feed) for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if node not in made:
            made[node] = mode.tracer.graph.node_copy(node, made.__getitem__)
    known = dict(zip(slots, inputs, strict=True))
    for node in output.all_input_nodes:
        if made[node] not in known:
            known[made[node]] = _tracked(node.meta["val"], made[node], mode.tracer)
    return [known[made[node]] for node in output.args[0]]


def call_copied(call: torch.fx.Node, args: tuple[Any, ...]) -> list[Any]:
    """Copy a call that returns a list of tensors into the active make_fx trace, as it is.

    Args:
        call: a node that only `getitem`s read. Its value has the layouts of its results.
        args: its arguments, with fake tensors that the trace knows.

    Returns:
        The results that are read, and None for the others.
    """
    read: list[Any] = [user.args[1] for user in call.users]
    return call_traced(call.target, {"val": call.meta["val"]}, args, read)


def call_traced(
    target: Any, meta: dict[str, Any], args: tuple[Any, ...], read: Iterable[int]
) -> list[Any]:
    """Add a call that returns a list of tensors to the active make_fx trace, without running it.

    Args:
        target: what is called.
        meta: the metadata of its node. Its value has the layouts of its results.
        args: its arguments, with fake tensors that the trace knows.
        read: the results to return; None for the others.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None, "call_traced runs only while make_fx traces"
    slot_of = lambda x: _slot_of(x, mode.tracer) if isinstance(x, torch.Tensor) else x
    slots: Any = torch.fx.node.map_aggregate(args, slot_of)
    assert not any(None in part for part in slots if isinstance(part, list)), (
        f"{target}: an operand"
    )
    graph, layouts = mode.tracer.graph, meta["val"]
    copied = graph.create_node("call_function", target, slots)
    copied.meta.update(meta)
    results: list[Any] = [None] * len(layouts)
    for k in read:
        item = graph.call_function(operator.getitem, (copied, k))
        item.meta.update(meta)
        results[k] = _tracked(layouts[k], item, mode.tracer)
    return results


def are_traced(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the active make_fx trace knows all of some tensors."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return mode is not None and all(_slot_of(x, mode.tracer) is not None for x in tensors)


def forget_values(tensors: Iterable[torch.Tensor]) -> None:
    """Make the active make_fx trace forget the values of tensors over memory outside of it, such
    as that of a NumPy array. It keeps those of one element, as if they were constants.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    for x in tensors:
        slot: Any = None if mode is None else get_proxy_slot(x, mode.tracer, None)
        if slot is not None:
            slot.constant = None


def _slot_of(x: torch.Tensor, tracer: Any) -> torch.fx.Node | None:
    """Return the node of a tensor in a trace; None if the trace does not know it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    slot = get_proxy_slot(x, tracer, None)
    return None if slot is None else slot.proxy.node


def _are_plain(graph: torch.fx.Graph) -> bool:
    """Return whether all that a graph calls are ATen ops, or ops that one process registered."""
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return all(
        node.op == "call_function" and isinstance(node.target, (OpOverload, type(operator.getitem)))
        for node in calls
    )


def _tracked(like: torch.Tensor, copy: torch.fx.Node, tracer: Any) -> torch.Tensor:
    """Return a fake tensor of the layout of another, which a trace knows as a node's value."""
    from torch.fx.experimental.proxy_tensor import track_tensor

    x = copy.meta["val"] = answers.fresh(like)
    track_tensor(x, torch.fx.Proxy(copy, tracer), constant=None, tracer=tracer)
    return x


@contextlib.contextmanager
def paused_tracing() -> Iterator[None]:
    """Pause the active make_fx trace, so that another one can run inside."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        yield


@functools.cache
def core_decompositions() -> dict[Any, Any]:
    """Return torch's decompositions into core ATen, and those of losses and batch norms, which
    core ATen leaves out. Ops that torch composes above autograd need none; listing them would
    take a seventh of a second.
    """
    from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

    aten = torch.ops.aten
    packets = (
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._softmax,
        aten._softmax_backward_data,
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional,
        aten._native_batch_norm_legit_no_training,
    )
    extra = [getattr(op, name) for op in packets for name in op.overloads()]
    core = _core_aten_decompositions_post_autograd()
    decomposed = (op for op in extra if op in decomposition_table)
    return {**core, **{op: decomposition_table[op] for op in decomposed}}


def kernels(op: OpOverload) -> set[str]:
    """Return the dispatch keys, of CPU, CUDA and autograd, under which an op has its own
    kernels.
    """
    keys = ("CPU", "CUDA", "Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return {key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)}


def custom_ops(*, of_torch: bool = True) -> list[Any]:
    """List the records of all ops made by torch.library.custom_op, with or without torch's own."""
    from torch._library.custom_ops import OPDEFS

    # A list at once: another thread that imports may add ops.
    every = [record for ref in OPDEFS.valuerefs() if (record := ref()) is not None]
    users = [r for r in every if not r._init_fn.__module__.startswith("torch.")]
    return every if of_torch else users


def twin(fn: types.FunctionType) -> types.FunctionType:
    """Return a function of torch under another identity, which Dynamo reads as it is."""
    copied = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__)
    return read_by_dynamo(copied)


def read_by_dynamo(fn: Function) -> Function:
    """Mark a function whose Python Dynamo traces during a capture, so its code must be simple
    enough. A file of such functions says so in its first lines.
    """
    fn.read_by_dynamo = True
    return fn
