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

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ShardError, call_site, is_ours
from .guards import Read, outside_reads
from .tracing import in_dual_level, inside_transform, is_fake, read_by_dynamo

_READING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "reading", default=False
)


@read_by_dynamo
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
        if symbols and was:
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


def keep_in_graph(fn: types.FunctionType) -> types.FunctionType:
    """Have Dynamo leave calls of this function whole wherever it reads for a capture."""
    fn.kept_in_graph = True
    return fn


def kept_in_graph(allowed: Callable[[Any], bool], fn: Any) -> bool:
    """Dynamo's question whether a function stays whole in the graph."""
    is_kept = isinstance(fn, types.FunctionType) and "kept_in_graph" in fn.__dict__
    return is_kept or allowed(fn)


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


@read_by_dynamo
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

    # torch.compiler.is_compiling() stays False: it is the process's, and other threads'
    # optimizers ask for it
    with get_metrics_context():
        fn = _with_own_globals(fn)
        out = fullgraph_capture(fn, args, {})
        reads = outside_reads(out, fn.__globals__)
    return create_fx_graph_from_captured_output(out, fn, args, {}), reads


@contextlib.contextmanager
def reading_settings() -> Iterator[None]:
    """Dynamo's settings for a capture; they are of this thread (torch 2.13).

    Shapes stay numbers: Dynamo would make symbols of them once it has read two functions of
    different shapes.
    """
    wanted = {
        "replay_side_effects": False,
        "side_effect_replay_policy": "error",
        "automatic_dynamic_shapes": False,
    }
    config = torch._dynamo.config
    known = {name: x for name, x in wanted.items() if hasattr(config, name)}
    with config.patch(known):
        yield


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
    return inside and not str(module).startswith(
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


def faked(make_fake: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """How Dynamo makes a fake of what it meets, also of views and of results of autograd."""
    from torch.utils._python_dispatch import _disable_current_modes

    is_plain = not isinstance(x, torch.Tensor) or is_fake(x)
    if not is_plain:
        is_plain = x.is_leaf and not x._is_view() and not in_dual_level()
    with contextlib.nullcontext() if is_plain else _disable_current_modes():
        return make_fake(x, *args, **kwargs)


def fresh(
    read: Callable[..., Any], tensor: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    """Dynamo's reading of a tensor, whose shape and strides may have changed in place."""
    fake = tensor.proxy.node.meta.get("example_value")
    if tensor._size is not None and is_fake(fake):
        noted = tuple(tensor._size), tensor.stride
        if noted != (tuple(fake.shape), fake.stride()):
            tensor.synchronize_attributes(tx)
    return read(tensor, tx, *args, **kwargs)


def intact(
    apply: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """An autograd.Function left whole under torch.func, where its own derivatives count."""
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import builder

    if not inside_transform():
        return apply(function, tx, args, kwargs)
    given = proxy_args_kwargs(args, kwargs)
    proxy = tx.output.create_proxy("call_function", function.fn_cls.apply, *given)
    return builder.wrap_fx_proxy(tx, proxy)


def _refuse(text: str | None) -> None:
    """Stop Dynamo with a text that `explained` knows; not where there is none."""
    from torch._dynamo import exc

    if text:
        raise exc.UserError(exc.UserErrorType.ANTI_PATTERN, text)


def refused_rank_call(
    call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call of a function of torch's, which may be the question for the rank."""
    _refuse(ASKS_RANK if function.value is dist.get_rank else None)
    return call(function, *args, **kwargs)


def refused_rank_method(
    call: Callable[..., Any], owner: Any, tx: Any, name: str, *args: Any, **kw: Any
) -> Any:
    """A call of a method, which may be a mesh's or a group's question for the rank."""
    _refuse(ASKS_RANK if name in RANK else None)
    return call(owner, tx, name, *args, **kw)


def refused_call(
    call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call of any function or class, which may make a DTensor or communicate."""
    called = getattr(function, "fn", None) or getattr(function, "value", None)
    _refuse(refusal(called))
    return call(function, *args, **kwargs)


def refused_collective(_: Any, function: Any, *args: Any, **kwargs: Any) -> None:
    """A call of a collective of torch.distributed that Dynamo would rewrite."""
    _refuse(f"{COMMUNICATES} {function.fn.__name__};")


def refused_cast(method: Callable[..., Any], tensor: Any, tx: Any, cls: Any) -> Any:
    """tensor.as_subclass(cls), which makes a tensor of another class."""
    _refuse(refusal(getattr(cls, "value", None)))
    return method(tensor, tx, cls)


def refused_class(wrap: Callable[..., Any], builder: Any, value: Any) -> Any:
    """Dynamo's first sight of a tensor, which may be of a class of its own."""
    kind = type(value).__name__
    _refuse(f"{FOREIGN} {kind};" if is_foreign(value) else None)
    return wrap(builder, value)


def is_substituted(
    table: dict[Any, Any], known: Callable[[Any], bool], fn: Any
) -> bool:
    """Dynamo's question whether it reads another function in the place of one."""
    return any(fn is original for original in table) or known(fn)


def substitutes(
    table: dict[Any, Any], known: Callable[[], dict[Any, Any]]
) -> dict[Any, Any]:
    """What Dynamo reads in the place of functions; what is called eagerly stays as it is."""
    return {**known(), **{fn: _handler(ours) for fn, ours in table.items()}}


@functools.cache
def _handler(ours: Callable[..., Any]) -> Any:
    """A substitute in the form in which Dynamo looks for it."""
    handler = functools.partial(ours)
    handler.__torch_dynamo_polyfill__ = ours
    return handler


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
