"""`jit`: compile a function into one program, for one device or for the placements of its
arguments.
"""

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

    If arguments are DTensors, the program is partitioned over the mesh of these DTensors, with the
    placements of the arguments. If arguments are DTensors, results are DTensors with the placements
    that sharding propagation chose. Inside another transform, `jit(fn)` is the same as `fn`.

    A function that uses the DTensor API, or collectives of torch.distributed, is per-rank code: its
    ordinary tensors may differ between ranks, and its DTensors are global. Per-rank code runs on
    all ranks of the mesh, as docs/dtensor.md describes.

    Args:
        fn: a pure function of pytrees. Without fn, `jit` returns a decorator. Each call of fn reads
            closed-over tensors by reference, and all other closed-over values by value. If a
            closed-over value changes so that the captured program is no longer valid, fn is
            captured again.
        attention: the method of sharded attention, as in `shard`, for functions of DTensors.
        backend: either "inductor", or "aten", which runs the program op by op, without a
            compilation. In a simulated world, `backend` has no effect, because the simulator runs
            op by op.
        warmup: with `warmup="aten"`, the first calls run op by op, while Inductor compiles in the
            background. All ranks switch to compiled code at the same call, and results may then
            differ in rounding. A call that torch's autograd records is compiled at once, without
            `warmup`.
        cuda_graphs: whether the second call records the kernels as a CUDA graph, which later calls
            launch as a whole. With `cuda_graphs`, all ops of the function must be on the GPU.
            Arguments whose address changes from call to call are copied into the memory of the CUDA
            graph, and results are copied out of the graph. Donated arguments with a fixed address
            are not copied into the CUDA graph. In a simulated world, `cuda_graphs` has no effect.
        static_argnums: the positions of arguments that are constants of the captured program. A
            static argument may be any hashable object. If a static argument has a new value, or its
            attributes have changed, the function is captured again. A tensor as a static argument
            raises an error.
        donate_argnums: the positions of arguments whose memory may be used for the results. Using a
            donated argument after the call is an error.
        seed: whether torch's own random calls draw from `sf.random.state` ("state"), or raise an
            error ("required"), so that every random number comes from a key.
        dynamic: the dims of arguments whose sizes may change between calls. fn is captured once for
            all these sizes. `dynamic` is a prefix tree over the positional arguments, like
            `in_axes` of vmap, or a dict by argument name. Each leaf of `dynamic` is a dim, a set of
            dims, True for all dims, or a dict from dims to hints, such as `{0:
            torch.export.Dim.DYNAMIC}`. See `mark_dynamic`.
        rows: for each mesh axis, the number of token rows that a rank can receive for its experts,
            as in `shard`.

    Returns:
        A function with the same arguments as fn, and with the methods `.trace`, `.lower` and
        `.compile`.

    Raises:
        PlacementError, TreeError, CaptureError, RuleError: raised when the compiled function is
            called; the message names the function and the argument.
        ShardError: backend or warmup is unknown, or the program cannot be recorded as a CUDA graph.

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
