"""Checks of an optimizer, and of the arguments of `update`."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat
from ...errors import CaptureError, PlacementError, ShardError, TreeError, call_site
from ...mesh import axes_of
from .recipe import Recipe

# A class of torch whose step is not a function of gradients: why, and another way.
REFUSED = {
    torch.optim.LBFGS: (
        "the optimizer evaluates the loss again in its line search",
        "use sf.value_and_grad in your own loop; or torch.optim.LBFGS outside of captured code",
    ),
    torch.optim.SparseAdam: (
        "the optimizer takes sparse gradients, whose sizes depend on values",
        "use torch.optim.Adam with dense gradients",
    ),
}


@_compat.constant_in_graph
def refuse_inside() -> None:
    """Refuse an optimizer that is made inside a captured function.

    Raises:
        CaptureError: always.
    """
    raise CaptureError.of(
        "optim",
        "the call is inside a captured function",
        fix="make the optimizer outside of the function, and close over it",
    )


def check_class(cls: Any) -> None:
    """Check that a class is an optimizer whose step is a function of gradients.

    Raises:
        TreeError: not an optimizer.
        CaptureError: a step that needs more.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        got = f"a {type(cls).__name__}" if not isinstance(cls, type) else cls.__name__
        fix = "optim(torch.optim.AdamW, lr=1e-3)"
        if isinstance(cls, torch.optim.Optimizer):
            fix = f"the class: optim({type(cls).__name__}, ...)"
        raise TreeError.of("optim", got, needed="a subclass of torch.optim.Optimizer", fix=fix)
    name = f"optim({cls.__name__})"
    reasons = [reason for kind, reason in REFUSED.items() if issubclass(cls, kind)]
    if reasons:
        got, fix = reasons[0]
        raise CaptureError.of(
            name, got, needed="an optimizer whose step is a pure function", fix=fix
        )
    needed = [
        p.name
        for p in list(inspect.signature(cls.step).parameters.values())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        raise CaptureError.of(
            name,
            f"the optimizer's step needs an argument: {', '.join(needed)}",
            needed="a step() that needs only parameters, gradients and state",
            fix="use an optimizer whose step() takes no closure",
        )


def check_numbers(recipe: Recipe) -> None:
    """Check that the options of the constructor are numbers, and that the class takes them.

    Raises:
        TreeError: an option is a tensor, or unknown.
    """
    every = [recipe.options, *(own for _, own in recipe.groups)]
    tensors = [
        name for options in every for name, x in options.items() if isinstance(x, torch.Tensor)
    ]
    if tensors:
        raise TreeError.of(
            recipe.name,
            f"{', '.join(tensors)} is a tensor",
            needed="numbers",
            fix="pass a number here, and pass the tensor x to opt.update(params, grads, state, "
            f"{tensors[0]}=x)",
            arg_path=tensors[0],
        )
    names = recipe.option_names()
    unknown = [
        f"groups[{pattern!r}] has {name}"
        for pattern, own in recipe.groups
        for name in own
        if name not in names
    ]
    if unknown:
        raise TreeError.of(
            recipe.name,
            *unknown,
            needed=f"an option of a parameter group: {', '.join(names)}",
            fix="use the name of an option of the optimizer class",
            arg_path="groups",
        )


def check_options(recipe: Recipe, given: Sequence[str]) -> None:
    """Check that the options of a step are options of the optimizer.

    Raises:
        TreeError: names the others.
    """
    names = recipe.option_names()
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TreeError.of(
            f"{recipe.name}.update",
            f"the optimizer has no options {', '.join(unknown)}",
            needed=f"some of {', '.join(names)}",
            fix="use the name of an option of the optimizer class",
            arg_path=unknown[0],
        )


def check_groups(name: str, groups: Any) -> None:
    """Check that parameter groups are a dict from patterns to options.

    Raises:
        TreeError: they are something else.
    """
    is_dict = isinstance(groups, Mapping)
    if groups is not None and not (
        is_dict and all(isinstance(x, Mapping) for x in groups.values())
    ):
        raise TreeError.of(
            f"optim({name}), argument groups",
            f"groups is {groups!r}",
            needed="a dict from patterns to dicts of options",
            fix='groups={"**.bias": dict(weight_decay=0.0)}',
            arg_path="groups",
        )


@_compat.constant_in_graph
def refuse_state(name: str, kind: str) -> None:
    """Refuse a state that is no dict.

    Raises:
        TreeError: always.
    """
    raise TreeError.of(
        f"{name}.update, argument state",
        f"state is a {kind}",
        needed="a dict of tensors",
        fix="state = opt.init(params)",
        arg_path="state",
    )


def check_params(where: str, paths: Sequence[str]) -> None:
    """Check that there are parameters, each with a path of its own.

    Raises:
        TreeError: there is none, or two have one path.
    """
    twice = sorted(path for path, count in Counter(paths).items() if count > 1)
    lines = [f"two parameters have the path {path!r}" for path in twice]
    if not paths:
        lines.append("the parameters have no tensor")
    if lines:
        raise TreeError.of(
            f"{where}, argument params",
            *lines,
            needed="a pytree of tensors, each with a dotted path of its own",
            fix="rename the keys: 'a.b' and 'a' with 'b' in it have one path"
            if paths
            else "a pytree with a tensor: {'w': torch.ones(2)}",
            arg_path="params",
        )


def check_trees(
    name: str,
    paths: Sequence[str],
    shapes: Sequence[Any],
    of_grads: Sequence[Any],
    wrong: Sequence[str],
) -> None:
    """Check that gradients are like their parameters.

    Raises:
        TreeError: lists all that differ.
    """
    lines = list(wrong)
    for path, of_param, of_grad in zip(paths, shapes, of_grads, strict=True):
        if of_grad is not None and of_grad != of_param:
            texts = [x if isinstance(x, str) else _text(x) for x in (of_grad, of_param)]
            lines.append(f"the gradient of {path!r} is {texts[0]}, but its parameter is {texts[1]}")
    if lines:
        raise TreeError.of(
            f"{name}.update, argument grads",
            *lines,
            needed="a gradient of the same shape and dtype for each parameter, or None",
            fix="grads = sf.grad(loss)(params, ...)",
            arg_path="grads",
        )


def check_meshes(
    name: str,
    paths: Sequence[str],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> None:
    """Check that each gradient is on the mesh of its parameter.

    Raises:
        PlacementError: lists all that are on another mesh, or on none.
    """
    rows = zip(paths, params, grads, strict=True)
    lines = [
        f"the gradient of {path!r} is {_mesh_text(grad)}, but its parameter is {_mesh_text(x)}"
        for path, x, grad in rows
        if grad is not None and _mesh_of(grad) != _mesh_of(x)
    ]
    _refuse_meshes(f"{name}.update, argument grads", lines)


def check_one_mesh(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Check that gradients with one norm are on one mesh. Other leaves do not count.

    Raises:
        PlacementError: lists them, if they are not.
    """
    every = zip(paths, leaves, strict=True)
    rows = [(path, x) for path, x in every if isinstance(x, torch.Tensor)]
    lines = [f"{path or 'the tensor'} is {_mesh_text(x)}" for path, x in rows]
    meshes = [_mesh_of(x) for _, x in rows]
    if any(mesh != meshes[0] for mesh in meshes):
        _refuse_meshes("clip_by_global_norm, argument grads", lines)


def _refuse_meshes(where: str, lines: Sequence[str]) -> None:
    if lines:
        fix = (
            "use DTensors on one mesh: sf.make_mesh(shape, names) with all axes, and a "
            "placement for each axis; sf.distribute(sf.full(x), mesh, placements) moves a "
            "DTensor"
        )
        needed = "tensors on one mesh"
        source = call_site()
        raise PlacementError.of(where, *lines, needed=needed, fix=fix, source=source)


def _mesh_of(x: torch.Tensor) -> Any:
    return x.device_mesh if isinstance(x, DTensor) else None


def _mesh_text(x: torch.Tensor) -> str:
    mesh = _mesh_of(x)
    return "a plain tensor" if mesh is None else f"a DTensor on {axes_of(mesh)}"


def _text(described: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = described
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


@_compat.constant_in_graph
def check_average(
    wrong: tuple[str, ...], params: tuple[Any, ...], average: tuple[Any, ...]
) -> None:
    """Check that parameters have the structure, shapes and dtypes of their average.

    Raises:
        TreeError: lists the differences.
    """
    if not wrong:
        pairs = zip(params, average, strict=True)
        wrong = tuple(
            f"the parameters have a {_text(x)}, but the average has a {_text(y)}"
            for x, y in pairs
            if x != y
        )
    if wrong:
        raise TreeError.of(
            "ema.update",
            *wrong,
            needed="parameters with the tree, shapes and dtypes that init got",
            fix="state = ema.init(params)",
            arg_path="params",
        )


@_compat.constant_in_graph
def check_averaged(count: int) -> None:
    """Check that there are parameters to average.

    Raises:
        TreeError: there is none.
    """
    if not count:
        got, needed = "params has no tensor", "a pytree of tensors"
        fix = "ema.init({'w': torch.ones(2)})"
        raise TreeError.of("ema.init", got, needed=needed, fix=fix, arg_path="params")


@_compat.constant_in_graph
def check_selected(
    wrong: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    of_old: tuple[tuple[int, ...], ...],
    constants: tuple[tuple[Any, Any], ...],
) -> None:
    """Check that new and old values have one structure, their tensors the same shapes, and that
    what is no tensor is equal.

    Raises:
        TreeError: lists the differences.
    """
    if not wrong and shapes != of_old:
        wrong = (
            f"the new values have tensors of shapes {list(shapes)}, but the old values have "
            f"{list(of_old)}",
        )
    differ = [f"the new {new!r} is no tensor, and the old one is {old!r}" for new, old in constants]
    if differ and not wrong:
        needed, fix = "tensors where the values differ", "a torch.tensor for each of them"
        raise TreeError.of("loss_scale.select", *differ, needed=needed, fix=fix, arg_path="new")
    if wrong:
        needed, fix = (
            "two trees with the same structure",
            "scaler.select(finite, new_params, params)",
        )
        raise TreeError.of("loss_scale.select", *wrong, needed=needed, fix=fix, arg_path="new")


@_compat.constant_in_graph
def check_decay(decay: Any) -> None:
    """Check the decay of an average.

    Raises:
        ShardError: it is outside of 0 to 1.
    """
    if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise ShardError.of(
            "ema", f"decay is {decay!r}", needed="a number from 0 to 1", fix="ema(0.999)"
        )


@_compat.constant_in_graph
def check_unscaled(paths: tuple[str, ...], dtypes: tuple[str, ...]) -> None:
    """Check that gradients can be divided by the scale of their loss.

    Raises:
        TreeError: names those in float16, and those of integers.
    """
    rows = [*zip(paths, dtypes, strict=True)]
    whole = ("torch.int", "torch.uint", "torch.bool")
    of_integers = [f"{path} is {dtype}" for path, dtype in rows if dtype.startswith(whole)]
    if of_integers:
        needed, fix = "gradients of floating-point parameters", "leave them out of grads"
        where = "loss_scale.unscale"
        raise TreeError.of(where, *of_integers, needed=needed, fix=fix, arg_path="grads")
    wrong = [f"{path} is {dtype}" for path, dtype in rows if dtype == "torch.float16"]
    if wrong:
        raise TreeError.of(
            "loss_scale.unscale",
            *wrong,
            needed="gradients of float32 parameters, because small float16 gradients become 0",
            fix="sf.mixed_precision(fn, compute=torch.float16), which keeps parameters in float32",
            arg_path="grads",
        )
