"""The call of a transformed function. For a known signature, the call looks up the program, runs
it, and wraps the results.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, _tree
from ..capture import Reads, Template, constant_key
from ..capture.refusals.leaked_values import leaked
from ..capture.rewrites.as_strided import refuse_unstrided
from ..capture.rewrites.sparse_borders import is_supported
from ..errors import ShardError
from ..mesh import axes_of, current_mesh
from ..own_dtensors import OwnDTensor
from ..partition.rule_api import registry
from ..simulated import DonatedTensor, SimulatedDTensor, SimulatedTensor, UnreadTensor
from ..stage_log import stage
from ..tracebacks import has_our_note, is_of_run
from ..world import World, current_world
from .agreement import checked, compare_ranks
from .arguments import (
    Placed,
    Taken,
    arguments_of,
    is_prepared,
    place,
    prepared_for,
    refuse_without_values,
    taken,
    whole_mesh,
)
from .changing import note_changes
from .key_use import keys_noted
from .layouts import picking
from .options import Request
from .retraces import KNOWN, retrace
from .stages import Traced, compiled_for, explain_failed, prepare, traced_for
from .structure import leaves_like

log = logging.getLogger("shardfn")
KEPT_SIGNATURES = 64
DTENSORS = {DTensor, SimulatedDTensor, OwnDTensor}
PLAIN = {torch.Tensor, torch.nn.Parameter, UnreadTensor, DonatedTensor}
REQUIRES_GRAD = operator.attrgetter("requires_grad")


def call(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a transformed function on arguments, staging it first if their signature is new."""
    world, mesh = current_world(), request.mesh or current_mesh()
    rules, state = registry.active(), _compat.settings()
    store = request.store
    for entry in store.entries[:1]:
        leaves = entry.repeated((args, kwargs), world, mesh, rules, state)
        if leaves is not None and not _compat.in_dual_level():
            return entry.run(leaves)
    leaves, treedef = _tree.flatten((args, kwargs))
    around = (treedef, world, mesh, rules, state)
    try:
        key = [_spec(x) if type(x) in DTENSORS else _signature(x) for x in leaves]
    except (RuntimeError, NotImplementedError):  # for a tensor without strides
        if not any(map(is_supported, leaves)):
            paths = _tree.argument_paths(request.signature_of, args, kwargs)
            refuse_unstrided(request.name, leaves, paths)
            raise
        return call(request, *prepared_for(request, args, kwargs))
    for entry in store.entries:
        if entry.fits(key, *around):
            if not entry.follows(leaves):
                continue
            if _compat.in_dual_level():
                break
            # replace equal specs by identical ones, which compare faster the next time
            entry.key = key
            entry.remember(leaves)
            if entry is not store.entries[0]:
                store.put_first(entry)
            return entry.run(leaves)
    return _first_call(request, Taken(args, kwargs, leaves, treedef), (key, *around))


def explain_retrace(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say whether a call with these arguments would be staged, and why."""
    given = taken(request, args, kwargs)
    leaves, treedef = given.leaves, given.treedef
    key = [_spec(x) if type(x) in DTENSORS else _signature(x) for x in leaves]
    world, mesh = current_world(), request.mesh or current_mesh()
    signature = (key, treedef, world, mesh, registry.active(), _compat.settings())
    entries = request.store.entries
    if any(entry.fits(*signature) and entry.follows(leaves) for entry in entries):
        return f"{request.name}: {KNOWN}"
    placed = place(request, arguments_of(request, given))
    return retrace(request.name, request.store.every(), key, placed, mesh)


def _first_call(request: Request, given: Taken, signature: tuple[Any, ...]) -> Any:
    """Stage a function for a new signature, and run it."""
    args, kwargs, leaves, _ = given
    if not is_prepared(leaves, whole_mesh(request)):
        return call(request, *prepared_for(request, args, kwargs))
    refuse_without_values(
        request.name, leaves, lambda: _tree.argument_paths(request.signature_of, args, kwargs)
    )
    key, _, _, mesh, *_ = signature
    ready = out = failed = None
    try:
        with _compat.paused_gc(), _compat.staging():
            ready = _staged_meanwhile(request, leaves, *signature)
            entry = ready or _stage(request, given, key, mesh)
        with stage("run", request.name):
            out = entry.run(leaves)
    except Exception as error:
        is_of_compiler = type(error) is ShardError and error.__cause__ is not None
        is_explained = has_our_note(error) and not is_of_run(error)
        if is_explained or (isinstance(error, ShardError) and not is_of_compiler):
            raise
        failed = error
    if failed is not None:
        explain_failed(request, given, failed)
        raise failed
    if ready is None and any(
        isinstance(x, torch.Tensor) and _compat.is_fake(x) for x in _tree.leaves(out)
    ):
        raise leaked(f"{request.name}, its result")
    return out


def _staged_meanwhile(request: Request, leaves: list[Any], *signature: Any) -> Entry | None:
    """Find the entry that another thread has staged for this signature during the wait for the
    lock.
    """
    if _compat.in_dual_level():
        return None
    for entry in request.store.entries:
        if entry.fits(*signature) and entry.follows(leaves):
            return entry
    return None


def _spec(x: Any) -> Any:
    """Key a DTensor by its spec, and by the class of its local tensor if that is not
    a plain one.
    """
    spec, local = x._spec, _compat.local_tensor(x)
    if type(local) is SimulatedTensor:
        local = local.shards[local.shown]
    return spec if type(local) in PLAIN else (spec, type(local))


def _have_same_links(a: Any, b: Any) -> bool:
    """Return whether equal parts of two keys belong to meshes of the same links, which torch's
    equality of meshes leaves out.
    """
    if a is b:
        return True
    mine, other = (getattr(x[0] if type(x) is tuple and x else x, "mesh", None) for x in (a, b))
    return mine is other or axes_of(mine) == axes_of(other)


def _signature(x: Any) -> Any:
    kind = type(x)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return x.shape, x.stride(), x.dtype, x.device
    if isinstance(x, torch.Tensor):
        return kind, x.shape, x.stride(), x.dtype, x.device
    return constant_key(x)


def _stage(request: Request, given: Taken, key: list[Any], mesh: Any) -> Entry:
    leaves = given.leaves
    prepare(request, leaves)
    traced = traced_for(request, arguments_of(request, given))
    placed, captured, entries = (traced.placed, traced.captured, request.store.entries)
    outside = captured.outside
    _note_retrace(request, key, placed, mesh)
    refuse_without_values(request.name, outside.tensors, lambda: outside.names)
    compare_ranks(request, placed, leaves, outside.shared, outside.names, staging=True)
    compiled = compiled_for(traced, warm=True)
    _compare_constants(traced, leaves)
    is_all = len(placed.tensors) == placed.treedef.num_leaves
    suspects = list(outside.suspects())
    entry = Entry(
        key=key,
        treedef=placed.treedef,
        paths=placed.paths,
        world=placed.world,
        mesh=mesh,
        rules=registry.active(),
        state=placed.state,
        reads=captured.reads if captured.reads.check else None,
        outside=outside if outside.holders else None,
        template=captured.template,
        fixed=captured.fixed,
        facts=captured.facts,
        tensors=None if is_all else placed.tensors,
        suspects=suspects,
        followed=_followed([leaves[i] for i in placed.tensors] + suspects),
        run=_watched(compiled.run, request, placed, captured),
    )
    request.store.entries = _with(entry, entries)
    return entry


def _watched(run: Any, request: Request, placed: Placed, captured: Any) -> Any:
    """Wrap `run` with the checks of each call."""
    run = checked(run, request, placed)
    return keys_noted(run, request, placed, captured)


def _compare_constants(traced: Traced, leaves: list[Any]) -> None:
    """Compare the constants of a program among ranks. Ranks with uneven shards may differ."""
    outside = traced.captured.outside
    if outside.constants and not traced.ranks:
        request, placed = traced.request, traced.placed
        compare_ranks(request, placed, leaves, outside.tensors, outside.names, staging=True)


def _with(entry: Entry, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Add an entry to those of a function, dropping entries that cannot be used again."""
    alive = [e for e in entries if e.reads is None or not e.reads.is_lost()]
    return entry, *alive[: KEPT_SIGNATURES - 1]


def _followed(tensors: list[Any]) -> tuple[bool, ...] | None:
    """List the tensors that autograd follows; None if there are none."""
    flags = tuple(map(REQUIRES_GRAD, tensors))
    return flags if torch.is_grad_enabled() and any(flags) else None


def _note_retrace(request: Request, key: list[Any], placed: Placed, mesh: Any) -> None:
    """Log the reason why a new signature is staged, and warn of constants that keep changing."""
    store = request.store
    explained = retrace(request.name, store.every(), key, placed, mesh)
    if store.entries:
        note_changes(request, store.entries, key, placed)
        log.info("%s", explained)
    for each in (store, *store.kin):
        each.retrace = explained


@attrs.define(eq=False)
class Entry:
    """One signature, ready to be called. Only its key is ever replaced, by an equal one, and a
    check of tensors that have this key is added.
    """

    key: list[Any]
    treedef: Any
    paths: tuple[str, ...]  # of the leaves
    world: World
    mesh: Any
    rules: tuple[registry.Registered, ...]  # the sharding rules of the partition
    state: tuple[Any, ...]  # of torch's settings
    reads: Reads | None  # of its closed-over values; None if it has none
    outside: Any  # its closed-over tensors, if some hold others; else None
    # the function as it was read for other sizes too, and why it could not be
    template: Template | None
    fixed: str
    facts: _compat.Facts  # what the function has asked of its argument tensors
    tensors: tuple[int, ...] | None  # positions of the tensor leaves; None for all
    suspects: list[torch.Tensor]  # closed-over tensors that autograd may follow
    followed: tuple[bool, ...] | None  # which of both it follows; None for none
    run: Callable[[list[Any]], Any]
    alike: Callable[[list[Any]], bool] | None = None  # whether tensors have this key
    leaves_of: Callable[[Any], list[Any] | None] | None = None  # of this structure
    is_grad_enabled: bool = False  # where they have

    def fits(self, key: Any, treedef: Any, *rest: Any) -> bool:
        """Return whether a call matches this signature, in the same world and with the same
        settings.
        """
        is_same = self.key == key and self.treedef == treedef and self.is_in(*rest)
        return is_same and all(map(_have_same_links, self.key, key))

    def repeated(self, arguments: Any, *rest: Any) -> list[Any] | None:
        """Flatten the arguments if one check of all tensors shows that `fits` and `follows` hold;
        None if that check cannot tell.
        """
        if (
            self.alike is None
            or self.leaves_of is None
            or self.is_grad_enabled is not torch.is_grad_enabled()
            or not self.is_in(*rest)
        ):
            return None
        leaves = self.leaves_of(arguments)
        # the check of tensors refuses a container in the place of a leaf
        return leaves if leaves is not None and self.alike(leaves) else None

    def remember(self, leaves: list[Any]) -> None:
        """Build the check of `repeated`, for plain tensors and DTensors that autograd does not
        follow.
        """
        if self.alike is not None or not leaves or self.suspects or self.facts:
            return
        self.alike = self._check_of(leaves)
        if self.alike is None:
            return
        self.is_grad_enabled = torch.is_grad_enabled()
        self.leaves_of = leaves_like(self.treedef) or self._flattened

    def _check_of(self, leaves: list[Any]) -> Callable[[list[Any]], bool] | None:
        """Build the check that tensors are like these; None if no single check can tell."""
        plain = [i for i, x in enumerate(leaves) if type(x) in _compat.ORDINARY]
        if len(plain) == len(leaves):
            return _compat.calls.SameTensors(leaves)
        others = picking([i for i in range(len(leaves)) if i not in {*plain}])
        is_known = _compat.calls.are_dtensors(others(leaves), others(self.key))
        if self.followed is not None or not is_known:
            return None
        if not plain:
            return lambda xs: _compat.calls.are_dtensors(xs, self.key)
        own = picking(plain)
        same = _compat.calls.SameTensors(own(leaves))
        return lambda xs: _compat.calls.are_dtensors(others(xs), others(self.key)) and same(own(xs))

    def _flattened(self, arguments: Any) -> list[Any] | None:
        """Flatten arguments of this entry's structure; None for another structure."""
        leaves, treedef = _tree.flatten(arguments)
        return leaves if treedef == self.treedef else None

    def is_in(self, world: Any, mesh: Any, rules: Any, state: Any) -> bool:
        """Return whether a call is in the entry's world and settings."""
        return (
            self.world is world
            and self.mesh is mesh
            and self.rules == rules
            and self.state == state
            and (self.reads is None or self.reads.same())
            and (self.outside is None or self.outside.is_unchanged())
        )

    def follows(self, leaves: list[Any]) -> bool:
        """Return whether autograd follows the same tensors as in this signature's first call, and
        these answer what the function asks of them as they did.
        """
        if not _compat.have_facts(leaves, self.facts):
            return False
        if not torch.is_grad_enabled():
            return self.followed is None
        flags = map(REQUIRES_GRAD, self.watched(leaves))
        if self.followed is None:
            return not any(flags)
        return tuple(flags) == self.followed

    def watched(self, leaves: list[Any]) -> list[Any]:
        """List the tensors that autograd may follow: arguments and closed-over tensors."""
        tensors = leaves if self.tensors is None else [leaves[i] for i in self.tensors]
        return tensors + self.suspects if self.suspects else tensors
