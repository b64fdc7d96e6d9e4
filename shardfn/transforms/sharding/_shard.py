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

    Results equal `fn(*args)` up to the order of floating-point summation.

    Args:
        fn: a pure function of pytrees, written as for one device. Without it, a decorator is
            returned. Each call looks at what fn closes over: tensors by reference, everything
            else by value. A changed value triggers a retrace.
        mesh: a DeviceMesh; the innermost `use_mesh`'s if not given.
        in_placements: a prefix tree over the parameters in their order, or a dict of them
            by name. A leaf is `P`, one Placement (1-D meshes), a list of Placements, or None: the
            argument keeps its placements (a plain tensor is replicated). `sf.auto` is a
            placement that is chosen, so that a step takes the least time:
            `lower(...).placements` prints it. A DTensor keeps its own.
        out_placements: a prefix tree over the result. None keeps the placement that propagation
            chose, with Partial values reduced. `Partial()` and `Partial("avg")` return each
            rank's term of the sum or mean.
        implicit_comm: "allow", "warn" or "error": the reaction to implicit collectives, which
            no placement asks for.
        planner: "global": where activations are sent that no placement asks for, the placements of
            all ops are chosen at once, so that a step takes the least time; "greedy": one op at a
            time, the fewest bytes. Inside another transform it has no effect.
        attention: for mesh axes, how attention is sharded over them: {"cp": "ring"}, "gather" or
            "ulysses". By default each attention takes the way that sends least. Inside another
            transform it has no effect.
        memory: the most that a rank may hold, for `sf.auto`: bytes, or text such as "80GiB".
        rows: by mesh axis, how many rows a rank takes for its experts: a number, or a text such
            as "1.5x", of the mean. Rows of tokens then travel over that axis to the ranks of their
            experts, if the experts are sharded over it; without it they do where that sends fewer
            bytes than to gather the experts, and a rank can take all rows. More rows are a
            CapacityError on every rank. Inside another transform it has no effect.
        donate_argnums: positional arguments whose memory the results may take. Using one
            afterwards is an error.
        static_argnums: positional arguments that are constants of the trace. Arguments other
            than tensors are static without it. A tensor is an error.
        backend: "inductor", or "aten", which runs op by op and starts at once. In a simulated
            world it changes nothing: the simulator runs op by op, and nothing is compiled.
        warmup: "aten": the first calls run op by op, while Inductor compiles in the background.
            All ranks run compiled code from the same call on. Results before and after it differ
            in rounding. A call that autograd follows is compiled at once.
        cuda_graphs: whether a step's kernels are recorded in its second call, as a CUDA graph, and
            then launched together. It needs a function whose work is all on the GPU. Arguments
            whose memory moves from call to call are copied into memory of the graph, and results
            out of it; donated ones that keep their place are not. It changes nothing in worlds
            where nothing is compiled.
        seed: "state": torch's own random calls draw from `sf.random.state`; "required": they are
            an error, and every random number comes from a key.
        dynamic: the dims of arguments whose sizes may change between calls: fn is captured once
            for all of them. A prefix tree over the positional arguments, as `in_axes` of vmap, or
            a dict of arguments by name. A leaf is a dim, a set of dims, True for all dims, or
            a dict with hints, `{0: torch.export.Dim.DYNAMIC}`. See `mark_dynamic`.

    Returns:
        A function of the same arguments whose results are DTensors, with `.trace`, `.lower` and
        `.compile`.

    Raises:
        PlacementError, TreeError, CaptureError, RuleError: when called, naming the function and
            the argument.

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
