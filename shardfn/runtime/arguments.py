"""Values at the door: how each argument is placed, and which tensors stand behind it on each
rank.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat, _tree, argnums
from ..capture import constant_key
from ..capture.closure.closed_over import lost_tangent
from ..capture.refusals.leaks import LeakedTensor, leaked
from ..capture.rewrites.strides import refuse_unstrided
from ..errors import PlacementError, ShardError, TreeError, call_site, problem
from ..mesh import all_coordinates, axes_of, current_mesh, refuse_ended
from ..partition import layout
from ..placements import (
    check_pending,
    check_whole,
    describe,
    is_spec,
    marks_of,
    torch_placements,
)
from ..types import CONSTANTS, MEAN, Aval, Marks, MeshAxes, ShapeDtype
from ..world import World, current_world
from .options import Request
from .simulated_tensor import (
    DonatedTensor,
    SimulatedTensor,
    UnreadTensor,
    used_after_donation,
)


@attrs.frozen(eq=False, repr=False)
class Placed:
    """The arguments of one call, looked at once: what is static, and the marks of each tensor."""

    world: World
    mesh: Any
    axes: MeshAxes
    treedef: Any
    paths: tuple[str, ...]  # of all leaves
    tensors: tuple[int, ...]  # which leaves are tensors
    dtensors: tuple[bool, ...]  # of the tensors
    avals: tuple[Aval, ...]  # of the tensors
    marks: tuple[Marks, ...]  # of the tensors
    unreduced: tuple[
        int, ...
    ]  # which of the tensors are gradients that nobody has reduced yet
    donated: tuple[int, ...]  # which leaves are tensors of donated arguments
    static: frozenset[int]  # which leaves are of static arguments
    constants: tuple[
        tuple[int, Any, Any], ...
    ]  # of the other leaves: which, its key, itself
    state: tuple[Any, ...]  # torch's settings at the call

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's place in the mesh."""
        return tuple(self.mesh.get_coordinate()) if self.mesh is not None else ()


def look(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placed:
    """Check the arguments of a call and settle how each is placed.

    Raises:
        TreeError: `in_placements` is no prefix of the arguments, or an argument is neither a
            tensor nor a constant.
        PlacementError: a placement that does not fit; all of them at once.
    """
    _check_module(request)
    static, donated = _check_call(request, args, kwargs)
    leaves, treedef = _tree.flatten((args, kwargs))
    paths = _tree.argument_paths(request.signature_of, args, kwargs)
    refuse_unstrided(request.name, leaves, paths)
    world, mesh = current_world(), _mesh(request, leaves)
    _refuse_classes(request, args, kwargs, static)
    _check_leaves(request, leaves, paths, _leaves_of(static, treedef))
    axes = axes_of(mesh)
    specs = _specs(request, args, kwargs, leaves)
    tensors = [
        i for i, x in enumerate(leaves) if isinstance(x, (torch.Tensor, ShapeDtype))
    ]
    marks, wrong = [], []
    for i in tensors:
        try:
            marks.append(_marks(leaves[i], specs[i], mesh, axes))
        except ValueError as error:
            wrong.append((paths[i], str(error)))
    if wrong:
        where = (
            f"{request.name}, argument {wrong[0][0]}"
            if len(wrong) == 1
            else f"{request.name}, {len(wrong)} arguments"
        )
        lines = (
            [wrong[0][1]]
            if len(wrong) == 1
            else ["placements that do not fit", *(f"{p}: {e}" for p, e in wrong)]
        )
        fix = (
            "placements that fit each tensor and the mesh, such as P('axis') or None for the "
            "argument's own"
        )
        source = call_site()
        fields = {
            "arg_path": wrong[0][0],
            "mesh": mesh,
            "placements": request.in_placements,
        }
        raise PlacementError(
            problem(where, *lines, fix=fix, source=source),
            **fields,
            source=source,
            fix=fix,
        )
    found = [leaves[i] for i in tensors]
    return Placed(
        world=world,
        mesh=mesh,
        axes=axes,
        treedef=treedef,
        paths=tuple(paths),
        tensors=tuple(tensors),
        dtensors=tuple(isinstance(x, DTensor) for x in found),
        avals=tuple(aval_of(x, mesh) for x in found),
        marks=tuple(marks),
        unreduced=tuple(
            i
            for i, x in enumerate(found)
            if isinstance(x, DTensor) and _compat.is_unreduced(x._spec)
        ),
        static=frozenset(_leaves_of(static, treedef)),
        donated=tuple(sorted(_leaves_of(donated, treedef) & {*tensors})),
        constants=_constants(leaves, set(tensors)),
        state=_compat.settings(),
    )


def _constants(
    leaves: list[Any], tensors: set[int]
) -> tuple[tuple[int, Any, Any], ...]:
    return tuple(
        (i, constant_key(x), x) for i, x in enumerate(leaves) if i not in tensors
    )


def aval_of(x: Any, mesh: Any) -> Aval:
    """What capture needs to know of a tensor."""
    shape = tuple(x.shape)
    if isinstance(x, ShapeDtype):
        return Aval(
            shape,
            layout.dense_strides(shape, range(len(shape))),
            x.dtype,
            mesh.device_type if mesh is not None else "cpu",
        )
    return Aval(shape, x.stride(), x.dtype, str(x.device))


def _check_call(
    request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Missing, unknown or too many arguments, as Python would say it; which arguments are
    static, and which donated.
    """
    signature = argnums.signature_of(request.signature_of)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        source, fix = call_site(), f"the arguments of {signature}"
        raise TreeError(
            problem(request.name, str(error), fix=fix, source=source),
            source=source,
            fix=fix,
        ) from None
    static = argnums.of_call(
        request.name,
        "static_argnums",
        request.static_argnums,
        args,
        kwargs,
        signature,
    )
    donated = argnums.of_call(
        request.name,
        "donate_argnums",
        request.donate_argnums,
        args,
        kwargs,
        signature,
    )
    argnums.refuse_static(request.name, static, donated, args)
    return static, donated


def _check_module(request: Request) -> None:
    """Refuse a module with parameters to train: functionalize makes them inputs of the program."""
    fn, method = request.signature_of, ""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn, method = fn.__self__, f".{fn.__name__}"
    if not isinstance(fn, torch.nn.Module):
        return
    held = [name for name, x in fn.named_parameters() if x.requires_grad]
    if held:
        kind, more = type(fn).__name__, ", ..." if len(held) > 3 else ""
        got = f"the module {kind}{method} holds parameters: {', '.join(held[:3])}{more}"
        needed = (
            "parameters as arguments; held by a module they get no gradient, and every rank "
            "holds them whole"
        )
        fix = "fn, params, buffers = sf.functionalize(module), and the transform of fn"
        source = call_site()
        text = problem(request.name, got, needed=needed, fix=fix, source=source)
        raise TreeError(text, source=source, fix=fix)


def _mesh(request: Request, leaves: list[Any]) -> Any:
    mesh = (
        request.mesh
        or current_mesh()
        or next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
    )
    if mesh is None and request.needs_mesh:
        fix = "shard(fn, mesh=...) or call it inside `with use_mesh(mesh)`"
        source = call_site()
        raise PlacementError(
            problem(request.name, "there is no mesh", fix=fix, source=source),
            source=source,
            fix=fix,
        )
    if mesh is not None:
        refuse_ended(request.name, mesh)
    return mesh


def _leaves_of(numbers: Sequence[int], treedef: Any) -> set[int]:
    """The leaves of some positional arguments."""
    counts = [child.num_leaves for child in treedef.children()[0].children()]
    return {
        i for n in numbers for i in range(sum(counts[:n]), sum(counts[: n + 1]))
    }


def _refuse_classes(
    request: Request,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: Sequence[int],
) -> None:
    """Containers of the user's own: registered for trees, and unknown to who reads the function.

    Raises:
        TreeError: naming each.
    """
    roots = _tree.argument_paths(
        request.signature_of, (0,) * len(args), dict.fromkeys(kwargs, 0)
    )
    rows = enumerate(zip(roots, (*args, *kwargs.values()), strict=True))
    given = [(root, x) for i, (root, x) in rows if i not in static]
    wrong = [
        (path, kind) for root, x in given for path, kind in _tree.classes(x, root)
    ]
    if wrong:
        source, fix = (
            call_site(),
            "a dict, list, tuple or NamedTuple of its tensors",
        )
        lines = [f"{path} is a {kind}" for path, kind in wrong]
        needed = "dict, OrderedDict, defaultdict, list, tuple, NamedTuple or deque"
        text = problem(request.name, *lines, needed=needed, fix=fix, source=source)
        raise TreeError(text, arg_path=wrong[0][0], source=source, fix=fix)


def _check_leaves(
    request: Request, leaves: list[Any], paths: list[str], static: set[int]
) -> None:
    for i, (x, path) in enumerate(zip(leaves, paths, strict=True)):
        where = f"{request.name}, argument {path}"
        if isinstance(x, DonatedTensor) or (
            isinstance(x, DTensor) and isinstance(x._local_tensor, DonatedTensor)
        ):
            raise used_after_donation(
                getattr(x, "call", None) or x._local_tensor.call
            )
        if isinstance(x, torch.Tensor):
            if isinstance(x, LeakedTensor) or _compat.is_fake(x):
                raise leaked(where)
            _refuse_foreign(where, path, x)
            refuse_lost_gradient(where, path, x)
        elif (
            not isinstance(x, (*CONSTANTS, ShapeDtype))
            and not _is_function(x)
            and i not in static
        ) or _is_numpys(x):
            fix, source = _instead(x, path), call_site()
            module = "numpy." if type(x).__module__ == "numpy" else ""
            got, needed = f"a {module}{type(x).__name__}", "a tensor or a constant"
            text = problem(where, got, needed=needed, fix=fix, source=source)
            raise TreeError(text, arg_path=path, source=source, fix=fix)


def refuse_lost_gradient(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse an argument whose gradient or tangent the call would lose.

    Raises:
        ShardError: saying how to differentiate.
    """
    if x.requires_grad and torch.is_grad_enabled():
        fix = (
            "differentiate inside with shardfn's grad, and pass x.detach(), or call it under "
            "torch.no_grad()"
        )
        got, source = (
            "it requires grad, and autograd would not see through the call",
            call_site(),
        )
        raise ShardError(
            problem(where, got, fix=fix, source=source),
            arg_path=path,
            source=source,
            fix=fix,
        )
    if _compat.in_dual_level() and _compat.has_tangent(x):
        raise lost_tangent(where)


def _is_numpys(x: Any) -> bool:
    """Whether x is a text or bytes of numpy's, which whoever reads the function takes for
    arrays.
    """
    return isinstance(x, (str, bytes)) and type(x).__module__ == "numpy"


def _refuse_foreign(where: str, path: str, x: torch.Tensor) -> None:
    """Refuse a tensor of a class of its own, which would come out as a plain one."""
    if (
        not _compat.is_foreign(x)
        or isinstance(x, DTensor)
        or _compat.is_arriving(x)
    ):
        return
    held = "the plain tensors that it holds, in a dict or a NamedTuple"
    fix = held if _compat.holds_tensors(x) else f"{path}.as_subclass(torch.Tensor)"
    source = call_site()
    got = f"a {type(x).__name__}, a subclass of torch.Tensor"
    text = problem(
        where, got, needed="a plain tensor or a DTensor", fix=fix, source=source
    )
    raise TreeError(text, arg_path=path, source=source, fix=fix)


def _is_function(x: Any) -> bool:
    """Whether x is code, and no object of a class with `__call__`, which may change between
    calls.
    """
    known = isinstance(
        x,
        (
            types.FunctionType,
            types.BuiltinFunctionType,
            types.MethodType,
            functools.partial,
            type,
        ),
    )
    return known or (
        callable(x)
        and (
            hasattr(x, "__wrapped__")
            or (type(x).__module__ or "").startswith("torch._ops")
        )
    )


def _instead(x: Any, path: str) -> str:
    """What to pass instead of an object."""
    kind = type(x).__name__
    if isinstance(x, torch.nn.Module):
        return (
            "fn, params, buffers = sf.functionalize(module), and its params and buffers as "
            "arguments"
        )
    if path == "self":
        bound = (
            "the transform of the bound method, which is read when it is captured"
        )
        return f"{bound}; static_argnums=0 of jit or shard; or {kind} a NamedTuple"
    if isinstance(x, (slice, range, set, frozenset, type(...))):
        return f"static_argnums of jit or shard; or close over the {kind}"
    if type(x).__module__ == "numpy":
        return "torch.as_tensor(x); or x.item() for a constant"
    return (
        "torch.as_tensor(x) for arrays; a dict, list, tuple or NamedTuple for a class that "
        "holds tensors"
    )


def _specs(
    request: Request,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
) -> list[Any]:
    """One placement leaf for each argument leaf; keyword arguments keep their own placement."""
    prefix = request.in_placements
    if prefix is None:
        return [None] * len(leaves)
    if isinstance(prefix, list) and not is_spec(prefix):
        prefix = tuple(prefix)
    try:
        specs = _tree.broadcast_prefix(prefix, args, is_spec)
    except ValueError as error:
        lines = [
            "in_placements is no prefix of the arguments",
            *_named(request, args, error.args),
        ]
        fix = "a tree of placements that ends early is a prefix: one P for a whole subtree"
        source = call_site()
        raise TreeError(
            problem(request.name, *lines, fix=fix, source=source),
            placements=prefix,
            source=source,
            fix=fix,
        ) from None
    return specs + [None] * (len(leaves) - len(specs))


def _named(
    request: Request, args: tuple[Any, ...], lines: Sequence[str]
) -> list[str]:
    """The mismatches with parameter names in place of `[0]`."""
    names = [
        p
        for i, a in enumerate(args)
        for p in _tree.argument_paths(request.signature_of, args, {})[i : i + 1]
    ]
    roots = (
        _tree.argument_paths(request.signature_of, tuple(0 for _ in args), {})
        if args
        else names
    )
    out = []
    for line in lines:
        for i, root in enumerate(roots):
            line = (
                root + line[len(f"[{i}]") :] if line.startswith(f"[{i}]") else line
            )
        out.append(line)
    return out


def _marks(x: Any, spec: Any, mesh: Any, axes: MeshAxes) -> Marks:
    """The marks of one argument; ValueError says what does not fit."""
    if (
        isinstance(x, torch.Tensor)
        and mesh is not None
        and x.device.type != mesh.device_type
    ):
        raise ValueError(
            f"it lives on {x.device}, and the mesh is over {mesh.device_type} devices; "
            "move it with x.to(...)"
        )
    declared = None if spec is None else marks_of(spec, x.shape, axes)
    if not isinstance(x, DTensor):
        check_whole(spec, declared or ())
        return declared or ("R",) * len(axes.names)
    if x.device_mesh != mesh:
        raise ValueError(
            f"it lives on another mesh, {axes_of(x.device_mesh)}, and the function's is {axes}"
        )
    own = marks_of(list(x.placements), x.shape, axes)
    check_pending(own, x.dtype)
    if declared is not None and own != declared:
        raise ValueError(
            f"it is placed {describe(own, axes)}, in_placements says "
            f"{describe(declared, axes)}; reshard it outside"
        )
    return own


def reader(is_dtensor: bool, marks: Marks, placed: Placed) -> Callable[[Any], Any]:
    """How to get an argument's local tensor: of this rank, or a list of all ranks' in a
    simulated world.
    """
    simulated = placed.world.kind == "simulated" and placed.mesh is not None
    if is_dtensor:
        return (
            _all_shards(len(all_coordinates(placed.axes)))
            if simulated
            else local_of
        )
    if simulated:
        everyone = all_coordinates(placed.axes)
        if all(m == "R" for m in marks):
            return lambda x: [x] * len(everyone)
        return lambda x: [cut(x, marks, placed.axes, c) for c in everyone]
    if all(m == "R" for m in marks):
        return _itself
    coordinate = placed.coordinate
    return lambda x: cut(x, marks, placed.axes, coordinate)


def local_of(x: Any) -> torch.Tensor:
    """The local tensor of a DTensor."""
    return x._local_tensor


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _all_shards(n: int) -> Callable[[Any], list[torch.Tensor]]:
    def read(x: Any) -> list[torch.Tensor]:
        local = x._local_tensor
        return local.shards if isinstance(local, SimulatedTensor) else [local] * n

    return read


def cut(
    x: torch.Tensor, marks: Marks, axes: MeshAxes, coordinate: Sequence[int]
) -> torch.Tensor:
    """One rank's piece of a whole tensor, in memory of its own, in the whole's order of dims."""
    out = x
    for mark, n, c in zip(marks, axes.sizes, coordinate, strict=True):
        found = layout.split(mark)
        if found and n > 1:
            start, size = layout.chunk(out.shape[found[0]], found[1], n, c)
            out = out.narrow(found[0], start, size)
    if out is x:
        return x
    order = layout.stride_order(x.shape, x.stride())
    fresh = torch.empty_strided(
        out.shape,
        layout.dense_strides(out.shape, order),
        dtype=x.dtype,
        device=x.device,
    )
    return fresh.copy_(out)


def join(
    shards: Sequence[torch.Tensor],
    shape: Sequence[int],
    marks: Marks,
    axes: MeshAxes,
) -> torch.Tensor:
    """The whole tensor from all ranks' pieces."""
    values = dict(zip(all_coordinates(axes), shards, strict=True))
    for k in reversed(range(len(marks))):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for c, value in sorted(values.items()):
            groups.setdefault(c[:k], []).append(value)
        values = {c: _joined(group, marks[k]) for c, group in groups.items()}
    (whole,) = values.values()
    return whole


def _joined(group: list[torch.Tensor], mark: Any) -> torch.Tensor:
    found = layout.split(mark)
    if found:
        return torch.cat(group, found[0])
    if mark == "R":
        return group[0]
    reduce = {
        "sum": torch.sum,
        MEAN: torch.mean,
        "max": torch.amax,
        "min": torch.amin,
    }[mark]
    return reduce(torch.stack(group), 0).to(
        group[0].dtype
    )  # a sum of integers is one of 64 bits


def spec_of(mesh: Any, marks: Marks, value: torch.Tensor) -> Any:
    """The DTensor spec of a result."""
    stride = value.stride()
    if not layout.is_dense(value.shape, stride):
        stride = layout.dense_strides(value.shape, range(value.dim()))
    return _compat.dtensor_spec(
        mesh, torch_placements(marks), value.shape, stride, value.dtype
    )


__all__ = [
    "Placed",
    "SimulatedTensor",
    "UnreadTensor",
    "cut",
    "join",
    "look",
    "reader",
    "spec_of",
]
