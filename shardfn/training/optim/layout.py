"""The state of an optimizer: which tensors there are, their first values, and whether its first
step is unlike the others.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...errors import CaptureError, TreeError
from .mode import Stepping
from .recipe import PURE, Options, Recipe, captured, set_present

STARTED = "started"  # the entry of a state whose first step is unlike the others
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
ITS_OWN = ("state", "param_groups", "defaults")  # attributes of every optimizer
State = dict[str, Any]


class First(dict[str, Any]):
    """The state of one parameter. It keeps the first value of each entry."""

    def __init__(self, values: Mapping[str, Any] = {}) -> None:
        super().__init__()
        self.first: State = {}
        for name, x in values.items():
            self[name] = x

    def __setitem__(self, name: str, x: Any) -> None:
        if name not in self.first:
            self.first[name] = x.clone() if isinstance(x, torch.Tensor) else x
        super().__setitem__(name, x)

    def setdefault(self, name: str, x: Any = None) -> Any:
        """The value of an entry, which is set if there is none."""
        if name not in self:
            self[name] = x
        return self[name]

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Set several entries."""
        for name, x in dict(values, **more).items():
            self[name] = x


@attrs.frozen
class Layout:
    """The state of one parameter.

    Args:
        kinds: the type of each entry by name: a tensor, or a number that a 0-d tensor holds.
        is_late: whether the first step, which has no state yet, differs from a step with the
            first values. Then the state says whether there was one.
        numbers: the entries of float32 that the step reads by `.item()` outside of a graph, such as
            the count of steps.
        of_param: the entries with the shape of the parameter, if torch wrote the step.
    """

    kinds: dict[str, type]
    is_late: bool
    numbers: frozenset[str]
    of_param: frozenset[str]

    @property
    def names(self) -> list[str]:
        """The entries of the tree."""
        mark = [STARTED] if self.is_late else []
        return [*self.kinds, *mark]


def layout_of(recipe: Recipe, path: str, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """The layout of a parameter's state, found by two steps of a small stand-in.

    Raises:
        CaptureError: the optimizer keeps something besides tensors and numbers, or elsewhere.
    """
    with (
        _compat.neutral(),
        _compat.values(),
        _compat.not_reading(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(0)
        p = torch.randn(shape, dtype=torch.float64).to(dtype)
        g = torch.randn(shape, dtype=torch.float64).to(dtype)
        torch.default_generator.manual_seed(1)
        fresh, state, _ = _stepped(recipe, path, p, g, {})
        torch.default_generator.manual_seed(1)
        later, after, numbers = _stepped(recipe, path, p, g, state.first)
        kinds = {name: _kind(recipe, name, x) for name, x in state.items()}
        is_same = torch.equal(fresh, later) and _same(state, after)
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    # in a class of the user's, the stand-in may have the shape of other tensors by chance
    same = [name for name, x in tensors.items() if x.dim() and x.shape == p.shape]
    of_param = frozenset(same if recipe.is_torchs else ())
    return Layout(kinds, not is_same, numbers, of_param)


def _stepped(
    recipe: Recipe, path: str, p: torch.Tensor, g: torch.Tensor, state: State
) -> tuple[torch.Tensor, First, frozenset[str]]:
    """(the parameter after a step, its state, the numbers of the state that the step reads)."""
    p, g = p.clone(), g.clone()
    optimizer = recipe.over([path], [p])
    set_present(optimizer, {**PURE, "capturable": False})
    first = _cloned(state) if state else _of_constructor(recipe, path, p)
    own = _with_state(optimizer, p, first)
    p.grad = g
    before = _others(optimizer)
    with _compat.ItemReads() as reads:
        unhooked(optimizer)()
    _refuse_others(recipe, before, _others(optimizer))
    ids = {id(x) for x in reads.tensors if x.dtype == torch.float32 and not x.dim()}
    return p, own, frozenset(name for name, x in own.items() if id(x) in ids)


def first_state(
    recipe: Recipe, layout: Layout, path: str, x: torch.Tensor, options: Options
) -> State:
    """The state of a parameter before the first step.

    Args:
        recipe: of the optimizer.
        layout: of the state.
        path: of the parameter.
        x: the parameter.
        options: those that are given for the first step.
    """
    if _compat.is_tracing():
        p, own = captured(lambda pure: _first_in_graph(recipe, path, x, options, pure))
    else:
        p, own, optimizer, _ = _started(recipe, path, x, options)
        if isinstance(p, DTensor):  # torch has not each fused step for them
            set_present(optimizer, {"fused": False})
        with torch.random.fork_rng(devices=[]):  # init draws nothing
            _run_until_known(optimizer, own, layout)
    check_entries(recipe, layout, path, own.first, options)
    values: State = {}
    for name in layout.kinds:
        first = _as_tensor(own.first[name], p)
        values[name] = torch.zeros_like(first) if layout.is_late else first
    if layout.is_late:
        values[STARTED] = torch.zeros((), dtype=torch.bool, device=p.device)
    return values


def _started(
    recipe: Recipe, path: str, x: torch.Tensor, options: Options
) -> tuple[torch.Tensor, First, torch.optim.Optimizer, Stepping]:
    """(a copy of a parameter, its first state, an optimizer over it, the mode of its steps in a
    graph), with a gradient of zeros.
    """
    p = x.detach().clone()
    optimizer = recipe.over([path], [p])
    mode = Stepping.with_options(recipe, optimizer, options)
    own = _with_state(optimizer, p, _of_constructor(recipe, path, p))
    p.grad = torch.zeros_like(p)
    return p, own, optimizer, mode


def _first_in_graph(
    recipe: Recipe, path: str, x: torch.Tensor, options: Options, pure: Options
) -> tuple[torch.Tensor, First]:
    """(a copy of a parameter, its state after a step in a graph)."""
    p, own, optimizer, mode = _started(recipe, path, x, options)
    set_present(optimizer, pure)
    with mode:
        unhooked(optimizer)()
    return p, own


def _run_until_known(optimizer: torch.optim.Optimizer, own: First, layout: Layout) -> None:
    """A step, for the first values of its state. An error of a DTensor after the last of these
    does not matter.
    """
    try:
        unhooked(optimizer)()
    except Exception:
        values = own.first.values()
        are_known = all(name in own.first for name in layout.kinds)
        if not are_known or not any(isinstance(x, DTensor) for x in values):
            raise


def unhooked(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step of an optimizer without the hooks of torch's profiler."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def _with_state(optimizer: torch.optim.Optimizer, p: torch.Tensor, state: State) -> First:
    """The state of an optimizer's one parameter, with these values in it."""
    own = First(state)
    optimizer.state = defaultdict(First, {p: own})
    return own


def _of_constructor(recipe: Recipe, path: str, p: torch.Tensor) -> State:
    """The state that the constructor of the optimizer makes for a parameter."""
    made = recipe.made(recipe.grouped([path], [p]))
    return dict(made.state.get(p, {}))


def _cloned(state: State) -> State:
    found: State = {}
    for name, x in state.items():
        found[name] = x.clone() if isinstance(x, torch.Tensor) else x
    return found


def _kind(recipe: Recipe, name: str, x: Any) -> type:
    """The type of an entry of the state.

    Raises:
        CaptureError: neither a tensor nor a number.
    """
    if isinstance(x, torch.Tensor):
        return torch.Tensor
    if type(x) in NUMBERS:
        return type(x)
    raise CaptureError.of(
        recipe.name,
        f"the optimizer's state has a {type(x).__name__}: {name!r}",
        needed="a state of tensors and numbers",
        fix=f"store state[{name!r}] as a tensor",
        arg_path=f"state[{name!r}]",
    )


@contextlib.contextmanager
def entries_of_constructor(recipe: Recipe, options: Iterable[str]) -> Iterator[None]:
    """A context of a step with these options, which may need a state that the constructor's
    options do not make.

    Raises:
        TreeError: the step reads an entry that the state lacks.
    """
    try:
        yield
    except KeyError as error:
        if not options or not recipe.is_torchs:
            raise
        raise _of_options(recipe, options, f"the state has no {error.args[0]}") from None


def _of_options(recipe: Recipe, options: Iterable[str], got: str) -> TreeError:
    names = ", ".join(options)
    return TreeError.of(
        f"{recipe.name}.update",
        f"with this {names} {got}",
        needed="options that need the same state as those of the constructor",
        fix=f"give {names} to the constructor, which makes the state: "
        f"sf.optim(torch.optim.{recipe.cls.__name__}, ...)",
        arg_path=names,
    )


def check_entries(
    recipe: Recipe, layout: Layout, path: str, state: State, options: Iterable[str]
) -> None:
    """Check that the state of a parameter has the entries of its layout.

    Raises:
        CaptureError: the entries depend on the size of the parameter, or on the number of steps.
        TreeError: they depend on the options of the step.
    """
    if state.keys() != layout.kinds.keys():
        got, known = (", ".join(names) or "nothing" for names in (state, layout.kinds))
        if options and recipe.is_torchs:
            raise _of_options(recipe, options, f"the state has {got}, and had {known} before")
        raise CaptureError.of(
            recipe.name,
            f"the state of {path!r} has {got}, but that of a small parameter after one step has "
            f"{known}",
            needed="a state whose entries depend neither on sizes nor on the number of steps",
            fix="make all entries of self.state[p] in the first step",
            arg_path=path,
        )


def _as_tensor(x: Any, p: torch.Tensor) -> torch.Tensor:
    """A value of the state where its parameter lives. Torch keeps counts of steps on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.to(p.device)
    dtype = NUMBERS[type(x)]
    return torch.tensor(x, dtype=dtype, device=p.device)


def _same(a: State, b: State) -> bool:
    """Whether two states are equal to the last bit."""
    if a.keys() != b.keys():
        return False
    return all(_is_equal(x, b[name]) for name, x in a.items())


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type, and equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in pairs)
    return bool(a == b)


def _others(optimizer: torch.optim.Optimizer) -> State:
    """All that an optimizer holds besides the state of its parameters, by place."""
    found: State = {}
    for name, x in vars(optimizer).items():
        if not name.startswith("_") and name not in ITS_OWN:
            found[f"self.{name}"] = content(x)
    for i, group in enumerate(optimizer.param_groups):
        for name, x in group.items():
            if name != "params":
                found[f"param_groups[{i}][{name!r}]"] = content(x)
    return found


def content(x: Any, depth: int = 3) -> Any:
    """The content of an attribute, which a step may change in place: a copy of a tensor, the
    values in a container or in the state of another optimizer.
    """
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, torch.optim.Optimizer):
        return content(x.state, depth)
    if not isinstance(x, (dict, list, tuple, set)) or not depth:
        return x
    inside = x.values() if isinstance(x, dict) else x
    return [content(y, depth - 1) for y in inside]


def _refuse_others(recipe: Recipe, before: State, after: State) -> None:
    """Refuse an optimizer that counts or keeps values outside of the state of its parameters.

    Raises:
        CaptureError: lists the places.
    """
    places = []
    for place, x in after.items():
        was = before.get(place)
        if was is not x and not _is_equal(was, x):
            places.append(place)
    if places:
        raise CaptureError.of(
            recipe.name,
            f"the optimizer's step changes {', '.join(places)}",
            needed="an optimizer whose step() changes only self.state[p]",
            fix="store values that change in self.state[p][name]",
        )
