"""Torch's ops and functions replaced where they are called eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.init
from torch.utils._python_dispatch import TorchDispatchMode

from .threads import is_capturing, overridden, replaced
from .tracing import inside_transform


class Silent(TorchDispatchMode):
    """A mode in which no op communicates: each raises an error.

    Args:
        error: its class.
    """

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise self.error
        return func(*args, **(kwargs or {}))


class _Replacing(TorchDispatchMode):
    """Ops replaced by the rows of a table; a capture inside replaces its own."""

    def __init__(
        self, table: Mapping[Any, Callable[..., Any]], is_mine: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        super().__init__()
        self.table = table
        self.is_mine = is_mine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        row = None if is_capturing() else self.table.get(func)
        kwargs = kwargs or {}
        run: Any = row if row is not None and self.is_mine(kwargs) else func
        return run(*args, **kwargs)


@contextlib.contextmanager
def ops_replaced(
    table: Mapping[Any, Callable[..., Any]], is_mine: Callable[[Mapping[str, Any]], bool]
) -> Iterator[None]:
    """Torch's ops inside, in this thread, replaced by functions of the same arguments.

    Args:
        table: the functions by op.
        is_mine: whether to use them for a call with these keyword arguments.
    """
    with _Replacing(table, is_mine):
        yield


def aten_ops(*names: str) -> list[Any]:
    """Those of these ops that this version of torch has.

    Args:
        names: of ATen, with the overload: "cholesky.default", which ends before 2.15.
    """
    pairs = [name.split(".") for name in names]
    packets = [(getattr(torch.ops.aten, op, None), form) for op, form in pairs]
    ops = [getattr(packet, form, None) for packet, form in packets]
    return [op for op in ops if op is not None]


@contextlib.contextmanager
def init_replaced(replacement: tuple[Callable[..., Any], Callable[[], bool]]) -> Iterator[None]:
    """The one function of torch.nn.init that draws until all numbers fit, replaced.

    Args:
        replacement: a function of its arguments, and whether to use it for a call.
    """
    truncated_normal, is_mine = replacement

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (truncated_normal if is_mine() else original)(*args, **kwargs)

        return chosen

    with replaced(torch.nn.init, "_no_grad_trunc_normal_", make):
        yield


class _OnSecondLook:
    """A truth value that is false once, and true afterwards."""

    def __init__(self) -> None:
        self.looks = 0

    def __bool__(self) -> bool:
        self.looks += 1
        return self.looks > 1


def takes_context(function: Any) -> bool:
    """Whether the forward of an autograd.Function takes the context, as those without a
    setup_context do.
    """
    return function.setup_context is torch.autograd.Function.setup_context


def context_split(known: Callable[..., bool], setup_context: Any) -> Any:
    """torch's check whether an autograd.Function has a setup_context, in its `apply`.

    Functions are often stored as `f = F.apply`, so `apply` itself cannot be replaced. It looks at
    the answer twice: whether forward has defaults to fill in, and whether torch.func takes the
    function. Only the second answer changes.
    """
    is_defined = known(setup_context)
    return is_defined if is_defined or not inside_transform() else _OnSecondLook()


class _SetupContext:
    """The setup_context of a class that defines none, to torch's `apply` in C: another function
    than the default where `context_split` says that there is one.
    """

    def __init__(self, default: Callable[..., Any]) -> None:
        self.default = default
        self.asked_for: Any = None  # the class whose arguments `apply` binds next

    def __get__(self, _: Any, owner: Any) -> Callable[..., Any]:
        if not is_capturing() or not inside_transform():
            return self.default
        if not issubclass(owner, torch.autograd.Function):  # of one level of torch.func
            return self.default
        self.asked_for = owner
        return _defined

    def bound(self, bind: Callable[..., Any], forward: Any, args: Any, kwargs: Any) -> Any:
        """The arguments of a call, with the defaults of the forward filled in if it does not
        take the context.
        """
        owner, self.asked_for = self.asked_for, None
        is_default = owner is not None and owner.forward is forward
        return (args, kwargs) if is_default else bind(forward, args, kwargs)


def _defined(ctx: Any, inputs: Any, output: Any) -> None:
    """Never called: `function_called` takes the functions that have it."""
    raise AssertionError


@contextlib.contextmanager
def context_split_in_c() -> Iterator[None]:
    """The same as `context_split`, for the `apply` that is C code (torch 2.15)."""
    module = torch.autograd.function
    if not hasattr(module, "_bind_default_args"):
        yield
        return
    base = module._SingleLevelFunction
    asked = _SetupContext(base.setup_context)
    with (
        mock.patch.object(base, "setup_context", asked),
        overridden(module, "_bind_default_args", asked.bound, is_capturing),
    ):
        yield


def function_called(
    rewritten: Callable[..., Any],
    call: Callable[..., Any],
    function: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A call of an autograd.Function under torch.func, whose forward may take the context."""
    return rewritten(call, function, *args, **kwargs)


def hooks_read(
    hooked: Callable[..., Any],
    create: Callable[..., Any],
    tx: Any,
    module: Any,
    after: Any,
    before: Any,
) -> Any:
    """Dynamo's record of one call of a module with full backward hooks, which stay functions that
    run as they are.

    Args:
        hooked: of the module, its hooks, and its pre-hooks: a function of a side ("in" or "out")
            and of the number of values there and which of them are floating. It returns a
            function of those, which the graph calls.
        create: torch's, which needs compiled autograd.
        tx: Dynamo's translator.
        module: the module.
        after: its full backward hooks.
        before: its backward pre-hooks.
    """
    from torch._dynamo.variables import BackwardHookVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy

    class Hooked(BackwardHookVariable):
        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            side = "in" if name == "setup_input_hook" else "out"
            (given,) = args
            given = given.realize()
            is_one = given.is_tensor()
            items = [given] if is_one else given.items
            items = [x.realize() for x in items]
            at = [k for k, x in enumerate(items) if _is_floating(x)]
            if not at:
                return given
            call = self.through(side, len(items), at)
            nodes = tuple(items[k].as_proxy() for k in at)
            proxy = tx.output.create_proxy("call_function", call, nodes, {})
            found = wrap_fx_proxy(tx, proxy)
            for k, x in zip(at, found.items, strict=True):
                items[k] = x
            return items[0] if is_one else type(given)(items)

    no_proxy: Any = None
    made: Any = Hooked(no_proxy, module, after, before)
    owner = module.realize().value
    made.through = hooked(owner, _functions(after), _functions(before))
    return made


def _functions(row: Any) -> list[Any]:
    """The functions in a list of Dynamo's."""
    items = row.realize().items
    return [x.as_python_constant() for x in items]


def _is_floating(x: Any) -> bool:
    """Whether a value of Dynamo's is a floating tensor."""
    return x.is_tensor() and (x.dtype.is_floating_point or x.dtype.is_complex)
