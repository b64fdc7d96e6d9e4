"""saved_residuals: a list of the values that a function's forward saves for its backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...accepted import accept
from ...buckets import human_bytes
from ...capture import annotations as sources
from ...capture.checkpoint.recompute import names_of, owner_of, residuals
from ...capture.printing import tensor_type
from ...errors import CaptureError
from ...ops.nodes import args_of
from ...tracebacks import filter_errors
from ...types import Program
from .._transformed import Transformed, name_of


@attrs.frozen
class Residual:
    """One value that the forward saves for the backward.

    Args:
        shape: the global shape.
        dtype: the torch dtype.
        why: the reason, such as `argument x`, `constant`, `named 'h'`, or `output of aten.mm`.
        source: the `file:line` of the op, or None for an argument.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    why: str
    source: str | None

    @property
    def nbytes(self) -> int:
        """The size of the residual, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_activation(self) -> bool:
        """Whether an op computed the residual, as opposed to an argument or a constant."""
        return not self.why.startswith(("argument ", "constant"))

    def __str__(self) -> str:
        where = f"# {os.path.basename(self.source)}" if self.source else ""
        return (
            f"{tensor_type(self.shape, self.dtype):<24} {human_bytes(self.nbytes):>10}  "
            f"{self.why:<44} {where}"
        ).rstrip()


@attrs.frozen(repr=False)
class Residuals:
    """All residuals of a function, printed as a table."""

    name: str
    entries: tuple[Residual, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all residuals."""
        return sum(r.nbytes for r in self.entries)

    @property
    def activation_bytes(self) -> int:
        """The bytes of the residuals that ops computed. Arguments and constants take no extra
        memory.
        """
        return sum(r.nbytes for r in self.entries if r.is_activation)

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, i: int) -> Residual:
        return self.entries[i]

    def __str__(self) -> str:
        total = (
            f"{human_bytes(self.nbytes)}, of which {human_bytes(self.activation_bytes)} were "
            "computed"
        )
        return "\n".join(
            [
                f"residuals of {self.name}: {len(self)} values, {total}",
                *(f"  {r}" for r in self.entries),
            ]
        )

    __repr__ = __str__


@attrs.define(eq=False, repr=False, slots=False)
class _Backward(Transformed):
    """The gradients of a function's floating results with respect to its floating arguments."""

    verb: ClassVar[str] = "saved_residuals"
    held: tuple[Callable[..., Any]]

    @_compat.read_by_dynamo
    def inline(self, *args: Any, **kwargs: Any) -> Any:
        leaves = _tree.quick_leaves(args)
        numbers = [
            i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        refuse_none(f"saved_residuals({name_of(self.fn)})", "argument", len(numbers))

        def flat(*primals: torch.Tensor) -> Any:
            filled = list(leaves)
            for i, x in zip(numbers, primals, strict=True):
                filled[i] = x
            out = _tree.quick_leaves((self.fn(*_tree.refill(args, filled), **kwargs),))
            floating = [x for x in out if isinstance(x, torch.Tensor) and x.is_floating_point()]
            refuse_none(f"saved_residuals({name_of(self.fn)})", "result", len(floating))
            return tuple(floating)

        values, pull, *_ = torch.func.vjp(flat, *[leaves[i] for i in numbers])
        with sources.as_backward():
            return pull(tuple([torch.ones_like(x) for x in values]))

    def options(self) -> Any:
        return ()


@_compat.constant_in_graph
def refuse_none(name: str, what: str, count: int) -> None:
    """Check that a function has floating arguments and results.

    Raises:
        CaptureError: it has none.
    """
    if not count:
        fix = "pass a function with floating-point arguments and results"
        raise CaptureError.of(
            name, f"no {what} is a floating tensor", needed="at least one", fix=fix
        )


@filter_errors
def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """List the residuals that a function's forward saves for its backward, with bytes, reason and
    source line.

    `saved_residuals` assumes a backward that differentiates all floating-point results with respect
    to all floating-point positional arguments. `saved_residuals` does not run the function.
    Residuals that share memory are counted once. The bytes of a residual are those of its global
    tensor.

    Args:
        fn: a function of pytrees, which may contain `checkpoint` or be wrapped in it.
        args: the arguments of fn, pytrees of tensors. `ShapeDtype`s may stand for tensors.
        kwargs: the keyword arguments of fn, which are not differentiated.

    Returns:
        A sequence of `Residual` records, with `nbytes` and `activation_bytes`. The sequence of
        residuals prints as a table.

    Raises:
        CaptureError: fn has no floating-point argument or no floating-point result.

    Source: jax.ad_checkpoint.print_saved_residuals.

    Example:
        >>> import torch, shardfn as sf
        >>> f = lambda x: sf.checkpoint_name(x.sin(), "s").tanh()
        >>> [r.why for r in sf.saved_residuals(f, torch.ones(3))]
        ['argument x', 'output of aten.tanh']
        >>> [r.why for r in sf.saved_residuals(sf.checkpoint(f), torch.ones(3))]
        ['argument x']
    """
    accept("saved_residuals", fn=fn)
    traced = _Backward((fn,)).trace(*args, **kwargs)
    return Residuals(name_of(fn), tuple(_records(traced.program)))


def _records(program: Program) -> Iterator[Residual]:
    graph = program.graph.graph
    paths = dict(zip(graph.find_nodes(op="placeholder"), program.in_paths, strict=True))
    named = {owner_of(node): names_of(node) for node in graph.nodes if names_of(node)}
    for node in residuals(graph):
        why = (
            _argument(paths[node])
            if node in paths
            else _named(named[node])
            if node in named
            else _output(node)
        )
        value = node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else [value]
        for x in values:
            yield Residual(
                tuple(x.shape), x.dtype, why, None if node in paths else node.meta["source"]
            )


def _argument(path: str) -> str:
    return "constant" if path.startswith("<closed over") else f"argument {path}"


def _named(names: tuple[str, ...]) -> str:
    return "named " + ", ".join(map(repr, names))


def _output(node: torch.fx.Node) -> str:
    if getattr(node.target, "__name__", None) == "getitem":
        made, number = args_of(node)
        return f"output {number} of {_op(made)}"
    return f"output of {_op(node)}"


def _op(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target))
