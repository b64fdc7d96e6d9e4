"""Tensors that a function closes over: the user's names for them, and gradients that a call
would lose.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError, ShardError, call_site, is_ours
from ...random.ambient import PLACEHOLDER_STATE

# limits of the search for a name: depth, and number of objects
DEEP = 8
MANY = 20_000
FIXES = (
    "pass the tensor as an argument and differentiate inside the function with sf.grad",
    ".detach() constants",
    "call the function under torch.no_grad()",
)


@attrs.frozen(eq=False)
class ClosedOver:
    """The tensors that a captured function closes over. They follow its arguments as inputs.

    Autograd does not see through a call: a gradient that would reach one of them is refused.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    names: tuple[str, ...] = ()  # the user's name of each
    lines: tuple[str | None, ...] = ()  # where each is used first
    followed: frozenset[int] = (
        frozenset()
    )  # positions of those that autograd recorded during the capture
    reached: frozenset[int] = (
        frozenset()
    )  # positions of those that the gradient of a result would reach
    draws: int = 0  # random calls; their state takes the place of PLACEHOLDER_STATE
    # those that hold some of the tensors, each with the rest of it
    holders: tuple[tuple[torch.Tensor, Any], ...] = ()
    constants: int = 0  # the last ones, which the function makes of numbers

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        """The closed-over tensors without the constants that the program makes of numbers."""
        return self.tensors[: len(self.tensors) - self.constants]

    def is_unchanged(self) -> bool:
        """Whether the closed-over wrapper subclasses still have the inner tensors that were
        captured.
        """
        return all(_compat.opened(x)[1] == shell for x, shell in self.holders)

    def drawing(self, calls: int) -> ClosedOver:
        """This record with the random state as one more closed-over tensor, if there are random
        calls.
        """
        if not calls:
            return self
        tensors = (*self.tensors, PLACEHOLDER_STATE)
        lines = (*self.lines, None)
        return attrs.evolve(self, tensors=tensors, lines=lines, draws=calls)

    def paths(self) -> list[str]:
        """The path of each tensor, for printed programs."""
        return [
            "<random state>" if x is PLACEHOLDER_STATE else f"<closed over {i}>"
            for i, x in enumerate(self.tensors)
        ]

    def traced(
        self, stand_ins: Sequence[torch.Tensor], ends: set[int], constants: Sequence[torch.Tensor]
    ) -> ClosedOver:
        """This record after a trace: which tensors autograd followed, which gradients would reach,
        and the constants.
        """
        followed = [
            i for i, x in enumerate(stand_ins) if x.requires_grad and torch.is_grad_enabled()
        ]
        return attrs.evolve(
            self,
            tensors=(*self.tensors, *constants),
            lines=(*self.lines, *[None] * len(constants)),
            constants=len(constants),
            followed=frozenset(followed),
            reached=frozenset(i for i in followed if id(stand_ins[i]) in ends),
        )

    def named(self, roots: dict[str, Any]) -> ClosedOver:
        """This record with the user's name of each closed-over tensor."""
        return attrs.evolve(
            self, names=tuple(names_of(self.tensors, roots)) if self.tensors else ()
        )

    def suspects(self) -> tuple[torch.Tensor, ...]:
        """The tensors that must not require grad in a call."""
        harmless = self.followed - self.reached
        rows = enumerate(self.tensors)
        plain = (x for i, x in rows if i not in harmless and _can_require_grad(x))
        return (*plain, *(x for x, _ in self.holders))

    def is_known(self) -> bool:
        """Whether the capture determined, for all tensors that now require grad, if a gradient
        would reach them.
        """
        rows = enumerate(self.tensors)
        return not torch.is_grad_enabled() or all(
            i in self.followed for i, x in rows if x.requires_grad
        )

    def lost(self, covered: Collection[torch.Tensor] = ()) -> list[int]:
        """The positions of the tensors whose gradients a call would lose, except known ones."""
        if not torch.is_grad_enabled():
            return []
        harmless = self.followed - self.reached
        ids = set(map(id, covered))
        return [
            i
            for i, x in enumerate(self.tensors)
            if x.requires_grad and i not in harmless and id(x) not in ids
        ]

    def refuse_lost(self, name: str, covered: Collection[torch.Tensor] = ()) -> None:
        """Refuse a call that would lose a gradient or a tangent.

        Args:
            name: of the function.
            covered: the tensors whose gradients the call does not lose.

        Raises:
            CaptureError: names the tensors, and the line where the first of them is used.
        """
        held = [x for x, _ in self.holders if x.requires_grad]
        if held and torch.is_grad_enabled():
            got = (
                f"the function closes over a {_compat.class_name(held[0])}, which requires grad: "
                "its "
            )
            got += "gradient would be lost"
            raise CaptureError.of(
                name,
                got,
                needed="closed-over tensors that need no gradient",
                fix="; or ".join(FIXES),
                source=call_site(),
            )
        if lost := self.lost(covered):
            raise self._lost(name, lost)
        if _compat.in_dual_level():
            dual = [i for i, x in enumerate(self.tensors) if _compat.has_tangent(x)]
            if dual:
                raise lost_tangent(f"{name}, closed-over {self.names[dual[0]]}")

    def _lost(self, name: str, lost: list[int]) -> CaptureError:
        names = list(dict.fromkeys(self.names[i] for i in lost))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        verb, its = (
            ("requires", "its gradient") if len(names) == 1 else ("require", "their gradients")
        )
        got = (
            f"the function closes over {', '.join(names[:4])}{more}, which {verb} grad: {its} "
            "would be lost"
        )
        fixes = FIXES
        if any(isinstance(self.tensors[i], torch.nn.Parameter) for i in lost):
            owner = names[0].rpartition(".")[0] or "module"
            fixes = (
                f"fn, params, buffers = sf.functionalize({owner}), and pass params as an argument",
                *FIXES,
            )
        fix = "; or ".join(fixes)
        source = self.lines[lost[0]] or call_site()
        return CaptureError.of(
            name,
            got,
            needed="closed-over tensors that need no gradient",
            fix=fix,
            source=source,
            arg_path=names[0],
        )


def lost_tangent(where: str) -> ShardError:
    """The error for a forward-mode dual tensor, whose tangent the call would drop."""
    source = call_site()
    return ShardError.of(
        where,
        "the tensor has a tangent (torch.autograd.forward_ad), which would be lost",
        fix="sf.jvp(fn, primals, tangents), or torch.func.jvp",
        source=source,
    )


def _can_require_grad(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def leaves_reached(results: Sequence[torch.Tensor]) -> set[int]:
    """The leaves that the gradient of any of the results would reach, by id."""
    return set(results_by_leaf(results))


def results_by_leaf(results: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """For each leaf that a gradient of the results would reach, by id: the numbers of the results
    whose gradient would.
    """
    leaves: dict[int, int] = {}
    for k, x in enumerate(results):
        if x.grad_fn is None and x.requires_grad:
            leaves[id(x)] = leaves.get(id(x), 0) | 1 << k
    for fn, own in _results_by_node(results).items():
        if hasattr(fn, "variable"):
            leaf = id(fn.variable)
            leaves[leaf] = leaves.get(leaf, 0) | own
    return {leaf: _set_bits(own) for leaf, own in leaves.items()}


def results_through(results: Sequence[torch.Tensor], nodes: Iterable[Any]) -> list[int]:
    """The numbers of the results whose gradient would go through a node of autograd's graph."""
    bits = _results_by_node(results)
    own = 0
    for fn in nodes:
        own |= bits.get(fn, 0)
    return _set_bits(own)


def _results_by_node(results: Sequence[torch.Tensor]) -> dict[Any, int]:
    """For each node of autograd's graph, the results whose gradient would go through it, as
    bits.
    """
    bits: dict[Any, int] = {}
    for k, x in enumerate(results):
        if x.grad_fn is not None:
            bits[x.grad_fn] = bits.get(x.grad_fn, 0) | 1 << k
    for fn in _in_order(list(bits)):
        for after in _next_functions(fn):
            bits[after] = bits.get(after, 0) | bits[fn]
    return bits


def _in_order(roots: list[Any]) -> list[Any]:
    """The nodes of autograd's graph that these roots lead to, in topological order."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(fn, False) for fn in roots]
    while stack:
        fn, is_done = stack.pop()
        if is_done:
            order.append(fn)
        elif fn not in seen:
            seen.add(fn)
            stack.append((fn, True))
            stack += [(after, False) for after in _next_functions(fn)]
    order.reverse()
    return order


def _next_functions(fn: Any) -> list[Any]:
    return [after for after, _ in fn.next_functions if after is not None]


def _set_bits(own: int) -> list[int]:
    return [k for k in range(own.bit_length()) if own >> k & 1]


def names_of(tensors: Sequence[torch.Tensor], roots: dict[str, Any]) -> list[str]:
    """The user's name of each tensor: the shortest path to it from a function, as Python writes
    it.
    """
    tensor_ids = {id(x) for x in tensors}
    names: dict[int, str] = {}
    for name, x in _reachable(roots):
        if id(x) in tensor_ids:
            names.setdefault(id(x), name)
    return [names.get(id(x)) or f"a tensor of shape {tuple(x.shape)}" for x in tensors]


def modules_of(fn: Callable[..., Any]) -> list[torch.nn.Module]:
    """The modules that a function reaches, with their submodules."""
    modules: dict[int, torch.nn.Module] = {}
    for _, x in _reachable({"": fn}):
        if isinstance(x, torch.nn.Module):
            modules |= {id(module): module for module in x.modules()}
    return list(modules.values())


def arrays_of(fn: Callable[..., Any]) -> list[Any]:
    """The NumPy arrays of numbers that a function reaches."""
    every = {id(x): x for _, x in _reachable({"": fn}) if type(x).__name__ == "ndarray"}
    return [x for x in every.values() if not x.dtype.hasobject]


def _reachable(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The objects that can be reached from these roots through attributes and items, by name,
    nearest first.
    """
    seen: set[int] = set()
    layer: list[tuple[str, Any]] = list(roots.items())
    for _ in range(DEEP):
        after: list[tuple[str, Any]] = []
        for name, x in layer:
            yield name, x
            if id(x) not in seen and len(seen) <= MANY:
                seen.add(id(x))
                after += _children(name, x)
        layer = after


def _children(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object refers to directly, by name: its items, attributes, closure."""
    if isinstance(x, types.FunctionType):
        yield from _of_function(x)
    elif isinstance(x, types.MethodType):
        yield "self", x.__self__
        yield "", x.__func__
    elif isinstance(x, functools.partial):
        names = getattr(getattr(x.func, "__code__", None), "co_varnames", ())
        yield from ((names[i] if i < len(names) else f"args[{i}]", y) for i, y in enumerate(x.args))
        yield from x.keywords.items()
        yield "", x.func
    elif isinstance(x, (list, tuple)):  # not by methods that a class of the user's may replace
        part = slice(MANY)
        is_list = isinstance(x, list)
        items = list.__getitem__(x, part) if is_list else tuple.__getitem__(x, part)
        yield from ((f"{name}[{i}]" if name else "", child) for i, child in enumerate(items))
    elif isinstance(x, dict):
        yield from ((f"{name}[{key!r}]", child) for key, child in [*dict.items(x)][:MANY])
    elif isinstance(x, torch.nn.Module):
        yield from _of_module(name or "self", x)
    elif not isinstance(x, (torch.Tensor, type, types.ModuleType)):
        yield from _of_object(name, x)


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    for variable, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield variable, cell.cell_contents
        except ValueError:
            continue  # empty
    defaults = fn.__defaults__ or ()
    yield from zip(code.co_varnames[: code.co_argcount][-len(defaults) :], defaults, strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    if is_ours(code.co_filename):
        return
    for variable in _names_in_code(code):
        value = fn.__globals__.get(variable)
        if isinstance(value, types.ModuleType) and not is_ours(
            getattr(value, "__file__", None) or "<frozen"
        ):
            known = ((other, getattr(value, other, None)) for other in _names_in_code(code))
            yield from (
                (f"{variable}.{other}", child) for other, child in known if child is not None
            )
        elif value is not None:
            yield variable, value


def _names_in_code(code: types.CodeType) -> list[str]:
    """The names that code and its nested functions use."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for c in inner for name in _names_in_code(c))]


def _of_module(name: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    held = (_compat.parameters_of(module), _compat.buffers_of(module), _compat.modules_of(module))
    yield from ((f"{name}.{key}", x) for table in held for key, x in table.items() if x is not None)
    yield from ((f"{name}.{key}", x) for key, x in vars(module).items() if not key.startswith("_"))
    yield "", type(module).forward


def _of_object(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, by name. A transform's name is left out of the paths of its
    attributes.
    """
    ours = (type(x).__module__ or "").startswith(__name__.partition(".")[0])
    slots = [
        s for kind in type(x).__mro__ for s in getattr(kind, "__slots__", ()) if isinstance(s, str)
    ]
    held = {
        **{s: getattr(x, s, None) for s in slots if not s.startswith("__")},
        **getattr(x, "__dict__", {}),
    }
    yield from (("" if ours else f"{name}.{key}", child) for key, child in held.items())
