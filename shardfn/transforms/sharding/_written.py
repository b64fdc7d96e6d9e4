"""Functions that write to closed-over buffers, such as the statistics of BatchNorm, or that store
values in closed-over objects. The captured program returns such values as results, and the call
stores them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ... import _compat
from ...capture.closure.closed_over_tensors import modules_of
from ...capture.modules.module_copies import computed_by_hooks
from ...errors import CaptureError, TreeError
from ...ops.placement import REDISTRIBUTE
from ...placement import P
from ...runtime import Needs, Request, Traced, attempt, call, trace
from ...runtime.options import Around
from ...world import current_world
from ._distribute import full

Place = tuple[torch.nn.Module, str]  # a module, and the name of a buffer
Places = tuple[Place, ...]
Stores = tuple[_compat.Place, ...]
# a module, a weight that a hook computes before each of its calls, and the hook
Weight = tuple[torch.nn.Module, str, Any]
Weights = tuple[Weight, ...]
CLONE = torch.ops.aten.clone.default
COPIES = {
    CLONE,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    REDISTRIBUTE,  # a DTensor, as the global value that it is
}


class Writes:
    """The buffers that a function writes to, for each mode of the modules that it closes over.

    Args:
        fn: the function.
        modules: these modules.
    """

    def __init__(self, fn: Callable[..., Any], modules: list[torch.nn.Module]) -> None:
        self.fn, self.modules = fn, modules
        self.requests: dict[tuple[bool, ...], tuple[Places, Stores, Request]] = {}

    def places(self) -> Places:
        """The buffers of the modules as they are now. A tensor that is two of them is left out."""
        self.modules = modules_of(self.fn)
        found: dict[int, list[Place]] = {}
        for module in self.modules:
            for name, x in _compat.buffers_of(module).items():
                if x is None or x.requires_grad:
                    continue
                places = found.setdefault(id(x), [])
                places.append((module, name))
        alone = [places for places in found.values() if len(places) == 1]
        return tuple(place for (place,) in alone)

    def staged(
        self,
        stage: Callable[..., Any],
        asked: Request,
        args: Any,
        kwargs: Any,
        needs: Needs | None = None,
    ) -> Any:
        """A stage of the function, or what it needs besides writes to buffers. A call writes the
        buffers.

        Args:
            stage: of a request, arguments and keyword arguments.
            asked: the function's own request.
            args: the arguments.
            kwargs: the keyword arguments.
            needs: what an attempt with that request and these arguments has found, if there was
                one.
        """
        if needs is not None:
            self.modules = modules_of(self.fn)
        weights = weights_of(self.modules)
        with without(weights), contextlib.ExitStack() as made:
            return self._staged(stage, asked, args, kwargs, needs, weights, made)

    def _staged(
        self,
        stage: Callable[..., Any],
        asked: Request,
        args: Any,
        kwargs: Any,
        needs: Needs | None,
        weights: Weights,
        made: contextlib.ExitStack,
    ) -> Any:
        """`staged`, of modules without the weights that hooks compute."""
        places, stores, request = before = self.requests.get(self.modes(), ((), (), asked))
        made.enter_context(without_stored(stores))
        out = needs if needs is not None else attempt(stage, request, args, kwargs)
        refusal: Exception | None = None
        while isinstance(out, Needs):
            made.enter_context(_compat.made_or_not(out.error))
            if new := self.new_stores(out.places, stores):
                stores = (*stores, *new)
                made.enter_context(without_stored(new))
                request = writing(asked, places, weights, stores)
                refuse_untraceable(request, args, kwargs, out.error)
                refuse_reads(request, asked, places, weights, stores, args, kwargs, out.error)
                refusal = out.error
                out = attempt(stage, request, args, kwargs)
                continue
            every = self.places() if out.may_write else places
            is_asked = request is asked and bool(weights)
            if set(every) == set(places) and not is_asked:
                return out
            few = self.few(asked, every, weights, stores, args, kwargs, out)
            if isinstance(few, Needs):
                return few
            # a buffer that takes its own value again does not count as written to
            places = every if set(few) == set(places) else few
            request = writing(asked, places, weights, stores)
            if refusal is not None:
                refuse_reads(request, asked, places, weights, stores, args, kwargs, refusal)
            out = attempt(stage, request, args, kwargs)
        if request is not before[2]:
            self.requests[self.modes()] = places, stores, request
        is_more = request is not asked and stage is call
        return written(places, stores, out) if is_more else out

    def new_stores(self, found: Stores, known: Stores) -> Stores:
        """The places that a function stores values in, besides the known ones and buffers."""
        tables = [_compat.buffers_of(module) for module in modules_of(self.fn)]
        others = (place for place in found if not any(place.owner is table for table in tables))
        return tuple(place for place in others if not _is_among(place, known))

    def modes(self) -> tuple[bool, ...]:
        """Return the training flag of each module, which keys the buffers that a call writes."""
        return tuple(module.training for module in self.modules)

    def few(
        self,
        asked: Request,
        places: Places,
        weights: Weights,
        stores: Stores,
        args: Any,
        kwargs: Any,
        needs: Needs,
    ) -> Places | Needs:
        """Those of these buffers that a call writes to. What the function needs, if it writes to
        something else too, or reads one of these buffers by another way than its module.
        """
        traced = attempt(trace, writing(asked, places, weights, stores), args, kwargs)
        if isinstance(traced, Needs):
            return needs if traced.may_write else traced
        few = changed(traced, places)
        return needs if are_read(traced, few) else few


def writing(
    asked: Request,
    places: Places,
    weights: Weights,
    stores: Stores,
    before: torch.Tensor | None = None,
) -> Request:
    """A request for a function as one that also returns what it stores, and the values of buffers
    after it.

    Args:
        asked: the function's own request.
        places: the buffers.
        weights: what hooks compute.
        stores: the places that the function stores values in.
        before: what they hold before the function runs, if anything.
    """
    fn = _returning(asked.fn, places, weights, stores, before)
    result = (asked.out_placements, None) if stores else asked.out_placements
    out = (result, P()) if asked.needs_mesh else None
    around = Around(_as_they_are, lambda out: written(places, stores, out))
    options = {"fn": fn, "out_placements": out, "around": around}
    made = attrs.evolve(asked, **options, structure=None)
    made.store.kin = asked.store.kin
    made.store.kin.update((asked.store, made.store))
    return made


def _as_they_are(request: Request, mesh: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _returning(
    fn: Callable[..., Any],
    places: Places,
    weights: Weights,
    stores: Stores,
    poison: torch.Tensor | None,
) -> Callable[..., Any]:
    tables = [(_compat.buffers_of(module), name) for module, name in places]
    attributes = [(owner, name) for owner, kind, name in stores if kind == "attr"]
    items = [(owner, name) for owner, kind, name in stores if kind == "item"]

    @_compat.read_by_dynamo
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [buffers[name] for buffers, name in tables]
        for buffers, name in tables:
            buffers[name] = buffers[name].detach().clone()
        if poison is not None:
            for owner, name in attributes:
                setattr(owner, name, poison)
            for owner, name in items:
                owner[name] = poison
        out = fn(*args, **kwargs)
        after = [buffers[name].detach() for buffers, name in tables]
        for (buffers, name), x in zip(tables, before, strict=True):
            buffers[name] = x
        for module, name, _ in weights:
            delattr(module, name)
        stored = []
        for owner, name in attributes:
            is_there = name in owner.__dict__
            is_stored = is_there and getattr(owner, name) is not poison
            stored.append((is_stored, getattr(owner, name) if is_stored else None))
            if is_there:
                delattr(owner, name)
        for owner, name in items:
            is_there = name in owner
            is_stored = is_there and owner[name] is not poison
            stored.append((is_stored, owner[name] if is_stored else None))
            if is_there:
                del owner[name]
        return ((out, stored) if stores else out), after

    return run


def refuse_untraceable(request: Request, args: Any, kwargs: Any, error: Exception) -> None:
    """Refuse a function that stores values, in the words of its refusal, where they cannot be
    results: it reads the values of the call before, or they are of a derivative inside.

    Raises:
        CaptureError: the given one.
    """
    try:
        out = attempt(trace, request, args, kwargs)
    except Exception:
        raise error from None
    if isinstance(out, Needs) and not (out.may_write or out.is_of_ranks or out.has_own_sizes):
        raise error


def refuse_reads(
    request: Request,
    asked: Request,
    places: Places,
    weights: Weights,
    stores: Stores,
    args: Any,
    kwargs: Any,
    error: Exception,
) -> None:
    """Refuse a function that asks whether the call before has stored something. Its program is
    another one where there is something.

    Raises:
        CaptureError: it asks. The line is that of the given refusal.
    """
    first = attempt(trace, request, args, kwargs)
    if isinstance(first, Needs):
        return
    filled = writing(asked, places, weights, stores, torch.zeros(()))
    try:
        second = attempt(trace, filled, args, kwargs)
    except Exception:
        second = None
    if not isinstance(second, Traced) or _code(first) != _code(second):
        named = ", ".join(_place_text(place) for place in stores)
        raise CaptureError.of(
            request.name,
            f"the function reads a value that an earlier call stored: {named}",
            needed="one pure graph of tensor ops",
            fix="return the value from the function, and pass it to the next call",
            source=getattr(error, "source", None),
        ) from None


def _place_text(place: _compat.Place) -> str:
    """A place as its owner's class and its name."""
    owner, kind, name = place
    return f"{type(owner).__name__}" + (f".{name}" if kind == "attr" else f"[{name!r}]")


def _code(traced: Traced) -> tuple[str, int]:
    """The code of a program, and the number of tensors that it closes over."""
    return traced.program.graph.code, len(traced.captured.closed_over)


def _is_among(place: _compat.Place, stores: Stores) -> bool:
    owner, *rest = place
    return any(owner is other and rest == others for other, *others in stores)


@contextlib.contextmanager
def without_stored(stores: Stores) -> Iterator[None]:
    """Places without the values that the call before has stored. Those that the call does not
    store again are put back.
    """
    tables = [(owner.__dict__ if kind == "attr" else owner, name) for owner, kind, name in stores]
    before = [(table, name, table.pop(name)) for table, name in tables if name in table]
    try:
        yield
    finally:
        for table, name, x in before:
            table.setdefault(name, x)


def weights_of(modules: Sequence[torch.nn.Module]) -> Weights:
    """The weights that hooks of torch compute before each call of these modules."""
    found: list[Weight] = []
    for module in modules:
        for name, hook in computed_by_hooks(module).items():
            is_pruning = hasattr(hook, "apply_mask")
            if is_pruning or isinstance(hook, (SpectralNorm, WeightNorm)):
                found.append((module, name, hook))
    return tuple(found)


@contextlib.contextmanager
def without(weights: Weights) -> Iterator[None]:
    """Modules without the weights that their hooks compute. Afterwards they are those of the last
    call, as in eager torch: functions of the parameters, which autograd follows.
    """
    for module, name, _ in weights:
        module.__dict__.pop(name, None)
    try:
        yield
    finally:
        for module, name, hook in weights:
            # torch does not compute on DTensors beside plain tensors: it would be missing, as the
            # module itself cannot be called outside
            with contextlib.suppress(RuntimeError):
                setattr(module, name, _computed(hook, module))


def _computed(hook: Any, module: torch.nn.Module) -> torch.Tensor:
    """The value that a hook gives its weight, without a change to the module's buffers."""
    if isinstance(hook, SpectralNorm):
        return hook.compute_weight(module, do_power_iteration=False)
    if isinstance(hook, WeightNorm):
        return hook.compute_weight(module)
    return hook.apply_mask(module)


def changed(traced: Traced, places: Places) -> Places:
    """The buffers that a function writes to."""
    (output,) = traced.program.graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    followed = traced.request.followed
    gradients = 0 if followed is None else len(followed.paths)
    last = len(results) - gradients
    own = results[last - len(places) : last]
    found = []
    for place, node in zip(places, own, strict=True):
        if not _is_input(node):
            found.append(place)
    return tuple(found)


def are_read(traced: Traced, places: Places) -> bool:
    """Whether a function reads one of these buffers by another way than its module, which would not
    see what is written to it.
    """
    ids = set()
    for module, name in places:
        buffer = _compat.buffers_of(module)[name]
        ids.add(id(buffer))
    tensors = traced.captured.closed_over
    holders = traced.program.graph.graph.find_nodes(op="placeholder")
    own = holders[len(holders) - len(tensors) :]
    for x, node in zip(tensors, own, strict=True):
        if id(x) in ids and not _is_only_copied(node):
            return True
    return False


def _is_only_copied(node: torch.fx.Node) -> bool:
    """Return whether every user of a node is a copy, such as clone."""
    if node.target is CLONE:
        return True
    are_copies = COPIES.issuperset(user.target for user in node.users)
    return are_copies and all(map(_is_only_copied, node.users))


def _is_input(node: Any) -> bool:
    """Return whether a node is a placeholder, or a copy of one."""
    while node.target in COPIES:
        (node,) = node.all_input_nodes
    return node.op == "placeholder"


def written(places: Places, stores: Stores, out: Any) -> Any:
    """Store what a call stores, copy the new values of buffers into the modules, and return the
    user's result.
    """
    result, after = out
    stored: Sequence[Any] = ()
    if stores:
        result, stored = result
    ordered = sorted(stores, key=lambda place: place.kind)  # as `_returning` has them
    for (owner, kind, name), (is_stored, x) in zip(ordered, stored, strict=True):
        if is_stored and kind == "attr":
            setattr(owner, name, x)
        elif is_stored:
            owner[name] = x
    if current_world().kind == "fake":  # without values
        return result
    with torch.no_grad():
        for (module, name), x in zip(places, after, strict=True):
            buffer = _compat.buffers_of(module)[name]
            _check(module, name, buffer, x)
            value = x if isinstance(buffer, DTensor) else full(x)
            buffer.copy_(value)
    return result


def _check(module: torch.nn.Module, name: str, buffer: Any, x: torch.Tensor) -> None:
    """Refuse a new value that does not fit the buffer.

    Raises:
        TreeError: it has another shape or dtype.
    """
    if x.shape != buffer.shape or x.dtype != buffer.dtype:
        raise TreeError.of(
            f"{type(module).__name__}, buffer {name}",
            f"the function stores a tensor of shape {tuple(x.shape)}, {x.dtype} in the buffer",
            needed=f"the buffer's shape and dtype: {tuple(buffer.shape)}, {buffer.dtype}",
            fix="fn, params, buffers = sf.functionalize(module), whose buffers may change shape "
            "and dtype",
            arg_path=name,
        )
