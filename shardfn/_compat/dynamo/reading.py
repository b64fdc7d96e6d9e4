"""How Dynamo traces Python: fixes, functions that it leaves as one call, and functions that it
replaces.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.autograd import forward_ad

from ...errors import ShardError, call_site, is_ours
from ..fakes import answers
from ..threads import is_capturing
from ..tracing import has_tangent, in_dual_level, inside_transform, is_fake, read_by_dynamo
from . import argument_facts, derived_flags, sizes
from .guards import Read, outside_reads
from .refused import refuse_attribute
from .tensor_classes import holds_tensors

LIKE_TENSOR = torch.as_tensor, torch.asarray
OF_MATH = "a tensor's value in math"

_one_thread = threading.RLock()
_READING: contextvars.ContextVar[bool] = contextvars.ContextVar("reading", default=False)


@read_by_dynamo
def is_tracing() -> bool:
    """Whether this call is being captured: traced by Dynamo, or run by a module that Dynamo
    leaves as one call.
    """
    return torch.compiler.is_dynamo_compiling() or _READING.get()


@read_by_dynamo
def is_in_dynamo() -> bool:
    """Whether Dynamo itself traces this call, in a capture. A torch.compile of the user's, which
    does not replay its graph as a capture does, is none.
    """
    return torch.compiler.is_dynamo_compiling() and _is_of_capture()


def is_reading() -> bool:
    """Whether this call runs in a module that Dynamo leaves as one call, in this thread."""
    return _READING.get()


@contextlib.contextmanager
def reading() -> Iterator[Any]:
    """A context for code that is being captured although Dynamo does not trace it.

    Yields Dynamo's fake mode if Dynamo runs the code. That mode accepts only tensors that
    Dynamo has seen. By default it makes symbols of values and of sizes that depend on values.
    Inside this context it refuses both, as capture's own mode does.
    """
    from torch._guards import active_fake_mode

    token, mode = _READING.set(True), active_fake_mode()
    mode = None if mode is None or mode.allow_non_fake_inputs else mode
    symbols = mode and mode.shape_env
    was = symbols and symbols.settings
    try:
        if symbols and was:
            symbols.settings = dataclasses.replace(
                was, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
            )
        yield mode
    finally:
        _READING.reset(token)
        if symbols:
            symbols.settings = was


@contextlib.contextmanager
def not_reading() -> Iterator[None]:
    """Enter a context for code that runs as outside of a capture."""
    token = _READING.set(False)
    try:
        yield
    finally:
        _READING.reset(token)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context that runs functions which torch.compile has wrapped as Python, of one thread at a
    time. Under modes of ours Dynamo would skip the code of such a function, and from then on for
    the life of the process.
    """
    from torch._C._dynamo import eval_frame

    is_compiling = eval_frame.get_eval_frame_callback() not in (None, False)
    with (
        _one_thread,
        contextlib.nullcontext() if is_compiling else torch.compiler.set_stance("force_eager"),
    ):
        yield


def keep_in_graph(fn: types.FunctionType) -> types.FunctionType:
    """Have Dynamo keep calls of this function as graph nodes in every capture."""
    fn.kept_in_graph = True
    return fn


def kept_in_graph(allowed: Callable[[Any], bool], fn: Any) -> bool:
    """Patch Dynamo's check whether calls of a function stay in the graph."""
    is_kept = isinstance(fn, types.FunctionType) and "kept_in_graph" in fn.__dict__
    return is_kept or allowed(fn)


def constant_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo run this function on constants while it traces, and treat the result as a
    constant.

    Equivalent to torch.compiler.assume_constant_result without importing torch._dynamo, which
    takes seconds (torch 2.11 to 2.15). A ShardError that it raises gets the line that Dynamo is
    tracing, or that of the call. Every check that runs under Dynamo is such a function.
    """

    checked: Any = located(fn)
    checked._dynamo_marked_constant = True
    return checked


def located(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Give a ShardError that a function raises the line that Dynamo is tracing, or that of the
    call.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except ShardError as error:
            error.locate(sizes.user_line() or call_site())
            raise

    return checked


@constant_in_graph
def _is_of_capture() -> bool:
    """Whether Dynamo traces for a capture."""
    return is_capturing()


@read_by_dynamo
def wrapped(fn: Callable[..., Any], *xs: torch.Tensor) -> Any:
    """Trace a function into a subgraph, as a call of torch.ops.higher_order.wrap."""
    return torch.ops.higher_order.wrap(fn, *xs)


def capture_python(
    fn: types.FunctionType, args: tuple[Any, ...], inputs: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, tuple[Read, ...], Callable[[], sizes.Sizes]]:
    """Trace a Python function with Dynamo into one graph, without graph breaks or replayed side
    effects.

    Also returns the function's reads outside of its arguments, and a function that returns the
    symbols for sizes of these inputs, once all that looks at the graph has done so.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.utils import get_metrics_context

    # Dynamo would read the globals of a module of the same name that has been imported before
    symbolic_convert._import_module.cache_clear()

    # torch.compiler.is_compiling() stays False: it is global to the process, and optimizers in
    # other threads check it
    with get_metrics_context(), sizes.noting() as notes:
        fn = _with_own_globals(fn)
        out: Any = fullgraph_capture(fn, args, {})
        reads = outside_reads(out, fn.__globals__)
    symbols = functools.partial(sizes.sizes_of, out, inputs, notes)
    return create_fx_graph_from_captured_output(out, fn, args, {}), reads, symbols


def _with_own_globals(fn: types.FunctionType) -> types.FunctionType:
    """Copy a function with a copy of its globals, where Dynamo leaves objects behind."""
    return types.FunctionType(
        fn.__code__, dict(fn.__globals__), fn.__name__, fn.__defaults__, fn.__closure__
    )


def faked(device: str, make_fake: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch how Dynamo makes fake tensors, also of views, autograd results and wrapper subclasses.

    Args:
        device: of the program, and so of tensors on the meta device.
        make_fake: Dynamo's function.
        x: the tensor.
        args: others of Dynamo's.
        kwargs: others of Dynamo's.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    is_inner = kwargs.get("parent_context") is not None  # of a wrapper tensor
    is_argument = argument_facts.argument_of(x) is not None and not is_inner
    if is_argument and sizes.is_of_numbers(x) and not inside_transform():
        fake = _as_input(x, args[0] if args else kwargs["tx"], kwargs["source"])
        sizes.note(x, fake)
        argument_facts.pass_on(x, fake)
        return fake
    is_plain = not isinstance(x, torch.Tensor) or is_fake(x)
    if not is_plain:
        is_plain = x.is_leaf and not x._is_view() and not in_dual_level()
        is_plain = is_plain and not holds_tensors(x)
    with contextlib.nullcontext() if is_plain else _disable_current_modes():
        fake = make_fake(x, *args, **kwargs)
    sizes.note(x, fake)
    argument_facts.pass_on(x, fake)
    if not isinstance(fake, torch.Tensor) or not fake.is_meta or not is_fake(fake):
        return fake
    with fake.fake_mode:
        return torch.empty_like(fake, device=device)


def _as_input(x: Any, tx: Any, source: Any) -> Any:
    """Make the fake tensor that Dynamo reads in place of one of ours, whose sizes are numbers.
    Torch converts each size, stride and attribute in Python.
    """
    fake = answers.fresh(x, tx.fake_mode)
    layout = {"size": fake.size(), "stride": fake.stride()}
    tx.output.input_source_to_sizes_strides[source] = layout
    return fake


def dual_wrapped(wrap: Callable[..., Any], builder: Any, x: Any) -> Any:
    """Patch Dynamo's wrapping of a new tensor: ignore its tangent, which torch 2.15 refuses."""
    is_dual = isinstance(x, torch.Tensor) and in_dual_level() and has_tangent(x)
    closed = mock.patch.object(forward_ad, "_current_level", -1)
    with closed if is_dual else contextlib.nullcontext():
        return wrap(builder, x)


def fresh(read: Callable[..., Any], tensor: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch Dynamo's read of a tensor that may have changed shape in place, or begun to require
    grad.
    """
    from torch._dynamo.variables.base import VariableTracker

    fake = tensor.proxy.node.meta.get("example_value")
    name = args[0] if args else None
    refuse_attribute(fake, name)
    if name == "data" and is_fake(fake):
        return tensor.call_method(tx, "detach", [], {})  # torch.func has no .data
    is_flag = name == "requires_grad"
    if is_flag and (getattr(fake, "requires_grad", False) or _is_followed(tensor, tx)):
        return VariableTracker.build(tx, True)
    if len(args) == 1 and not is_ours(tx.f_code.co_filename):
        told = argument_facts.answer(fake, name)
        if told is NotImplemented and argument_facts.argument_of(fake) is None:
            told = derived_flags.answer_derived(tensor, tx, name)
        if told is not NotImplemented:
            return VariableTracker.build(tx, told)
    if tensor._size is not None and is_fake(fake):
        noted = tuple(tensor._size), tensor.stride
        if noted != (tuple(fake.shape), fake.stride()):
            tensor.synchronize_attributes(tx)
    return read(tensor, tx, *args, **kwargs)


def _is_followed(tensor: Any, tx: Any) -> bool:
    """Return whether a tensor depends on one that has begun to require grad, not only through
    detach.
    """
    nodes = tx.output.graph.find_nodes(op="call_function", target=followed_from_here)
    marked = {node.args[0] for node in nodes}
    if not marked or not tensor.dtype.is_floating_point:
        return False
    seen = {tensor.proxy.node}
    for node in (queue := [*seen]):
        if node.target not in ("detach", "detach_"):
            queue += [x for x in node.all_input_nodes if x not in seen]
            seen.update(node.all_input_nodes)
    return not marked.isdisjoint(seen)


def fresh_or_random(
    call: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's call of a tensor method, for tensors changed in place and for `random_`."""
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import builder

    if name != "random_":
        return fresh(call, tensor, tx, name, args, kwargs)
    given = proxy_args_kwargs([tensor, *args], kwargs)
    proxy = tx.output.create_proxy("call_method", name, *given)
    return builder.wrap_fx_proxy(tx, proxy)


def grad_required(
    call: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Patch `requires_grad_` in Dynamo: from there on gradients that the function itself takes
    follow the tensor.
    """
    is_allowed = torch._C._functorch.get_inplace_requires_grad_allowed()
    if name != "requires_grad_" or is_allowed:
        return call(tensor, tx, name, args, kwargs)
    given = [*args, *kwargs.values()]
    if not all(value.as_python_constant() for value in given) or _changes_outside(tensor):
        return call(tensor, tx, name, args, kwargs)
    return _begun(tensor, tx)


def _changes_outside(tensor: Any) -> bool:
    """Check whether a tensor that is to require grad is closed over, and does not do so yet."""
    source = tensor.source
    while getattr(source, "base", None) is not None:
        source = source.base
    is_argument = getattr(source, "local_name", "fn") != "fn"
    is_outside = source is not None and not is_argument
    return is_outside and not tensor.as_proxy().node.meta["example_value"].requires_grad


def _begun(tensor: Any, tx: Any) -> Any:
    """Mark a tensor as requiring grad from here on."""
    proxy = tensor.as_proxy()
    fake = proxy.node.meta["example_value"]
    if not fake.requires_grad:
        tx.output.create_proxy("call_function", followed_from_here, (proxy,), {})
        tensor.requires_grad = True
        if not inside_transform() and not tensor.source:
            fake.requires_grad_()
    return tensor


def flag_set(call: Callable[..., Any], builtin: Any, tx: Any, owner: Any, name: Any, x: Any) -> Any:
    """Patch Dynamo's setattr for `x.requires_grad = True`, and `= False` where it is."""
    is_flag = owner.is_tensor() and name.as_python_constant() == "requires_grad"
    value = x.as_python_constant() if is_flag and x.is_python_constant() else None
    if value is True and not _changes_outside(owner):
        _begun(owner, tx)
        return x
    if value is False:
        read = getattr(owner, "var_getattr", None) or owner.tp_getattro_impl  # torch 2.13, 2.15
        before = read(tx, "requires_grad")
        if before.is_python_constant() and before.as_python_constant() is False:
            return x
    return call(builtin, tx, owner, name, x)


@keep_in_graph
def followed_from_here(x: torch.Tensor) -> None:
    """Mark in Dynamo's graph where a tensor begins to require grad."""


@keep_in_graph
def reached(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
    """Return the number of this question in the capture, and for each input whether an output
    depends on it, as Dynamo's graph or an earlier reading says.
    """
    raise AssertionError("Dynamo answers this")


class Unlike(Exception):
    """Raised when other inputs of a gradient turn out to have a derivative than Dynamo's graph
    says.
    """

    def __init__(self, number: int, flags: tuple[bool, ...]) -> None:
        super().__init__(number, flags)
        self.number, self.flags = number, flags


Uses = tuple[list[None], dict[int, tuple[bool, ...]]]  # the questions so far, what is known
_USES: contextvars.ContextVar[Uses] = contextvars.ContextVar("uses")


def with_uses(read: Callable[[], Any]) -> Any:
    """Run a reading, and run it again where it raised `Unlike`."""
    known: dict[int, tuple[bool, ...]] = {}
    while True:
        token = _USES.set(([], known))
        try:
            return read()
        except Unlike as error:
            if error.number in known:
                raise
            known[error.number] = error.flags
        finally:
            _USES.reset(token)


def torch_called(call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Patch Dynamo's call of a torch function, which may make a tensor that requires grad, or of a
    list of tensors, or be `reached`.
    """
    from torch._dynamo.variables import ListVariable, TupleVariable
    from torch._dynamo.variables.base import VariableTracker

    is_of_list = len(args) == 1 and isinstance(args[0].realize(), (ListVariable, TupleVariable))
    if is_of_list and any(function.value is fn for fn in LIKE_TENSOR):
        function = VariableTracker.build(tx, torch.tensor)  # Dynamo takes lists of tensors there
        return function.call_function(tx, args, kwargs)

    flag = kwargs.get("requires_grad")
    if flag is not None and flag.is_python_constant() and flag.as_python_constant() is True:
        others = {name: x for name, x in kwargs.items() if name != "requires_grad"}
        made = call(function, tx, args, others)
        return _begun(made, tx) if made.is_tensor() else call(function, tx, args, kwargs)
    if function.value is not reached:
        return call(function, tx, args, kwargs)
    outputs, inputs = ([x.as_proxy().node for x in row.unpack_var_sequence(tx)] for row in args)
    nodes = dict.fromkeys(outputs)
    for node in (queue := list(nodes)):
        fresh = [x for x in node.all_input_nodes if x not in nodes]
        nodes.update(dict.fromkeys(fresh))
        queue += fresh
    questions, known = _USES.get()
    number = len(questions)
    questions.append(None)
    flags = known.get(number, tuple(x in nodes for x in inputs))
    return VariableTracker.build(tx, (number, flags))


def intact(
    reading: Callable[[Any], Callable[..., Any] | None],
    apply: Callable[..., Any],
    function: Any,
    tx: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Keep an autograd.Function as one call under torch.func, so that its own derivatives
    apply. One of ranks is read, by ours.
    """
    from torch._dynamo.utils import proxy_args_kwargs
    from torch._dynamo.variables import builder

    ours = reading(function.fn_cls)
    if ours is not None:
        return _read_by(ours, function, tx, args, kwargs)
    if not inside_transform():
        return apply(function, tx, args, kwargs)
    given = proxy_args_kwargs(args, kwargs)
    proxy = tx.output.create_proxy("call_function", _applied(function.fn_cls), *given)
    return builder.wrap_fx_proxy(tx, proxy)


ONCE = torch.autograd.function.once_differentiable(len).__code__


def _read_by(ours: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Read an autograd.Function through a function of ours that takes its methods."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    cls = function.fn_cls
    names = ["backward", "forward"]
    if cls.setup_context is not torch.autograd.Function.setup_context:
        names.append("setup_context")
    methods = []
    for name in names:
        source = function.source and AttrSource(function.source, name)
        method = getattr(cls, name)
        if getattr(method, "__code__", None) is ONCE:  # it turns grad mode off
            source, method = None, method.__wrapped__
        methods.append(VariableTracker.build(tx, method, source=source))
    given = function._resolve_kwargs(args, kwargs) if kwargs else args
    constants = [VariableTracker.build(tx, x) for x in (id(cls), cls.__name__)]
    called = VariableTracker.build(tx, ours)
    row = VariableTracker.build(tx, ())
    row = type(row)(methods)
    return called.call_function(tx, [*constants, row, *given], {})


def _applied(fn_cls: Any) -> Callable[..., Any]:
    """Return the `apply` of an autograd.Function, a builtin that no graph can name from torch 2.15
    on.
    """

    def apply(*args: Any, **kwargs: Any) -> Any:
        return fn_cls.apply(*args, **kwargs)

    return apply


def own_error_raised(run: Callable[..., Any], tracer: Any, node: Any, *args: Any) -> Any:
    """Patch Dynamo's run of a call on fake tensors, which turns an error into text in
    torch 2.15, and says of a function of `math` only that a value is unknown.
    """
    try:
        return run(tracer, node, *args)
    except RuntimeError as error:
        if isinstance(error.__cause__, ShardError):
            raise error.__cause__ from None
        is_of_math = getattr(node.target, "__module__", None) == "math"
        if is_of_math and "data-dependent" in str(error):
            raise RuntimeError(f"{OF_MATH}.{node.target.__name__};") from None
        raise


def is_substituted(table: dict[Any, Any], known: Callable[[Any], bool], fn: Any) -> bool:
    """Patch Dynamo's check whether a function has a substitute; a pybind11 function has no hash."""
    if getattr(fn, "__hash__", None) is None:
        return False
    is_in_table = fn in table and any(fn is original for original in table)
    return is_in_table or known(fn)


def substitutes(table: dict[Any, Any], known: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Functions that Dynamo traces in place of others. Eager calls are unchanged."""
    return {**known(), **{fn: _handler(ours) for fn, ours in table.items()}}


def text_called(_: Any, call: Any, owner: Any, tx: Any, name: str, *given: Any) -> Any:
    """Patch the call of a method of an attribute, such as `nn.Parameter.__module__.startswith`:
    of a class of torch, Dynamo knows the values of texts, but not their methods.
    """
    from torch._dynamo.variables import ConstantVariable

    text = owner.as_python_constant() if owner.is_python_constant() else None
    if isinstance(text, str):
        return ConstantVariable.create(text).call_method(tx, name, *given)
    return call(owner, tx, name, *given)


@functools.cache
def _handler(ours: Callable[..., Any]) -> Any:
    """Wrap a substitute in the form that Dynamo expects."""
    handler = functools.partial(ours)
    handler.__torch_dynamo_polyfill__ = ours
    return handler


def python_results(graph: torch.fx.GraphModule, outputs: Any) -> Any:
    """The result of the function that `capture_python` traced, given the results of its graph.
    Call `process_inputs` first.

    torch does this with dispatch turned off (2.13). Then a result that Dynamo makes from an
    argument, such as x.T, is lost.
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


def guarded_twice(original: Any, source: Any, other: Any) -> Any:
    """Patch Dynamo's guard that two places hold one object, for when only one is a global."""
    from torch._dynamo.guards import GuardBuilder

    guard = original(source, other)
    if guard is not None or not other or other == source:
        return guard
    return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)


def raised_here(original: Any, tx: Any, error: Any) -> None:
    """Note the user's frames of a builtin's error before a `with` around it raises it again."""
    if getattr(error, "python_stack", True) is None:
        error.python_stack = torch._guards.TracingContext.extract_stack()
    original(tx, error)
