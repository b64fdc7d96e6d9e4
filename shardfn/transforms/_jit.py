"""jit: compile a function into one program, without placements of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs

from .. import _compat, argnums
from ..runtime import Request
from ._options import check_function
from ._transformed import innermost, name_of, structure_of
from .derivatives._vjp_jvp import Evaluated


@attrs.define(eq=False, repr=False, slots=False)
class Jitted(Evaluated):
    """A function under `jit`."""

    verb: ClassVar[str] = "jit"
    held: tuple[Callable[..., Any]]
    arguments: dict[str, Any]

    def asked(self) -> Request:
        return Request(
            self.__name__,
            self.fn,
            innermost(self.fn),
            structure=functools.partial(structure_of, self.fn),
            **self.arguments,
        )

    def options(self) -> Any:
        return self.arguments


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    attention: Mapping[str, str] | None = None,
    backend: str = "inductor",
    warmup: str | None = None,
    cuda_graphs: bool = False,
    static_argnums: int | tuple[int, ...] = (),
    donate_argnums: int | tuple[int, ...] = (),
    seed: str = "state",
    dynamic: Any = None,
    rows: dict[str, int | str] | None = None,
) -> Any:
    """Compile a function of tensors into one program, for one device.

    If arguments are DTensors, the program is partitioned over their mesh, with their
    placements, and results are DTensors with the placements that propagation chose. Inside
    another transform, `jit(fn)` is `fn`.

    A function that calls DTensor or collectives of torch.distributed is the code of one rank: its
    plain tensors are each rank's own, and DTensors are global. It is run on all ranks of their
    mesh, as docs/dtensor.md says.

    Args:
        fn: a pure function of pytrees. Without it, a decorator is returned. Each call looks at
            what fn closes over: tensors by reference, everything else by value. A changed value
            triggers a retrace.
        attention: as in `shard`, for functions of DTensors.
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
        static_argnums: positional arguments that are constants of the trace: any hashable
            object. An argument that is unequal to all earlier ones, or whose attributes have
            changed, triggers a retrace. A tensor is an error.
        donate_argnums: positional arguments whose memory the results may take. Using one
            afterwards is an error.
        seed: "state": torch's own random calls draw from `sf.random.state`; "required": they are
            an error, and every random number comes from a key.
        dynamic: the dims of arguments whose sizes may change between calls: fn is captured once
            for all of them. A prefix tree over the positional arguments, as `in_axes` of vmap, or
            a dict of arguments by name. A leaf is a dim, a set of dims, True for all dims, or
            a dict with hints, `{0: torch.export.Dim.DYNAMIC}`. See `mark_dynamic`.
        rows: by mesh axis, how many rows a rank takes for its experts, as of `shard`.

    Returns:
        A function of the same arguments, with `.trace`, `.lower` and `.compile`.

    Raises:
        PlacementError, TreeError, CaptureError, RuleError: when called, naming the function and
            the argument.
        ShardError: an unknown backend or warmup; CUDA graphs of a program that they cannot hold.

    Source: jax.jit; torch.compile(fullgraph=True).

    Example:
        >>> import torch, shardfn as sf
        >>> double = sf.jit(lambda x: x * 2, backend="aten")
        >>> double(torch.ones(2)), double
        (tensor([2., 2.]), jit(<lambda>))
    """
    options = {
        "attention": attention,
        "backend": backend,
        "warmup": warmup,
        "cuda_graphs": cuda_graphs,
        "static_argnums": static_argnums,
        "donate_argnums": donate_argnums,
        "seed": seed,
        "dynamic": dynamic,
        "rows": rows,
    }
    if fn is None:
        return functools.partial(jit, **options)
    check_function("jit", fn)
    if _compat.is_tracing():  # inside another transform it is the function itself
        return Jitted((fn,), options)
    made = Jitted(
        (fn,),
        {
            **options,
            **argnums.of_signature(f"jit({name_of(fn)})", fn, static_argnums, donate_argnums),
        },
    )
    made.request  # noqa: B018
    return made
