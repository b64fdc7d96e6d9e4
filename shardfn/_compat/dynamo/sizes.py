"""Sizes that Dynamo reads as symbols, and the guards that Python code puts on them."""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import make_contiguous_strides_for

from ...errors import is_inside, is_ours, source_at
from .tree_functions import of_trees

_NOTED: contextvars.ContextVar[Noted | None] = contextvars.ContextVar("noted", default=None)
MARKS = "_dynamo_weak_dynamic_indices"  # torch's attribute of a tensor
Given = tuple[Sequence[int], Sequence[int]]  # the shape and the strides of an input
TORCHS = ("_dynamo_dynamic_indices", MARKS)  # of mark_dynamic, of maybe_mark_dynamic


def read_as_symbols(x: torch.Tensor, dims: Sequence[int]) -> None:
    """Have Dynamo read the sizes of these dims of an input as symbols."""
    if dims:
        setattr(x, MARKS, set(dims))


def is_of_numbers(x: torch.Tensor) -> bool:
    """Return whether Dynamo reads all sizes of an input as numbers."""
    return not any(name in x.__dict__ for name in TORCHS)


def torch_marks(x: torch.Tensor) -> dict[int, bool]:
    """The dims that `torch._dynamo.mark_dynamic` and `maybe_mark_dynamic` marked, and whether it
    is an error if one must be constant.
    """
    strict, loose = (getattr(x, name, ()) for name in TORCHS)
    return {**dict.fromkeys(loose, False), **dict.fromkeys(strict, True)}


def dim_hint(x: Any) -> str | None:
    """Return the name of a torch.export.Dim hint (AUTO, DYNAMIC, STATIC); None for other values."""
    return x.type.name if type(x).__name__ == "_DimHint" else None


@of_trees
def size_name(n: Any) -> Any:
    """Turn a size into a constant: an int, or the name of a symbol. Equal names are equal sizes."""
    return str(n.node.expr) if isinstance(n, torch.SymInt) else n


@of_trees
def sizes_named(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Turn a shape into constants: ints and names of symbols."""
    return tuple([size_name(n) for n in shape])


@of_trees
def signs(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Map a shape to 1 for symbols known to be 0 or more, and -1 for other sizes."""
    return tuple([(1 if n >= 0 else -1) if is_symbol(n) else n for n in shape])


@of_trees
def is_symbol(n: Any) -> bool:
    """Return whether a size is a SymInt."""
    return isinstance(n, torch.SymInt)


def is_dense(node: torch.fx.Node) -> bool:
    """Whether the value of a node has the strides of a contiguous tensor, of sizes that are
    numbers. Those of dims of size 1 count too, since they have other sizes on other ranks.
    """
    x = node.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or any(map(is_symbol, x.shape)):
        return False
    return x.stride() == make_contiguous_strides_for(x.shape)


class Noted(NamedTuple):
    """Notes of one run of Dynamo.

    Args:
        fakes: by the id of an input, the fake tensor that Dynamo makes of it.
        lines: by the id of a guard's place in torch's words, the place and the user's line.
    """

    fakes: dict[int, Any]
    lines: dict[int, tuple[Any, str | None]]

    def line(self, guard: Any) -> str | None:
        """The user's line that asked for a guard."""
        place = getattr(guard, "sloc", None)
        return self.lines.get(id(place), (None, None))[1]


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """Note the fake tensors and guards of one Dynamo run inside this context."""
    notes = Noted({}, {})
    token = _NOTED.set(notes)
    try:
        yield notes
    finally:
        _NOTED.reset(token)


def note(x: Any, fake: Any) -> None:
    """Note the fake tensor that Dynamo has made of an input."""
    notes = _NOTED.get()
    if notes is not None:
        notes.fakes[id(x)] = fake


def place_noted(place_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Patch torch's guard locations to note the user's line."""
    place = place_of(*args, **kwargs)
    notes = _NOTED.get()
    if notes is not None:
        notes.lines[id(place)] = place, user_line()
    return place


def user_line() -> str | None:
    """Return the innermost user line that Dynamo is tracing, or None."""
    frames = [f for f in _frames() if not is_ours(f.filename)]
    return source_at(frames[-1].filename, frames[-1].lineno) if frames else None


def is_reading(folder: str) -> bool:
    """Return whether the innermost code that Dynamo traces, ours aside, is in a folder."""
    frames = [f for f in _frames() if not is_inside(f.filename)]
    return bool(frames) and folder in frames[-1].filename


def _frames() -> list[Any]:
    """List the frames that Dynamo is tracing, innermost last."""
    from torch._guards import TracingContext

    if TracingContext.try_get() is None:
        return []
    return list(TracingContext.extract_stack())


@contextlib.contextmanager
def linear_written_out() -> Iterator[None]:
    """Make `linear` a matmul and an add under torch.func, inside this context."""
    op = torch.ops.aten.linear.default
    key = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    op.py_kernels[key] = _linear
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


class Guard(NamedTuple):
    """A condition on sizes, with the line of Python that needs it."""

    holds: Any  # of sympy
    line: str | None


class Sizes(NamedTuple):
    """The symbols of one capture, and the conditions under which its graph is right.

    Args:
        rows: of each input that has been read, the sizes and the strides: numbers, and
            expressions of symbols.
        ranges: the least and the greatest value of each symbol.
        fixed: symbols that are equal to an expression of others.
        guards: the other conditions.
    """

    rows: Mapping[int, tuple[tuple[Any, ...], tuple[Any, ...]]]
    ranges: Mapping[Any, tuple[Any, Any]]
    fixed: Mapping[Any, Any]
    guards: tuple[Guard, ...]

    def misfit(self, given: Mapping[int, Given], names: Mapping[int, str]) -> str | None:
        """The first condition that sizes break, in words. None if they keep all.

        Args:
            given: the shape and the strides of each input, by its number.
            names: of the inputs, for the words.
        """
        values = self._bound(given)
        for guard in self.guards:
            if _at(guard.holds, values) is not True:
                at = f", at {guard.line}" if guard.line else ""
                return f"{self._said(guard.holds, names)}{at}"
        for symbol, expr in self.fixed.items():
            if symbol in values and values[symbol] != _at(expr, values):
                return f"{self._said(symbol, names)} == {self._said(expr, names)}"
        for symbol, (least, most) in self.ranges.items():
            if symbol in values and not least <= values[symbol] <= most:
                return f"{self._said(symbol, names)} >= {least}"
        for number, (shape, stride) in self.rows.items():
            sizes, strides = given[number]
            for dim, expr in enumerate(shape):
                if _at(expr, values) != sizes[dim]:
                    return f"{names[number]}.shape[{dim}] == {expr}"
            if any(_at(e, values) != n for e, n in zip(stride, strides, strict=True)):
                return f"the strides of {names[number]} in the same order as in the captured call"
        return None

    def constants(self) -> dict[tuple[int, int], tuple[int, str | None]]:
        """The dims that the function needs constant: (input, dim) -> the constant, the line."""
        found: dict[tuple[int, int], tuple[int, str | None]] = {}
        for symbol, place in self._places().items():
            value = _resolved(symbol, self.fixed)
            if value.is_Integer:
                found[place] = int(value), self._line_of(symbol)
        return found

    def _places(self) -> dict[Any, tuple[int, int]]:
        """Map each symbol to the input and dim that it is the size of."""
        return {
            expr: (number, dim)
            for number, (shape, _) in self.rows.items()
            for dim, expr in enumerate(shape)
            if is_unknown(expr)
        }

    def _line_of(self, symbol: Any) -> str | None:
        """The line of the last guard on a symbol, which has made it a constant."""
        lines = [g.line for g in self.guards if symbol in g.holds.free_symbols]
        return lines[-1] if lines else None

    def _bound(self, given: Mapping[int, Given]) -> dict[Any, int]:
        """Bind each symbol to its value in given sizes."""
        values: dict[Any, int] = {}
        for number, (shape, stride) in self.rows.items():
            for expr, n in zip((*shape, *stride), _flat(given[number]), strict=True):
                if is_unknown(expr):
                    values.setdefault(expr, n)
        return values

    def _said(self, condition: Any, names: Mapping[int, str]) -> str:
        """Print a condition with the user's argument names."""
        said = {s: f"{names[i]}.shape[{dim}]" for s, (i, dim) in self._places().items()}
        text = printed(condition)
        for symbol, name in said.items():
            text = re.sub(rf"\b{symbol.name}\b", name, text)
        return text


def sizes_of(out: Any, inputs: Sequence[torch.Tensor], notes: Noted) -> Sizes:
    """The symbols of a capture that Dynamo has made, and their conditions.

    Args:
        out: of `fullgraph_capture`.
        inputs: the tensors that it was given.
        notes: of the run of Dynamo.
    """
    return conditions_of(out.backend_input.fake_mode.shape_env, inputs, notes)


def conditions_of(env: Any, inputs: Sequence[torch.Tensor], notes: Noted) -> Sizes:
    """The symbols of a ShapeEnv, and their conditions.

    Args:
        env: the ShapeEnv.
        inputs: tensors.
        notes: with the fake tensors of them.
    """
    made = notes.fakes
    rows = {
        i: (_exprs(made[id(x)].shape), _exprs(made[id(x)].stride()))
        for i, x in enumerate(inputs)
        if id(x) in made
    }
    ranges = {symbol: (r.lower, r.upper) for symbol, r in env.var_to_range.items()}
    guards = [Guard(guard.expr, notes.line(guard)) for guard in env.guards]
    return Sizes(rows, ranges, dict(env.replacements), tuple(guards))


def printed(condition: Any) -> str:
    """Print a sympy condition in Python syntax."""
    kind = type(condition).__name__
    sign = {"Equality": "==", "Unequality": "!="}.get(kind)
    if sign is None:
        return str(condition)
    left, right = condition.args
    return f"{left} {sign} {right}"


def is_unknown(expr: Any) -> bool:
    """Whether an expression is one symbol."""
    return getattr(expr, "is_Symbol", False)


def _exprs(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes as Dynamo first wrote them, before it knew which symbols are equal."""
    return tuple(n.node._expr if isinstance(n, torch.SymInt) else n for n in sizes)


def _flat(given: Given) -> tuple[int, ...]:
    shape, stride = given
    return (*shape, *stride)


def _resolved(expr: Any, fixed: Mapping[Any, Any]) -> Any:
    """Substitute the symbols that are fixed in an expression."""
    while expr.free_symbols & fixed.keys():
        expr = expr.xreplace(dict(fixed))
    return expr


def _at(expr: Any, values: Mapping[Any, int]) -> Any:
    """Evaluate an expression to an int or a bool; return the expression if a symbol is unknown."""
    if not hasattr(expr, "free_symbols"):
        return expr
    found = expr.subs(dict(values))
    if found.free_symbols:
        return found
    try:
        return bool(found) if getattr(found, "is_Boolean", False) else int(found)
    except TypeError:  # sympy cannot tell
        return found
