"""How Dynamo reads Python: its mistakes mended, what it leaves whole, what it takes for
something else.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ShardError, call_site, is_ours
from .guards import Read, outside_reads
from .tracing import in_dual_level, inside_transform, is_fake

_READING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "reading", default=False
)


def is_tracing() -> bool:
    """Whether this call is being captured: read by Dynamo, or run by a module that Dynamo has
    left whole.
    """
    return torch.compiler.is_dynamo_compiling() or _READING.get()


is_in_dynamo = (
    torch.compiler.is_dynamo_compiling
)  # whether Dynamo itself reads this call


def is_reading() -> bool:
    """Whether this call is of a module that Dynamo has left whole, in this thread."""
    return _READING.get()


@contextlib.contextmanager
def reading() -> Iterator[Any]:
    """What runs inside is being captured, though Dynamo does not read it.

    Gives Dynamo's fake mode where Dynamo runs it. That mode takes no tensor that Dynamo has not
    seen, and would make a symbol of a size that depends on values, or of a value itself; inside
    it refuses them, as capture's own does.
    """
    from torch._guards import active_fake_mode

    token, mode = _READING.set(True), active_fake_mode()
    mode = None if mode is None or mode.allow_non_fake_inputs else mode
    symbols = mode and mode.shape_env
    was = symbols and symbols.settings
    try:
        if symbols:
            symbols.settings = dataclasses.replace(
                was,
                allow_scalar_outputs=False,
                allow_dynamic_output_shape_ops=False,
            )
        yield mode
    finally:
        _READING.reset(token)
        if symbols:
            symbols.settings = was


def keep_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo leave calls of this function whole."""
    return torch._dynamo.allow_in_graph(fn)


def constant_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo call this function of constants as it is, and take its result for a constant.

    What torch.compiler.assume_constant_result does, without importing torch._dynamo, which takes
    seconds (torch 2.11 to 2.15). An error of ours that it raises gets the line that Dynamo
    reads, or that calls: every check of ours that runs under Dynamo is such a function.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except ShardError as error:
            error.locate(_read_line() or call_site())
            raise

    checked._dynamo_marked_constant = True
    return checked


def _read_line() -> str | None:
    """The innermost line of the user's that Dynamo is reading; None where it reads nothing."""
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return None
    frames = [f for f in TracingContext.extract_stack() if not is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def wrapped(fn: Callable[..., Any], *xs: torch.Tensor) -> Any:
    """One run of a function that Dynamo reads as a graph of its own, a call of
    torch.ops.higher_order.wrap.
    """
    return torch.ops.higher_order.wrap(fn, *xs)


def capture_python(
    fn: types.FunctionType, args: tuple[Any, ...]
) -> tuple[torch.fx.GraphModule, tuple[Read, ...]]:
    """Dynamo's reading of a Python function: one graph, no break, no side effect replayed.

    With it comes what the function has read that is not in its arguments.
    """
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.utils import get_metrics_context

    # shapes stay numbers: Dynamo would make symbols of them once it has read two functions of
    # different shapes
    wanted = {
        "replay_side_effects": False,
        "side_effect_replay_policy": "error",
        "automatic_dynamic_shapes": False,
    }
    known = {
        name: value
        for name, value in wanted.items()
        if hasattr(torch._dynamo.config, name)
    }
    # torch.compiler.is_compiling() stays False: it is the process's, and other threads'
    # optimizers ask for it
    with torch._dynamo.config.patch(known), get_metrics_context(), _mended():
        fn = _with_own_globals(fn)
        out = fullgraph_capture(fn, args, {})
        reads = outside_reads(out, fn.__globals__)
    return create_fx_graph_from_captured_output(out, fn, args, {}), reads


def _with_own_globals(fn: types.FunctionType) -> types.FunctionType:
    """The function over a copy of its globals: Dynamo leaves all that it made among them, and a
    module would keep it for good.
    """
    return types.FunctionType(
        fn.__code__,
        dict(fn.__globals__),
        fn.__name__,
        fn.__defaults__,
        fn.__closure__,
    )


ASKS_RANK = "asks which rank it runs on"

MAKES_DTENSOR = "makes a DTensor or takes one apart"

FOREIGN = "closes over a tensor of class"

MADE = "makes a tensor of class"

COMMUNICATES = "communicates by itself:"

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def outside_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse this function, which makes DTensors, where Dynamo reads a call of it."""
    fn.makes_dtensors = True
    return fn


def makes_dtensors(fn: Any) -> bool:
    """Whether a function is one of torch.distributed.tensor, but for the placements themselves,
    or says that it does.
    """
    if getattr(fn, "makes_dtensors", False) is True:
        return True
    module = getattr(fn, "__module__", None)
    inside = isinstance(module, str) and module.startswith(
        "torch.distributed.tensor"
    )
    return inside and not module.startswith(
        "torch.distributed.tensor.placement_types"
    )


def is_foreign(x: Any) -> bool:
    """Whether a tensor is of a class of its own: a DTensor, two tensors in one, a subclass of a
    user's.
    """
    kind = type(x)
    if (
        not isinstance(x, torch.Tensor)
        or kind in PLAIN
        or kind.__module__.startswith("shardfn.")
    ):
        return False
    if isinstance(
        x, torch.nn.Parameter
    ):  # a name for a kind of parameter, which changes nothing
        return kind.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return is_traceable_wrapper_subclass(x) or not is_fake(x)


def holds_tensors(x: torch.Tensor) -> bool:
    """Whether a tensor is made of other tensors."""
    return is_traceable_wrapper_subclass(x)


def refusal(fn: Any) -> str | None:
    """Why a function that is captured may not call this function or class; None where it may."""
    if makes_dtensors(fn):
        return MAKES_DTENSOR
    if isinstance(fn, type) and issubclass(fn, torch.Tensor) and fn not in PLAIN:
        return f"{MADE} {fn.__name__};"
    collective = (
        getattr(fn, "__module__", None)
        == "torch.distributed._functional_collectives"
    )
    return f"{COMMUNICATES} {fn.__name__};" if collective else None


RANK = {
    "get_rank",
    "get_local_rank",
    "get_coordinate",
    "rank",
}  # of torch.distributed, a mesh, a group


Change = tuple[
    Any, str, Callable[..., Any]
]  # a class of Dynamo's, a method, what takes its place


@contextlib.contextmanager
def _mended() -> Iterator[None]:
    """Dynamo without five mistakes (torch 2.13), and with refusals of ours.

    It answers with a shape from before squeeze_, t_ and their kin, takes the number of the rank
    that traces for a constant of every rank's program, looks into an autograd.Function under
    torch.func's transforms, where its own backward and jvp count, and makes a fake of another
    mode of a result of autograd and of a view that is closed over.
    """
    from torch._dynamo.variables import builder

    with contextlib.ExitStack() as stack:
        faked = _faked(builder.wrap_to_fake_tensor_and_record)
        stack.enter_context(
            mock.patch.object(builder, "wrap_to_fake_tensor_and_record", faked)
        )
        for cls, name, new in (*_corrections(), *_refusals()):
            method = functools.partialmethod(new, getattr(cls, name))
            stack.enter_context(mock.patch.object(cls, name, method))
        yield


def _faked(make_fake: Callable[..., Any]) -> Callable[..., Any]:
    """How Dynamo makes a fake of what it meets, also of views and of results of autograd."""
    from torch.utils._python_dispatch import _disable_current_modes

    def is_plain(x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or is_fake(x):
            return True
        return x.is_leaf and not x._is_view() and not in_dual_level()

    def faked(x: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if is_plain(x) else _disable_current_modes():
            return make_fake(x, *args, **kwargs)

    return faked


def _corrections() -> list[Change]:
    """Methods of Dynamo's that answer wrongly, as they are to answer."""
    from torch._dynamo import variables
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import builder

    def fresh(
        self: Any, read: Callable[..., Any], tx: Any, *args: Any, **kwargs: Any
    ) -> Any:
        fake = self.proxy.node.meta.get("example_value")
        known = (
            (tuple(self._size), self.stride)
            if self._size is not None and is_fake(fake)
            else None
        )
        if known is not None and known != (tuple(fake.shape), fake.stride()):
            self.synchronize_attributes(tx)
        return read(self, tx, *args, **kwargs)

    def intact(
        self: Any, apply: Callable[..., Any], tx: Any, args: Any, kwargs: Any
    ) -> Any:
        if not inside_transform():
            return apply(self, tx, args, kwargs)
        given = proxy_args_kwargs(args, kwargs)
        proxy = tx.output.create_proxy("call_function", self.fn_cls.apply, *given)
        return builder.wrap_fx_proxy(tx, proxy)

    reads = ("var_getattr", "call_method", "unpack_var_sequence")
    changes: list[Change] = [
        (variables.TensorVariable, name, fresh) for name in reads
    ]
    return [*changes, (variables.AutogradFunctionVariable, "call_apply", intact)]


def _refusals() -> list[Change]:
    """Methods of Dynamo's that are to refuse what no captured function may do."""
    from torch._dynamo import exc, variables
    from torch._dynamo.variables import (
        builder,
        distributed,
        functions,
        script_object,
    )

    def refuse(text: str | None) -> None:
        if text:
            raise exc.UserError(exc.UserErrorType.ANTI_PATTERN, text)

    def untold(
        self: Any,
        call: Callable[..., Any],
        tx: Any,
        name: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        asks = (
            (name in RANK) if isinstance(name, str) else self.value is dist.get_rank
        )
        refuse(ASKS_RANK if asks else None)
        return call(self, tx, name, *args, **kwargs)

    def own(
        self: Any, call: Callable[..., Any], tx: Any, *args: Any, **kwargs: Any
    ) -> Any:
        refuse(refusal(getattr(self, "fn", None) or getattr(self, "value", None)))
        return call(self, tx, *args, **kwargs)

    def alone(
        self: Any, call: Callable[..., Any], tx: Any, *args: Any, **kwargs: Any
    ) -> Any:
        refuse(f"{COMMUNICATES} {self.fn.__name__};")

    def cast(self: Any, method: Callable[..., Any], tx: Any, cls: Any) -> Any:
        refuse(refusal(getattr(cls, "value", None)))
        return method(self, tx, cls)

    def plain(self: Any, wrap: Callable[..., Any], value: Any) -> Any:
        refuse(f"{FOREIGN} {type(value).__name__};" if is_foreign(value) else None)
        return wrap(self, value)

    objects = (
        getattr(script_object, "TorchScriptObjectVariable", None),
        getattr(distributed, "DeviceMeshVariable", None),
    )
    called = (
        variables.TorchInGraphFunctionVariable,
        variables.UserFunctionVariable,
        variables.SkipFunctionVariable,
        variables.UserDefinedClassVariable,
        builder.TensorSubclassVariable,
    )
    return [
        (variables.TorchInGraphFunctionVariable, "call_function", untold),
        (variables.TensorVariable, "method_as_subclass", cast),
        (functions.CollectiveFunctionRewriteVariable, "call_function", alone),
        *((cls, "call_function", own) for cls in called),
        (builder.VariableBuilder, "wrap_tensor", plain),
        *((cls, "call_method", untold) for cls in objects if cls),
    ]


@functools.cache
def _substitute(original: Any, ours: Any) -> None:
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map().pop(
        original, None
    )  # it takes no second rule for what it calls as it is
    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(ours)


def substitute(table: dict[Any, Any]) -> None:
    """Have Dynamo read other functions in the place of some; what is called eagerly stays as it
    is.
    """
    for original, ours in table.items():
        _substitute(original, ours)


def python_results(graph: torch.fx.GraphModule, outputs: Any) -> Any:
    """What the function that `capture_python` read returns, given what its graph does; call
    `process_inputs` first.

    torch does this with dispatch turned off (2.13), where a result that Dynamo makes of an
    argument itself, x.T, is lost.
    """
    codegen = graph.graph._codegen
    rebuild, inputs = codegen.dynamo_bytecode_unflatten, codegen._inputs
    if not hasattr(rebuild, "out"):
        return codegen.process_outputs(outputs)
    args, kwargs = rebuild.input_processor(inputs)
    run = rebuild.out.forward_callable(
        compiled_fn=lambda *_: outputs, extra_globals=rebuild.f_globals
    )
    return torch.compiler.disable(run)(*args, **kwargs)
