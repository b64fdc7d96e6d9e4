"""Replacements of torch's ops and of autograd.Functions where Python calls them."""

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


class WithoutEffects(TorchDispatchMode):
    """A dispatch mode, inside of a fake mode, in which every collective raises an error, and a
    write to a tensor with values leaves it as it is.

    A fake mode computes with numbers and tensors with values alone, and writes to them.

    Args:
        error: the class of a collective's error.
    """

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise self.error
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            args, kwargs = _with_fakes_written(func._schema.arguments, args, kwargs)
        return func(*args, **kwargs)


def _with_fakes_written(
    parameters: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Replace the tensors with values that an op writes to by fake ones, in its arguments."""
    written = {
        x.name: k for k, x in enumerate(parameters) if x.alias_info and x.alias_info.is_write
    }
    positions = {*written.values()}
    fake = lambda x: torch.empty_like(x) if type(x) in (torch.Tensor, torch.nn.Parameter) else x
    return (
        [fake(x) if k in positions else x for k, x in enumerate(args)],
        {name: fake(x) if name in written else x for name, x in kwargs.items()},
    )


class ItemReads(TorchDispatchMode):
    """Notes the tensors whose values a function reads as Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


class RoundedOtherwise(TorchDispatchMode):
    """A dispatch mode in which the results of floating ops are off by a rounding, each by another.

    Args:
        eps: the distance of 1.0 to the next number of the dtype that rounds.
        seed: of the roundings.
        is_on: whether results are off now.
    """

    def __init__(self, eps: float, seed: int, is_on: Callable[[], bool]) -> None:
        super().__init__()
        self.eps, self.is_on = eps, is_on
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not torch.is_tensor(args[0]):
            return args[0]  # a number that torch has unwrapped
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or not self.is_on():
            return result
        schema = func._schema
        aliases = schema.is_mutable or any(x.alias_info for x in schema.returns)
        reads = any(isinstance(x, torch.Tensor) for x in args)
        if aliases or not reads:
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._rounded, result)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor or not x.is_floating_point() or x.device.type != "cpu":
            return x
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        off = torch.rand(x.shape, generator=self.generator) - 0.5
        return (wide * (1 + self.eps * off)).to(x.dtype)


class _Replacing(TorchDispatchMode):
    """A dispatch mode that replaces ops by the functions of a table, except in a capture."""

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
    """Enter a context in which this thread's eager calls of some ops run functions of the same
    arguments.

    Args:
        table: the functions by op.
        is_mine: whether to use them for a call with these keyword arguments.
    """
    with _Replacing(table, is_mine):
        yield


def aten_ops(*names: str) -> list[Any]:
    """Return the ATen ops of these names that this version of torch has.

    Args:
        names: of ATen, with the overload: "cholesky.default", which ends before 2.15.
    """
    pairs = [name.split(".") for name in names]
    packets = [(getattr(torch.ops.aten, op, None), form) for op, form in pairs]
    ops = [getattr(packet, form, None) for packet, form in packets]
    return [op for op in ops if op is not None]


@contextlib.contextmanager
def init_replaced(replacement: tuple[Callable[..., Any], Callable[[], bool]]) -> Iterator[None]:
    """Replace torch.nn.init's truncated normal, which redraws until all numbers fit.

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


class _TrueOnSecondTest:
    """A value that is False when first tested, and True afterwards."""

    def __init__(self) -> None:
        self.looks = 0

    def __bool__(self) -> bool:
        self.looks += 1
        return self.looks > 1


def takes_context(function: Any) -> bool:
    """Check whether the forward of an autograd.Function takes ctx: it defines no setup_context."""
    return function.setup_context is torch.autograd.Function.setup_context


def context_split(known: Callable[..., bool], setup_context: Any) -> Any:
    """Patch the check whether an autograd.Function has a setup_context, so that torch.func
    accepts a forward that takes ctx.

    Functions are often stored as `f = F.apply`, so `apply` itself cannot be replaced. It looks at
    the answer twice: whether forward has defaults to fill in, and whether torch.func takes the
    function. Only the second answer changes.
    """
    is_defined = known(setup_context)
    return is_defined if is_defined or not inside_transform() else _TrueOnSecondTest()


class _SetupContext:
    """A descriptor for the setup_context of a class that defines none, as the C++ `apply` of
    torch 2.15 reads it: it answers other than the default where `context_split` would say that
    there is one.
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
        return _present_setup_context

    def bound(self, bind: Callable[..., Any], forward: Any, args: Any, kwargs: Any) -> Any:
        """Patch torch's binding of default arguments: skip it for a forward that takes ctx."""
        owner, self.asked_for = self.asked_for, None
        is_default = owner is not None and owner.forward is forward
        return (args, kwargs) if is_default else bind(forward, args, kwargs)


def _present_setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Stand for a setup_context. Never called: `run_rewritten` takes the functions that have
    it.
    """
    raise AssertionError


@contextlib.contextmanager
def context_split_in_c() -> Iterator[None]:
    """Enter the equivalent of `context_split` for the `apply` that is C++ code (torch 2.15)."""
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


def run_rewritten(
    rewritten: Callable[..., Any],
    call: Callable[..., Any],
    function: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Patch the call of an autograd.Function under torch.func: run our rewriting of it."""
    return rewritten(call, function, *args, **kwargs)


def hooks_in_graph(
    hooked: Callable[..., Any],
    create: Callable[..., Any],
    tx: Any,
    module: Any,
    after: Any,
    before: Any,
) -> Any:
    """Patch Dynamo's handling of a module with full backward hooks: keep the hooks as function
    calls in the graph, where torch would need compiled autograd.

    Args:
        hooked: (module, its hooks, its pre-hooks) -> a function of a side ("in" or "out"), the
            number of values there, and the positions of the floating ones. That returns the
            function of these values which the graph calls.
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
            floating = [k for k, x in enumerate(items) if _is_floating(x)]
            if not floating:
                return given
            call = self.through(side, len(items), floating)
            nodes = tuple(items[k].as_proxy() for k in floating)
            proxy = tx.output.create_proxy("call_function", call, nodes, {})
            results = wrap_fx_proxy(tx, proxy)
            for k, x in zip(floating, results.items, strict=True):
                items[k] = x
            return items[0] if is_one else type(given)(items)

    no_proxy: Any = None
    variable: Any = Hooked(no_proxy, module, after, before)
    owner = module.realize().value
    variable.through = hooked(owner, _functions(after), _functions(before))
    return variable


def _functions(row: Any) -> list[Any]:
    """Return the Python functions in a list variable of Dynamo's."""
    items = row.realize().items
    return [x.as_python_constant() for x in items]


def _is_floating(x: Any) -> bool:
    """Check whether a Dynamo variable is a floating-point or complex tensor."""
    return x.is_tensor() and (x.dtype.is_floating_point or x.dtype.is_complex)
