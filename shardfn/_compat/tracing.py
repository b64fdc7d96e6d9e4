"""Fake tensors, make_fx, decompositions, and the levels of torch.func."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
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
base_of = operator.attrgetter("_base")  # of a view: the tensor whose memory it shares

__all__ = ["FakeTensorMode", "OpOverload", "is_fake"]

Function = TypeVar("Function", bound=Callable[..., Any])
DATA_DEPENDENT = DataDependentOutputException

DYNAMIC_SHAPE = DynamicOutputShapeException
OF_TRACING = ("torch._dynamo.", "torch._subclasses.", "torch._guards", "torch.fx.")


def is_of_tracing(error: BaseException) -> bool:
    """Whether an error is of a class that only torch's tracing raises, or that of torch.func for an
    op without a rule under a transform.
    """
    if isinstance(error, KeyError) and error.args:
        return type(error.args[0]).__name__ == "TransformType"
    return type(error).__module__.startswith(OF_TRACING)


def is_observed(error: BaseException) -> bool:
    """Whether an error of Dynamo's stands for an exception that Python raises in what it reads."""
    return type(error.__cause__).__name__.startswith("Observed")


def _is_other() -> bool:
    return not is_capturing()


def _is_of_others(record: logging.LogRecord) -> bool:
    return _is_other()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's logs in this thread, where shardfn raises an error of its own."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    is_first = _is_of_others not in logger.filters
    logger.addFilter(_is_of_others)
    try:
        yield
    finally:
        if is_first:
            logger.removeFilter(_is_of_others)


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Disable the user's saved-tensor hooks. A call saves no tensors, and torch.func refuses to
    run under such hooks.
    """
    hooks, aside = torch._C._autograd, []
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        aside.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(aside):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """Leave all torch.func levels that a failed trace has entered."""
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth, dual = functorch.get_dynamic_layer_stack_depth(), in_dual_level()
    try:
        yield
    except BaseException:
        with contextlib.suppress(
            RuntimeError
        ):  # torch asserts when the last level is left (torch 2.11)
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        with contextlib.suppress(RuntimeError):
            if not dual:  # else it is the user's
                torch._C._exit_dual_level(level=0)
        if depth == 0:
            functorch.set_inplace_requires_grad_allowed(False)
            autograd._saved_tensors_hooks_enable()
        raise


@contextlib.contextmanager
def dual_level_counted() -> Iterator[None]:
    """Tell torch.func.jvp of a level that a graph has opened. torch counts levels in Python
    only.
    """
    from torch._functorch import eager_transforms

    with (
        mock.patch.object(eager_transforms, "JVP_NESTING", 1),
        mock.patch.object(forward_ad, "_current_level", 0),
    ):
        yield


def already_open() -> None:
    """Closes a level of dual numbers that other code has opened: does nothing."""


def open_dual() -> Callable[[], None]:
    """Open the level of dual numbers, if it is not open. Returns a function that closes it."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return already_open
    return functools.partial(torch._C._exit_dual_level, level=level)


def is_wrapped(x: Any) -> bool:
    """Whether a transform of torch.func follows a tensor."""
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """The tensor inside of one that transforms of torch.func follow."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def in_dual_level() -> bool:
    """Whether the user has opened a level of forward-mode AD (torch.autograd.forward_ad)."""
    return forward_ad._current_level >= 0


def carries_tangent(x: Any) -> bool:
    """Whether forward mode follows a tensor, at any level of torch.func. A graph opens levels
    that torch.autograd.forward_ad does not count.
    """
    functorch = torch._C._functorch
    while is_wrapped(x):
        if not functorch.is_batchedtensor(x) and _tangent(x) is not None:
            return True
        x = functorch.get_unwrapped(x)
    return isinstance(x, torch.Tensor) and _tangent(x) is not None


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether reverse mode follows a tensor, at any level of torch.func."""
    while is_wrapped(x):
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def _tangent(x: torch.Tensor) -> torch.Tensor | None:
    return torch._VF._unpack_dual(x, level=0)[1]


def has_tangent(x: torch.Tensor) -> bool:
    """Whether a tensor is a dual number of the open level."""
    return forward_ad.unpack_dual(x).tangent is not None


@contextlib.contextmanager
def values() -> Iterator[None]:
    """A context in which ops on tensors with values run as if nothing were traced."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextlib.contextmanager
def without_torch_functions() -> Iterator[None]:
    """A context in which ops pass by all torch function modes."""
    with torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """A context in which ops run as if nothing were traced, and no torch.func transform active."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def inside_transform() -> bool:
    """Whether this call is inside a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed() -> bool:
    """Whether a derivative or a vmap of torch.func is around this call."""
    kinds = torch._C._functorch.TransformType
    return any(
        level.key() in (kinds.Grad, kinds.Jvp, kinds.Vmap)
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def derivative_levels() -> int:
    """The number of torch.func transforms around this call that differentiate."""
    kinds = torch._C._functorch.TransformType
    return sum(
        level.key() in (kinds.Grad, kinds.Jvp)
        for level in torch._C._functorch.get_interpreter_stack() or ()
    )


def level() -> int | None:
    """The level of the innermost active torch.func transform, if there is one."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return None if innermost is None else innermost.level()


def level_of(x: torch.Tensor) -> int:
    """The level of the torch.func transform that a tensor belongs to, or -1 or less for a plain
    tensor.
    """
    return torch._C._functorch.maybe_get_level(x)


def is_differentiating() -> bool:
    """Whether the innermost active torch.func transform is grad, and no torch function mode is
    still to handle the call.
    """
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is None or torch._C._len_torch_function_stack():
        return False
    return innermost.key() == torch._C._functorch.TransformType.Grad


def innermost_level() -> int:
    """The level of the innermost active torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack().level()


def mapped_index(size: int, level: int, device: str) -> torch.Tensor:
    """The index of the sample of the vmap at this level: one scalar for each sample."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():  # else inner transforms take it for their own
        numbers = torch.arange(size, device=device)
    return torch._C._functorch._add_batch_dim(numbers, 0, level)


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode for tracing. Loops ask it for symbols to ignore. It refuses sizes and
    scalars that depend on values.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with of_fakes():
        symbols = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols, static_shapes=True)


@contextlib.contextmanager
def notes_kept_apart() -> Iterator[None]:
    """Keep fx's metadata of a capture to its thread. Other threads record none, as if nothing
    were traced.
    """
    notes = torch.fx.traceback
    if notes.has_preserved_node_meta():  # another thread had turned them on before
        yield
        return
    with (
        overridden(notes, "has_preserved_node_meta", lambda _: False, _is_other),
        overridden(notes, "set_current_meta", lambda *_: contextlib.nullcontext(), _is_other),
    ):
        yield


def trace_aten(
    fn: Callable[..., Any], args: Sequence[Any], decompositions: dict[Any, Any]
) -> torch.fx.GraphModule:
    """Flatten a function of fake tensors to one ATen graph whose nodes keep their source lines."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.fx.traceback.preserve_node_meta():
        traced = make_fx(fn, decompositions, tracing_mode="real")
        return traced(*args)


@contextlib.contextmanager
def paused_tracing() -> Iterator[None]:
    """Pause the active trace, so that another one can run inside."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        yield


@functools.cache
def core_decompositions() -> dict[Any, Any]:
    """torch's decompositions into core ATen, and those of losses and batch norms, which core
    ATen does not decompose. Ops that torch composes of others above autograd need none; listing
    them would take a seventh of a second.
    """
    from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

    aten = torch.ops.aten
    whole = (
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
    extra = [getattr(op, name) for op in whole for name in op.overloads()]
    found = _core_aten_decompositions_post_autograd()
    known = (op for op in extra if op in decomposition_table)
    return {**found, **{op: decomposition_table[op] for op in known}}


def kernels(op: OpOverload) -> set[str]:
    """The dispatch keys, of these, for which an op has kernels of its own."""
    keys = ("CPU", "CUDA", "Autograd", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return {key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)}


def custom_ops(*, of_torch: bool = True) -> list[Any]:
    """The records of all ops that torch.library.custom_op made, with torch's own or without."""
    from torch._library.custom_ops import OPDEFS

    # A list at once: another thread that imports may add ops.
    every = [record for ref in OPDEFS.valuerefs() if (record := ref()) is not None]
    own = [r for r in every if not r._init_fn.__module__.startswith("torch.")]
    return every if of_torch else own


def read_by_dynamo(fn: Function) -> Function:
    """Mark a function that Dynamo reads while it captures a user's: it is written in the Python
    that Dynamo can read. A file of such functions says so in its first lines.
    """
    fn.read_by_dynamo = True
    return fn
