"""Donated arguments. They are checked before the run, and made unusable after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...capture.aten_views import memory_of
from ...placement import torch_placements
from ...simulated import DonatedTensor, remains_of, used_after_donation
from ...types import Aval
from .. import cache
from ..store import Earlier
from .refusals import memory_tensors, refuse_saved, refused_expanded, refused_held, refused_shared

Layout = tuple[tuple[int, ...], dict[str, Any]]  # shape; strides, dtype and device by name


@attrs.frozen(eq=False)
class Donation:
    """The donated arguments of a compiled program: checked before a call, invalidated after it.

    Args:
        name: of the transformed function.
        taken: the positions of the donated leaves.
        others: the positions of the other tensors among the leaves.
        paths: of all leaves.
        closed_over: the tensors that the function closes over.
        layouts: shape, and strides, dtype and device, of each donated leaf.
        writes: whether the program writes into donated memory.
        recorded: whether autograd records the call, and may refer to the arguments.
        viewed: whether a result is a view of a donated argument.
        gone: for donated DTensors, the spec that each gets. None for other tensors.
        is_mixed: whether only some of the donated are DTensors.
        kind: the class of an argument after the call.
        earlier: the arguments of the last call.
    """

    name: str
    taken: tuple[int, ...]
    others: tuple[int, ...]
    paths: tuple[str, ...]
    closed_over: tuple[torch.Tensor, ...]
    layouts: tuple[Layout, ...]
    writes: bool
    recorded: bool
    viewed: bool
    gone: tuple[Any, ...] | None
    is_mixed: bool
    kind: type[DonatedTensor] = attrs.field(
        init=False, default=attrs.Factory(lambda x: remains_of(x.name), takes_self=True)
    )
    earlier: Earlier = attrs.field(init=False, factory=Earlier)

    def run(
        self, leaves: list[Any], execute: Callable[[Any], list[Any]], wrap: Callable[..., Any]
    ) -> Any:
        """Check the arguments, run, invalidate the donated ones, and wrap the results. No other
        thread may donate one meanwhile.

        Raises:
            ShardError: a donated tensor that cannot be donated, or that was donated before.
        """
        mine = [leaves[i] for i in self.taken]
        found = self.exchanged(leaves)
        if found is not None:
            return self.run_exchanged(mine, *found, execute, wrap)
        ids = set(map(id, mine))
        with cache.claimed(ids) as free:
            is_clear = free and self.is_clear(mine, ids, leaves)
            if is_clear and self.is_simple(mine):
                holders = self.in_holders(mine)
                given = list(leaves)
                for i, holder in zip(self.taken, holders, strict=True):
                    given[i] = holder
                return self.run_exchanged(mine, given, holders, execute, wrap)
            if not is_clear:
                gone = next(filter(None, map(_donated_to, mine)), None)
                if gone is not None or not free:
                    raise used_after_donation(gone or self.name)
                self.check(leaves)
            given = leaves if is_clear else self.owned(leaves)
            return wrap(self.take(mine, execute(given)))

    def is_simple(self, mine: Sequence[Any]) -> bool:
        """Return whether the donated are plain tensors, or DTensors of such, that nothing else
        sees.
        """
        if self.recorded or self.is_mixed or not self.writes:
            return False
        if self.gone is None:
            return _compat.are_plain(mine)
        are_dtensors = {DTensor}.issuperset(map(type, mine))
        return are_dtensors and _compat.are_plain(_compat.calls.locals_of(list(mine)))

    def exchanged(self, leaves: list[Any]) -> tuple[list[Any], Sequence[torch.Tensor]] | None:
        """Move the memory of donated arguments into spare tensor objects; None where that is not
        possible.
        """
        if self.recorded or self.is_mixed or cache.is_claimed():
            return None
        earlier = self.earlier.take()
        if earlier is None:
            return None
        about = self.taken, self.others, self.closed_over
        given = _compat.calls.exchanged(leaves, *about, earlier, self.kind, self.gone)
        if given is None:
            self.earlier.put(earlier)
            return None
        return given, earlier

    def in_holders(self, mine: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Make new tensor objects that hold the memory of the donated ones."""
        if self.gone is None:
            holders = self.holders()
            _compat.exchange(mine, holders)
            return holders
        locals_ = _compat.calls.locals_of(list(mine))
        rows = [layout_of_tensor(x) for x in locals_]
        holders = _compat.without_memory(self.kind, rows)
        specs = list(map(_compat.spec_of, mine))
        _compat.exchange(locals_, holders)
        _compat.calls.put_specs(mine, self.gone)
        return _compat.dtensors(holders, specs)

    def run_exchanged(
        self,
        mine: Sequence[Any],
        given: list[Any],
        holders: Sequence[Any],
        execute: Callable[[Any], list[Any]],
        wrap: Callable[..., Any],
    ) -> Any:
        """Run on tensors whose memory has moved to spare objects, which may become the results.

        An exception gives the memory back.
        """
        try:
            outs = execute(given)
        except BaseException:
            self.give_back(holders, mine)
            raise
        self.earlier.put(mine)
        if self.gone is None:
            return wrap(_without_views(holders, outs) if self.viewed else outs)
        if self.viewed:
            outs = _without_views(_compat.calls.locals_of(list(holders)), outs)
        return wrap(outs, list(holders))

    def give_back(self, holders: Sequence[Any], mine: Sequence[Any]) -> None:
        """Undo the exchange of memory after an error."""
        if self.gone is None:
            _compat.exchange(holders, mine)
            return
        pairs = _compat.calls.locals_of(list(holders)), _compat.calls.locals_of(list(mine))
        _compat.exchange(*pairs)
        specs = list(map(_compat.spec_of, holders))
        _compat.calls.put_specs(mine, specs)

    def holders(self) -> Sequence[torch.Tensor]:
        """Tensors without memory for a call to exchange with its arguments. They are the arguments
        of the last call if nothing refers to those any more, since making one takes longer than
        the rest of its donation.
        """
        earlier = self.earlier.take()
        if earlier is not None and _compat.is_forgotten(earlier):
            return earlier
        return _compat.without_memory(self.kind, self.layouts)

    def is_clear(self, mine: Sequence[Any], ids: set[int], leaves: Sequence[Any]) -> bool:
        """Decide in a few steps a leaf that `check` refuses nothing and `owned` copies nothing;
        False if only they can tell.

        A tensor that is the only owner of its memory shares it with no other tensor, so each of
        the donated must only be another object than the rest.
        """
        donated = _ordinary(mine)
        others = _ordinary([leaves[i] for i in self.others])
        outside = _ordinary(self.closed_over)
        if donated is None or others is None or outside is None:
            return False
        if donated is not mine:
            ids = set(map(id, donated))
        return (
            len(ids) == len(donated)
            and ids.isdisjoint(map(id, others))
            and ids.isdisjoint(map(id, outside))
            and _compat.are_alone(donated)
        )

    def check(self, leaves: Sequence[Any]) -> None:
        """Refuse arguments that cannot be donated, before anything has run.

        Raises:
            ShardError: a donated tensor that is passed twice, that the function closes over, or
                whose memory something else shares.
        """
        seen: dict[int, str] = {}
        for x in self.closed_over:
            for local in memory_tensors(x):
                said = f"a tensor that {self.name} closes over"
                seen[_compat.storage_of(local)] = said
        for i in self.others:
            for local in memory_tensors(leaves[i]):
                seen[_compat.storage_of(local)] = f"argument {self.paths[i]}"
        for i in self.taken:
            mine = {_compat.storage_of(local) for local in memory_tensors(leaves[i])}
            twice = next((seen[storage] for storage in mine if storage in seen), None)
            if twice is not None:
                raise refused_shared(self.name, self.paths[i], twice)
            seen.update(dict.fromkeys(mine, f"argument {self.paths[i]}"))
            if not isinstance(leaves[i], DTensor) and not _compat.can_be_taken(leaves[i]):
                raise refused_held(self.name, self.paths[i])

    def owned(self, leaves: list[Any]) -> list[Any]:
        """Copy each donated leaf whose memory something else sees."""
        if not self.writes:
            return leaves
        given = list(leaves)
        for i in self.taken:
            if not isinstance(leaves[i], DTensor) and _compat.may_overlap(leaves[i]):
                raise refused_expanded(self.name, self.paths[i])
            given[i] = _own(leaves[i])
        return given

    def take(self, mine: Sequence[Any], outs: list[Any]) -> list[Any]:
        """Invalidate the donated arguments: every later use is an error that names this call.
        Returns the results.
        """
        ids = set(map(id, mine))
        outs = [_free(x) if id(x) in ids else x for x in outs]
        results = _without_views(mine, outs)
        for x in mine:
            if isinstance(x, DTensor):
                x._local_tensor = DonatedTensor(_compat.local_tensor(x), self.name)
                x._spec = _compat.gone_spec(_compat.spec_of(x))
            else:
                try:
                    torch.utils.swap_tensors(x, DonatedTensor(x, self.name))
                except RuntimeError:  # the compiled code keeps it for its backward
                    taken = zip(self.taken, mine, strict=True)
                    path = next(self.paths[i] for i, own in taken if own is x)
                    raise refused_held(self.name, path) from None
        return results


def are_viewed(graph: torch.fx.Graph, donated: Collection[int]) -> bool:
    """Return whether a result of a graph is a view of one of its donated inputs."""
    holders = graph.find_nodes(op="placeholder")
    memory = {holders[i] for i in donated}
    (output,) = graph.find_nodes(op="output")
    results = {x for x in output.args[0] if isinstance(x, torch.fx.Node)}
    return any(memory_of(x) in memory for x in results - memory)


def layout_of(aval: Aval) -> Layout:
    """Describe the layout of a donated argument of a program, for the tensor that remains of it."""
    device = torch.device(aval.device)
    return aval.shape, {"strides": aval.stride, "dtype": aval.dtype, "device": device}


def layout_of_tensor(x: torch.Tensor) -> Layout:
    """Describe the layout of a tensor, for what remains of it after donation."""
    return tuple(x.shape), {"strides": x.stride(), "dtype": x.dtype, "device": x.device}


def _gone(compiled: Any) -> tuple[Any, ...] | None:
    """List the specs of donated DTensors; None if one of the donated is no DTensor."""
    placed = compiled.placed
    rows = zip(placed.tensors, placed.dtensors, placed.marks, placed.avals, strict=True)
    mine = [row[1:] for row in rows if row[0] in placed.donated]
    if not all(is_dtensor for is_dtensor, *_ in mine):
        return None
    specs = [
        _compat.dtensor_spec(placed.mesh, torch_placements(marks), x.shape, x.stride, x.dtype)
        for _, marks, x in mine
    ]
    return tuple(map(_compat.gone_spec, specs))


def _ordinary(tensors: Sequence[Any]) -> Sequence[torch.Tensor] | None:
    """List local tensors if all are ordinary strided tensors, else None."""
    if _compat.ORDINARY.issuperset(map(type, tensors)):
        return tensors
    locals_ = [_compat.local_tensor(x) if isinstance(x, DTensor) else x for x in tensors]
    return locals_ if _compat.ORDINARY.issuperset(map(type, locals_)) else None


def _without_views(memory: Sequence[torch.Tensor], outs: list[Any]) -> list[Any]:
    """Detach results that view donated memory from the donated tensors."""
    ids = set(map(id, memory))
    return [_free(x) if id(_compat.base_of(x)) in ids else x for x in outs]


def _donated_to(x: Any) -> str | None:
    """Return the call that a tensor was donated to."""
    return getattr(_compat.local_tensor(x) if isinstance(x, DTensor) else x, "call", None)


def _free(x: torch.Tensor) -> torch.Tensor:
    """Detach one result in donated memory from the donated tensor."""
    memory = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        memory, x.storage_offset(), x.shape, x.stride()
    )


def _own(x: Any) -> Any:
    """Return a donated tensor if nothing else sees its memory, else a copy that results may
    overwrite.
    """
    local = _compat.local_tensor(x) if isinstance(x, DTensor) else x
    if _compat.is_sole_owner(local):
        return x
    copy = torch.empty_strided(
        local.shape, local.stride(), dtype=local.dtype, device=local.device
    ).copy_(local)
    if not isinstance(x, DTensor):
        return copy
    (placed,) = _compat.dtensors([copy], [_compat.spec_of(x)], type(x))
    return placed


def donation_of(compiled: Any) -> Donation | None:
    """Build the Donation of a compiled program; None if it donates nothing."""
    placed, taken = compiled.placed, compiled.placed.donated
    if not taken:
        return None
    refuse_saved(compiled)
    avals = dict(zip(placed.tensors, placed.avals, strict=True))
    kinds = dict(zip(placed.tensors, placed.dtensors, strict=True))
    first = len(placed.axes.names)
    among = set(taken)
    inputs = {first + k for k, i in enumerate(placed.tensors) if i in among}
    return Donation(
        name=compiled.request.name,
        taken=taken,
        others=tuple(i for i in placed.tensors if i not in among),
        paths=placed.paths,
        closed_over=compiled.captured.closed_over,
        layouts=tuple(layout_of(avals[i]) for i in taken),
        writes=compiled.runner is not None,
        recorded=compiled.backward is not None,
        viewed=are_viewed(compiled.program.graph, inputs),
        gone=_gone(compiled),
        is_mixed=len({kinds[i] for i in taken}) > 1,
    )
