"""The result of compilation: an object that turns arguments into local tensors, runs the program,
and wraps the results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, extensions
from ..capture import Captured, name_of
from ..compile import Runner
from ..compile.memory import memory_as_run
from ..errors import ShardError, TreeError, call_site
from ..inspect.memory import Memory
from ..mesh import all_coordinates
from ..partition import Plan
from ..progress import progress
from ..simulated import SimulatedTensor, UnreadTensor, ranks_of, shown
from ..tracebacks import filter_errors
from ..types import LocalProgram
from .agreement import compare_ranks, state_agreed
from .arguments import (
    Placed,
    donated_places,
    other_constants,
    other_leaves,
    other_tensors,
    refuse_lost_gradient,
    refuse_lost_tangent,
    refuse_without_values,
    said,
    taken,
)
from .artefacts.save import save_compiled
from .backward.op import Differentiable, refusing_backward
from .backward.second_half import Backward
from .donation import Donation, donation_of
from .failed_runs import explained
from .layouts import (
    closed_over,
    closed_over_of_kinds,
    gathering,
    in_tree,
    itself,
    local_layouts,
    local_of,
    maker,
    readers,
)
from .options import Request
from .simulator import simulate
from .store import Compared
from .value_checks import located


@attrs.frozen(eq=False, repr=False)
class Compiled:
    """A compiled program. Call the program with arguments of its signature.

    Example:
        >>> import torch, shardfn as sf
        >>> square = sf.grad(lambda x: x**3).compile(sf.ShapeDtype(()))
        >>> square(torch.tensor(2.0))
        tensor(12.)
    """

    request: Request
    placed: Placed
    captured: Captured
    partition: Plan
    programs: dict[tuple[int, ...], LocalProgram]
    backend: str
    runner: Runner | None  # None in simulated and fake worlds, where nothing is compiled
    backward: Backward | None = None  # where autograd follows the call
    # where ranks have programs of their own: the captures of those that run here
    captures: Mapping[tuple[int, ...], Captured] | None = None
    # the programs of all ranks, also of those that run elsewhere
    of_all: Callable[[], Mapping[tuple[int, ...], LocalProgram]] | None = None
    donation: Donation | None = attrs.field(  # donates arguments
        init=False, default=attrs.Factory(donation_of, takes_self=True)
    )
    execute: Callable[[list[Any]], list[Any]] = attrs.field(
        init=False
    )  # all leaves -> local results
    wrap: Callable[..., Any] = attrs.field(
        init=False
    )  # local results, and spare DTensors -> the result tree
    compared: Compared = attrs.field(factory=Compared, init=False)

    @execute.default
    def _execute(self) -> Callable[[list[Any]], list[Any]]:
        program = next(iter(self.programs.values()))
        checked = located(_executor(self), program)
        execute = _compat.without_autocast(checked, self.placed.state)
        if self.backward is None:
            return _compat.without_gradients(execute)
        make = maker(self.placed, self.captured, self.partition)
        return Differentiable(execute, make, self.backward)

    @wrap.default
    def _wrap(self) -> Callable[..., Any]:
        make = maker(self.placed, self.captured, self.partition)
        place = in_tree(self.captured)
        if error := self.captured.no_derivative:
            place = refusing_backward(error, place)
        if make is None or self.backward is not None:
            return place
        return lambda outs, *spares: place(make(outs, *spares))

    @property
    def memory(self) -> Memory:
        """The memory peak of this rank, as in `lowered.memory`."""
        program = self.programs[self.placed.coordinate]
        donated = donated_places(self.placed)
        return memory_as_run(program, self.backend, donated)

    def run(self, leaves: list[Any]) -> Any:
        """Run the program on leaves that were checked before."""
        try:
            if self.donation is None:
                return self.wrap(self.execute(leaves))
            return self.donation.run(leaves, self.execute, self.wrap)
        except Exception as error:
            is_alone = self.placed.mesh is None and self.donation is None
            again = (lambda: inputs_of_ranks(self)(leaves)) if is_alone else None
            name, program = self.request.name, next(iter(self.programs.values()))
            failed = explained(error, name, program, again)
            if failed is error:
                raise
        raise failed

    @filter_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self.request.around
        if around is None:
            return self._called(args, kwargs)
        mesh = self.placed.mesh
        args, kwargs = around.entering(self.request, mesh, args, kwargs)
        return around.leaving(self._called(args, kwargs))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, _, leaves, treedef = taken(self.request, args, kwargs)
        known = self.request.followed
        self.captured.outside.refuse_lost(
            f"compiled {self.request.name}", known.closed_over if known else ()
        )
        _refuse_other_signature(self, leaves, treedef)
        _refuse_transforms(self, leaves)
        _refuse_meta(self, leaves)
        self._compare(leaves)
        tensors = [leaves[i] for i in self.placed.tensors]
        kinds = tuple(isinstance(x, DTensor) for x in tensors)
        pairs = zip(self.placed.avals, tensors, strict=True)
        avals = tuple(attrs.evolve(aval, stride=tuple(x.stride())) for aval, x in pairs)
        if kinds == self.placed.dtensors and avals == self.placed.avals:
            return self.run(leaves)
        # a global tensor and a DTensor of the same placements are the same value, in any memory
        # layout
        placed = attrs.evolve(self.placed, dtensors=kinds, avals=avals)
        backward = self.backward and attrs.evolve(self.backward, placed=placed)
        return attrs.evolve(self, placed=placed, backward=backward).run(leaves)

    def _compare(self, leaves: list[Any]) -> None:
        """Compare the arguments of the first call among the ranks."""
        is_asked = os.environ.get("SHARDFN_CHECK") == "1"
        if self.compared.is_done and not is_asked:
            return
        self.compared.is_done = True
        outside = self.captured.outside
        compare_ranks(self.request, self.placed, leaves, outside.shared, outside.names)

    @property
    def program(self) -> LocalProgram:
        """The program of this rank."""
        return self.programs[self.placed.coordinate]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs of all ranks, with closed-over tensors, to a file for `load_compiled`.

        Args:
            path: the path of the file.

        Raises:
            ArtefactError: the program cannot be saved, or the file cannot be written.
        """
        programs = self.programs if self.of_all is None else self.of_all()
        save_compiled(path, self, programs)

    def __str__(self) -> str:
        return f"compiled with {self.backend}\n{self.program}"

    __repr__ = __str__

    @property
    def code(self) -> str:
        """The Python code that runs, from Inductor or from the graph, or an empty text in simulated
        and fake worlds.
        """
        generated = _compat.generated_code(self.runner)
        return generated or torch.fx.GraphModule(torch.nn.Module(), self.program.graph).code

    def text(self) -> str:
        """The full text of the program."""
        return self.program.show(self.program, full=True)


def _refuse_other_signature(compiled: Compiled, leaves: list[Any], treedef: Any) -> None:
    """Refuse arguments and settings of another signature.

    Raises:
        TreeError: names all that differ.
    """
    placed = compiled.placed
    if treedef != placed.treedef:
        wrong = other_leaves(compiled.request, placed, leaves, treedef)
    else:
        wrong = [*other_tensors(placed, leaves), *other_constants(placed, leaves)]
    wrong += _other_settings(compiled)
    if not wrong:
        return
    fix = (
        "call the transformed function itself, which compiles a program for each signature; "
        "a saved program has only the signature with which it was saved"
    )
    name, source = f"compiled {compiled.request.name}", call_site()
    raise TreeError.of(
        name,
        "the arguments differ from those that the program was compiled for",
        *wrong,
        fix=fix,
        source=source,
    )


def _refuse_meta(compiled: Compiled, leaves: list[Any]) -> None:
    """Refuse arguments and closed-over tensors on the meta device."""
    name = f"compiled {compiled.request.name}"
    outside = compiled.captured.outside
    refuse_without_values(name, leaves, lambda: compiled.placed.paths)
    refuse_without_values(name, outside.tensors, lambda: outside.names)


def _refuse_transforms(compiled: Compiled, leaves: list[Any]) -> None:
    """Refuse a call under autograd or a torch.func transform, which cannot see a compiled
    program.
    """
    name, placed = f"compiled {compiled.request.name}", compiled.placed
    if _compat.inside_transform():
        fix, source = (
            "call the transformed function itself, which the transform can capture",
            call_site(),
        )
        got = "the compiled function is called inside a transform of torch.func"
        raise ShardError.of(name, got, fix=fix, source=source)
    for i in placed.tensors:
        where = f"{name}, argument {placed.paths[i]}"
        if i not in placed.followed:
            refuse_lost_gradient(where, placed.paths[i], leaves[i])
        refuse_lost_tangent(where, leaves[i])


def _other_settings(compiled: Compiled) -> list[str]:
    """Describe the settings and closed-over values that have changed since the capture."""
    now, before = _compat.settings(), compiled.placed.state
    rows = zip(_compat.SETTINGS, now, before, strict=True)
    wrong = [f"{name}: {new}, the program is for {old}" for name, new, old in rows if new != old]
    changed = [] if compiled.captured.reads.same() else compiled.captured.reads.changed()
    for path, old, new in changed:
        where = f"closed-over {name_of(path)}"
        wrong.append(f"{where}: {said(new)}, the program is for {said(old)}")
    return wrong


def _executor(compiled: Compiled) -> Callable[[list[Any]], list[Any]]:
    placed = compiled.placed
    if placed.is_simulated:
        return _simulated(compiled)
    if placed.mesh is not None and placed.world.kind == "fake":
        return _unread(compiled)
    run = compiled.runner
    assert run is not None
    device = placed.mesh.device_type if placed.mesh is not None else None
    coords = [torch.tensor(c, device=device) for c in placed.coordinate]
    rows = readers(compiled.request.name, placed, compiled.captured, [compiled.program])
    reads = {read for _, read in rows}
    straight = len(rows) == placed.treedef.num_leaves
    if straight and not compiled.captured.closed_over:
        if reads == {local_of}:
            return _of_locals(run, coords, _fitting(compiled))
        if reads == {itself}:
            return lambda leaves: run([*coords, *leaves])
    gather = _gathering(compiled, rows)
    if not compiled.captured.closed_over:
        if not coords:
            return lambda leaves: run(gather(leaves))
        return lambda leaves: run([*coords, *gather(leaves)])
    take = state_agreed(compiled.request.name, placed)
    closed_now = closed_over(compiled.captured, [compiled.program], take=take)
    return lambda leaves: run([*coords, *gather(leaves), *closed_now()[0]])


def _of_locals(
    run: Runner,
    coords: list[torch.Tensor],
    fitted: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Callable[[list[Any]], list[Any]]:
    """Build the function from DTensor arguments to local results."""
    locals_of = _compat.calls.locals_of
    return lambda leaves: run([*coords, *fitted(locals_of(leaves))])


def _gathering(
    compiled: Compiled, rows: Sequence[tuple[int, Any]]
) -> Callable[[list[Any]], list[torch.Tensor]]:
    """Build the function from all leaves to the local tensors that the program takes."""
    gather = gathering(rows, compiled.placed.treedef.num_leaves)
    if not any(compiled.placed.dtensors):
        return gather
    fitted = _fitting(compiled)
    return lambda leaves: fitted(gather(leaves))


def _fitting(compiled: Compiled) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Build the function that gives local tensors the memory layouts of the program."""
    placed = compiled.placed
    holders = compiled.program.graph.find_nodes(op="placeholder")
    fakes = [x.meta["val"] for x in holders[len(placed.axes.names) :]]
    layouts = local_layouts(compiled.request.name, placed, fakes)
    assert layouts is not None
    return layouts.fitted


def _simulated(compiled: Compiled) -> Callable[[list[Any]], list[Any]]:
    placed = compiled.placed
    everyone = all_coordinates(placed.axes)
    programs = [compiled.programs[c] for c in everyone]
    inputs_of = inputs_of_ranks(compiled)
    at = shown(placed.mesh, placed.world.rank)
    ranks = ranks_of(placed.mesh)
    digests = extensions.digests()
    watch_of_call = (lambda: None) if digests is None else digests.watch(compiled)

    def execute(leaves: list[Any]) -> list[Any]:
        inputs = inputs_of(leaves)
        known = {_compat.storage_of(x) for row in inputs for x in row}
        with progress(f"simulating {compiled.request.name} on {len(everyone)} ranks"):
            outs_of_ranks = simulate(programs, inputs, everyone, watch_of_call())
        results = [_apart(outs, known) for outs in outs_of_ranks]
        return [SimulatedTensor(shards, at, ranks=ranks) for shards in zip(*results, strict=True)]

    return execute


def inputs_of_ranks(compiled: Compiled) -> Callable[[list[Any]], list[list[torch.Tensor]]]:
    """Build the function from all leaves to the local inputs of each rank of a simulated world; of
    a program without a mesh to those of the one device.
    """
    placed = compiled.placed
    if not placed.is_simulated:
        rows = readers(compiled.request.name, placed, compiled.captured, [compiled.program])
        gather = _gathering(compiled, rows)
        closed = closed_over(compiled.captured, [compiled.program])
        return lambda leaves: [[*gather(leaves), *closed()[0]]]
    everyone = all_coordinates(placed.axes)
    programs = [compiled.programs[c] for c in everyone]
    rows = readers(
        compiled.request.name, placed, compiled.captured, programs, are_alike=not compiled.captures
    )
    if compiled.captures:
        captures = [compiled.captures[c] for c in everyone]
        closed_now = closed_over_of_kinds(captures, programs)
    else:
        closed_now = closed_over(compiled.captured, programs)

    def inputs(leaves: list[Any]) -> list[list[torch.Tensor]]:
        columns = [read(leaves[i]) for i, read in rows]
        closed = closed_now()
        return [[*(column[r] for column in columns), *closed[r]] for r in range(len(everyone))]

    return inputs


def _apart(outs: Sequence[torch.Tensor], known: set[int]) -> list[torch.Tensor]:
    """Copy each result of one rank whose memory is among the known ones, and note its memory
    otherwise.
    """
    own = []
    for x in outs:
        copy = x.clone() if _compat.storage_of(x) in known else x
        known.add(_compat.storage_of(copy))
        own.append(copy)
    return own


def _unread(compiled: Compiled) -> Callable[[list[Any]], list[Any]]:
    """Make the results of a world without values: shapes only, nothing runs."""
    (output,) = compiled.program.graph.find_nodes(op="output")
    values = [n.meta["val"] for n in output.args[0]]
    return lambda leaves: [UnreadTensor(v) for v in values]
