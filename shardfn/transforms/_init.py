"""`init`: the initial parameters and buffers of a module, created as shards on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import _compat
from ..capture.modules.module_construction import Building
from ..errors import CaptureError, TreeError
from ..patterns import compiled
from ..placement import P
from ..random.checks import check_key
from ..tracebacks import filter_errors
from ._functionalize import Functional, functionalize
from ._jit import jit
from .sharding._shard import shard

Values = dict[str, torch.Tensor]


@filter_errors
def init(
    module_fn: Callable[[], torch.nn.Module],
    mesh: Any = None,
    placements: Any = None,
    key: Any = None,
    *,
    backend: str = "inductor",
) -> tuple[Functional, Values, Values]:
    """Build a module whose parameters and buffers are created as shards: `fn, params, buffers =
    init(module_fn, mesh, placements, key)`.

    Each rank creates only the shards that it holds, with the values that a single device would draw
    for the same key. For the key `sf.random.key(seed)`, `init` returns the parameter values of
    `module_fn()` under `sf.random.plain()` after `sf.random.state.seed(seed)`. The full module is
    never in the memory of one rank.

    Args:
        module_fn: a function that builds and returns an nn.Module, with torch's default
            initialisation, `torch.nn.init` or its own initialisation. `init` calls module_fn
            several times. The tensors that module_fn creates are fake tensors, which have no
            values.
        mesh: a DeviceMesh, or None for a single device.
        placements: one `P` for all parameters, or a dict that maps names or patterns of parameters
            and buffers to `P`s, with the patterns of `sf.placements`, such as "**.weight". The
            first pattern that matches a name applies. Parameters that no pattern matches are
            replicated. Pass the dict that `sf.placements` or `sf.fsdp` returns as `placements`.
        key: a random key, int64 (2,), with the same value on all ranks.
        backend: the backend that compiles the initialisation, "inductor" or "aten", as in `jit`.

    Returns:
        A tuple (fn, params, buffers), like that of `functionalize`. With a mesh, the parameters and
        buffers are DTensors.

    Raises:
        ShardError: key is not a random key.
        TreeError: module_fn returns no module, a pattern matches no name, or placements are given
            without a mesh.
        PlacementError: a placement does not fit its tensor.
        CaptureError: the constructor of the module reads tensor values, or `init` is called inside
            a captured function.

    Source: torch.nn.utils.skip_init and FSDP's meta-device initialisation; flax.nnx.jit of a
        constructor with sharding constraints.

    Example:
        >>> import torch, shardfn as sf
        >>> fn, params, _ = sf.init(
        ...     lambda: torch.nn.Linear(3, 4), key=sf.random.key(0), backend="aten"
        ... )
        >>> params["weight"].shape
        torch.Size([4, 3])
    """
    if _compat.is_tracing():
        refuse_inside()
    check_key("init", key)
    device = "cpu" if mesh is None else mesh.device_type
    name = f"init({getattr(module_fn, '__name__', type(module_fn).__name__)})"
    building = Building(name, module_fn, device)
    fn, params, buffers = functionalize(building.empty())
    names = tuple(params), tuple(buffers)

    @_compat.read_by_dynamo
    def values(key: torch.Tensor) -> tuple[Values, Values]:
        made = building.values(key)
        count = len(names[0])
        return (
            dict(zip(names[0], made[:count], strict=True)),
            dict(zip(names[1], made[count:], strict=True)),
        )

    values.__name__ = values.__qualname__ = name
    chosen = _placements(name, names, placements, mesh)
    if mesh is None:
        return fn, *jit(values, backend=backend)(key)
    make = shard(values, mesh, (P(),), chosen, backend=backend)
    return fn, *make(key)


@_compat.constant_in_graph
def refuse_inside() -> None:
    """Refuse a call inside a captured function.

    Raises:
        CaptureError: always.
    """
    raise CaptureError.of(
        "init",
        "the call is inside a captured function, which cannot make modules",
        fix="call sf.init outside of the function, and pass the parameters as an argument",
    )


def _placements(
    name: str, names: tuple[tuple[str, ...], tuple[str, ...]], given: Any, mesh: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Match the names of parameters and buffers to placements by pattern."""
    if given is not None and mesh is None:
        raise TreeError.of(
            name,
            "placements are given, but no mesh",
            fix="init(module_fn, mesh, placements, key)",
            arg_path="placements",
        )
    if not isinstance(given, Mapping):
        replicated = dict.fromkeys(names[1], P())
        return dict.fromkeys(names[0], P() if given is None else given), replicated
    every = [*names[0], *names[1]]
    for pattern in given:
        if not any(map(compiled(pattern).fullmatch, every)):
            raise TreeError.of(
                name,
                f"{pattern!r} matches no parameter and no buffer",
                needed=f"names such as {', '.join(every[:4])}",
                fix="use a pattern such as '**.weight'",
                arg_path=f"placements[{pattern!r}]",
            )
    found = {path: _first(path, given) for path in every}
    params, buffers = ({path: found[path] for path in part} for part in names)
    return params, buffers


def _first(path: str, given: Mapping[str, Any]) -> Any:
    """Return the placement of the first pattern that matches a name."""
    rows = given.items()
    fitting = (p for pattern, p in rows if compiled(pattern).fullmatch(path))
    return next(fitting, P())
