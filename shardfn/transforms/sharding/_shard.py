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
        fn: a pure function of pytrees, written as for one device. Without fn, a decorator is
            returned. Each call reads the values that fn closes over: tensors by reference, all
            other values by value. If a closed-over value no longer fits the captured program, fn is
            captured again.
        mesh: a DeviceMesh. The default is the mesh of the innermost `use_mesh`.
        in_placements: the placements of the arguments: a prefix tree over the parameters of fn in
            their order, or a dict by parameter name. A leaf is a `P`, one Placement (1-D meshes), a
            list of Placements, or None. With None, a DTensor keeps its placements, and an ordinary
            tensor is replicated. With `sf.auto`, shardfn chooses the placement with the shortest
            step time, and `lower(...).placements` prints it. With `sf.auto`, an argument that is a
            DTensor keeps its own placement.
        out_placements: the placements of the results: a prefix tree over the result. None keeps the
            placement that sharding propagation chose, but reduces Partial values. With `Partial()`
            or `Partial("avg")`, each rank returns its term of the sum or mean.
        implicit_comm: what happens if the program needs implicit collectives, which no placement
            asks for: "allow", "warn" or "error".
        planner: with "global", if the program would send activations that no placement asks for, an
            integer program chooses the strategies of all ops at once. With "greedy", each op takes
            the strategy that moves the fewest bytes. Inside another transform, `planner` has no
            effect.
        attention: for each mesh axis, the method of sharded attention: {"cp": "ring"}, "gather" or
            "ulysses". By default, each attention op uses the method that sends the fewest bytes.
            Inside another transform, `attention` has no effect.
        memory: the memory limit of a rank for `sf.auto`, in bytes or as text such as "80GiB".
        rows: for each mesh axis, the number of token rows that a rank can receive for its experts,
            or text such as "1.5x" for a multiple of the mean number. If the experts are sharded
            over that axis, token rows are sent over the axis to the ranks that hold their experts.
            Without `rows`, token rows are sent only if this takes fewer bytes than gathering the
            experts, and if a rank has room for all rows. If more token rows would arrive at a rank,
            every rank raises a CapacityError. Inside another transform, `rows` has no effect.
        donate_argnums: the positions of arguments whose memory may be used for the results. Using a
            donated argument after the call is an error.
        static_argnums: the positions of arguments that are constants of the captured program.
            Arguments that are not tensors are constants even without this option. A tensor as a
            static argument raises an error.
        backend: "inductor", or "aten", which runs the program op by op, without a compilation. In a
            simulated world, `backend` has no effect, because the simulator runs op by op.
        warmup: with "aten", the first calls run op by op, while Inductor compiles in the
            background. All ranks switch to compiled code at the same call. Results before and after
            the switch may differ in rounding. If torch's autograd records a call, the call is
            compiled at once.
        cuda_graphs: whether the second call records the kernels as a CUDA graph, which later calls
            launch as a whole. All ops of the function must be on the GPU. Arguments whose address
            changes from call to call are copied into the graph's memory, and results are copied out
            of it. Donated arguments with a fixed address are not copied. In a simulated world,
            `cuda_graphs` has no effect.
        seed: with "state", torch's own random calls draw from `sf.random.state`. With "required",
            torch's own random calls raise an error, so every random number comes from a key.
        dynamic: the dims of arguments whose sizes may change between calls. fn is captured once for
            all these sizes. The value is a prefix tree over the positional arguments, like
            `in_axes` of vmap, or a dict by argument name. A leaf is a dim, a set of dims, True for
            all dims, or a dict with hints, `{0: torch.export.Dim.DYNAMIC}`. See `mark_dynamic`.

    Returns:
        A function with the same arguments as fn, which returns DTensors and has the methods
        `.trace`, `.lower` and `.compile`.

    Raises:
        PlacementError, TreeError, CaptureError, RuleError: raised by the call, with the name of the
            function and of the argument.

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
