"""shard: the partitioning transform.

Dynamo reads this.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import attrs

from ... import _compat, _tree, argnums, tree_pairs
from ...capture import annotations as sources
from ...capture.shard_map import axis_names
from ...mesh import check_mesh
from ...placement import is_spec
from ...runtime import Request
from .._options import check_function
from .._transformed import (
    Transformed,
    argument_names,
    innermost,
    name_of,
    parameters_of,
    structure_of,
)
from ._auto import checked_memory, is_auto, resolved
from ._constrain import pinned, pinned_leaves


@attrs.define(eq=False, repr=False, slots=False)
class Shard(Transformed):
    """A function under `shard`."""

    verb: ClassVar[str] = "shard"
    may_be_of_ranks: ClassVar[bool] = False
    held: tuple[Callable[..., Any]]
    arguments: dict[str, Any]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """Inside another transform, the placements are constraints, and implicit_comm applies
        to the ops of this call.
        """
        axis_names.name_mesh(f"shard({name_of(self.fn)})", self.arguments["mesh"])
        args, kwargs = self.entering(args, kwargs)
        with self.asking():
            return self.leaving(self.fn(*args, **kwargs))

    def asking(self) -> AbstractContextManager[Any]:
        """A context that annotates the ops captured inside it with `implicit_comm`."""
        setting = self.arguments["implicit_comm"]
        return (
            contextlib.nullcontext()
            if setting == "allow"
            else sources.annotate_implicit_comm(setting)
        )

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments, constrained to `in_placements`."""
        ins = self.arguments["in_placements"]
        if ins is None:
            return args, kwargs
        parameters = parameters_of(self.fn)
        specs, wrong = tree_pairs.by_parameter(ins, parameters, args, kwargs, is_spec)
        names = argument_names(parameters, args, kwargs)
        values = [*args, *kwargs.values()]
        rows = zip(values, names, strict=True)
        paths = [path for x, name in rows for path in _tree.quick_paths(x, name)]
        return pinned_leaves((args, kwargs), paths, specs, wrong, "in_placements")

    def leaving(self, out: Any) -> Any:
        """The result, constrained to `out_placements`."""
        outs = self.arguments["out_placements"]
        return out if outs is None else pinned(out, outs, "out_placements")

    def asked(self) -> Request:
        return Request(
            self.__name__,
            self.fn,
            innermost(self.fn),
            needs_mesh=True,
            structure=functools.partial(structure_of, self.fn),
            **{name: x for name, x in self.arguments.items() if name != "memory"},
        )

    def staged(
        self,
        stage: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unwrap: Callable[[Any], Any],
    ) -> Any:
        """A stage of this function. Placements that it is to choose are chosen first."""
        if self.is_auto:
            placed = resolved(self, args, kwargs)
            return placed.staged(stage, args, kwargs, unwrap)
        return super().staged(stage, args, kwargs, unwrap)

    @functools.cached_property
    def is_auto(self) -> bool:
        """Whether `in_placements` has sf.auto."""
        return is_auto(self.arguments["in_placements"])

    def placed_so(self, in_placements: Any) -> Shard:
        """The same function with other placements of its arguments."""
        known = {"in_placements": in_placements, "memory": None}
        return Shard(self.held, {**self.arguments, **known})

    def options(self) -> Any:
        return self.arguments


def shard(
    fn: Callable[..., Any] | None = None,
    mesh: Any = None,
    in_placements: Any = None,
    out_placements: Any = None,
    *,
    implicit_comm: str = "allow",
    planner: str = "global",
    attention: Mapping[str, str] | None = None,
    memory: int | str | None = None,
    rows: dict[str, int | str] | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    static_argnums: int | tuple[int, ...] = (),
    backend: str = "inductor",
    warmup: str | None = None,
    cuda_graphs: bool = False,
    seed: str = "state",
    dynamic: Any = None,
) -> Any:
    """Compile a function of global tensors into one SPMD program for a device mesh.

    The results equal `fn(*args)` up to the order of floating-point summation.

    Args:
        fn: a pure function of pytrees, written as for one device. Without fn, `shard` returns a
            decorator. Each call of fn reads closed-over tensors by reference, and all other
            closed-over values by value. If a closed-over value changes so that the captured program
            is no longer valid, fn is captured again.
        mesh: a DeviceMesh; by default, the mesh of the innermost `use_mesh`.
        in_placements: the placements of the arguments: a prefix tree over the parameters of fn in
            their order, or a dict by parameter name. Each leaf of `in_placements` is a `P`, one
            Placement (1-D meshes), a list of Placements, or None. With the placement None, a
            DTensor argument keeps its placements, and an ordinary tensor is replicated. With
            `sf.auto`, shardfn chooses the placement with the shortest step time, and
            `lower(...).placements` prints it. With `sf.auto`, an argument that is a DTensor keeps
            its own placement.
        out_placements: the placements of the results: a prefix tree over the result. A result with
            the placement None keeps the placement that sharding propagation chose, except that
            Partial values are reduced. With `Partial()` or `Partial("avg")` in `out_placements`,
            each rank returns its term of the sum or mean.
        implicit_comm: whether to "allow" implicit collectives (collectives that no placement asks
            for), to "warn" of them, or to raise an "error".
        planner: how shardfn chooses the sharding strategies of the ops. With `planner="greedy"`,
            each op takes the strategy that moves the fewest bytes. With `planner="global"`, an
            integer linear program chooses the strategies of all ops together, if the greedy
            strategies would redistribute activations.
        attention: for each mesh axis, the method of sharded attention, such as `dict(cp="ring")`.
            The methods of sharded attention are "ring", "gather" and "ulysses". By default, each
            attention op uses the method that sends the fewest bytes.
        memory: the memory limit of a rank for `sf.auto`, in bytes or as text such as "80GiB".
        rows: for each mesh axis, the number of token rows that a rank can receive for its experts,
            or text such as "1.5x" for 1.5 times the mean number of rows per rank. If the experts
            are sharded over a mesh axis that `rows` names, each token row is sent over this axis to
            the rank that holds its expert. Without `rows`, token rows are sent only if they take
            fewer bytes than an all-gather of the experts. Without `rows`, the buffer of each rank
            has room for all rows that can arrive. If a rank would receive more token rows than
            `rows` allows, every rank raises a CapacityError. If `shard` is called inside another
            transform, `planner`, `attention` and `rows` have no effect.
        donate_argnums: the positions of arguments whose memory may be used for the results. Using a
            donated argument after the call is an error.
        static_argnums: the positions of arguments that are constants of the captured program.
            Arguments that are not tensors are always constants, even if `static_argnums` does not
            list them. A tensor as a static argument raises an error.
        backend: either "inductor", or "aten", which runs the program op by op, without a
            compilation. In a simulated world, `backend` has no effect, because the simulator runs
            op by op.
        warmup: with `warmup="aten"`, the first calls run op by op while Inductor compiles in the
            background, as in `jit`. All ranks switch to compiled code at the same call.
        cuda_graphs: whether the second call records the kernels as a CUDA graph, which later calls
            launch as a whole, as in `jit`.
        seed: whether torch's own random calls draw from `sf.random.state` ("state"), or raise an
            error ("required"), so that every random number comes from a key.
        dynamic: the dims of arguments whose sizes may change between calls. fn is captured once for
            all these sizes. `dynamic` has the same form as in `jit`.

    Returns:
        A function with the same arguments as fn, which returns DTensors and has the methods
        `.trace`, `.lower` and `.compile`.

    Raises:
        PlacementError, TreeError, CaptureError, RuleError: raised when the sharded function is
            called; the message names the function and the argument.

    Source: jax.jit with in_shardings.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     double = sf.shard(lambda x: x * 2, sf.make_mesh((4,), ("dp",)), sf.P("dp"))
        ...     sf.full(double(torch.arange(8)))
        tensor([ 0,  2,  4,  6,  8, 10, 12, 14])
    """
    options = {
        "mesh": mesh,
        "in_placements": in_placements,
        "out_placements": out_placements,
        "implicit_comm": implicit_comm,
        "planner": planner,
        "attention": attention,
        "memory": memory,
        "rows": rows,
        "backend": backend,
        "warmup": warmup,
        "cuda_graphs": cuda_graphs,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "seed": seed,
        "dynamic": dynamic,
    }
    return functools.partial(shard, **options) if fn is None else _sharded(fn, options)


def _sharded(fn: Callable[..., Any], arguments: dict[str, Any]) -> Shard:
    check_function("shard", fn, ", mesh, ...")
    if _compat.is_tracing():
        return Shard((fn,), arguments)
    check_mesh("shard", arguments["mesh"], or_none=True)
    numbers = argnums.of_signature(
        f"shard({name_of(fn)})", fn, arguments["static_argnums"], arguments["donate_argnums"]
    )
    name = f"shard({name_of(fn)})"
    limit = checked_memory(name, arguments["memory"], arguments["in_placements"])
    made = Shard((fn,), {**arguments, **numbers, "memory": limit})
    made.request  # noqa: B018
    return made
