"""`pin`: sharding constraints on the arguments and results of the layers of a module.

Dynamo reads this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from ... import _compat
from ...accepted import accept
from ...errors import PlacementError, ShardError, TreeError
from ...patterns import compiled, general, near, written
from ._constrain import is_constraint, pinned

Pattern = str | re.Pattern[str]
PINNED = "shardfn_pinned"  # of a hook: the placements that it constrains to


@attrs.frozen(eq=False)
class Pins:
    """The constraints of one call of `pin`. The method `remove()`, or the end of a `with` block,
    removes the constraints.

    Args:
        paths: the paths of the constrained layers.
    """

    paths: tuple[str, ...]
    handles: tuple[Any, ...] = attrs.field(repr=False)

    def remove(self) -> None:
        """Remove the constraints of the `pin` call."""
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def pin(
    module: nn.Module,
    outputs: Mapping[Pattern, Any] | None = None,
    *,
    inputs: Mapping[Pattern, Any] | None = None,
) -> Pins:
    """Constrain the placements of the results or arguments of a module's layers, which are named by
    patterns.

    Args:
        module: the nn.Module whose layers are constrained. `pin` adds hooks to the layers, so the
            code of the module does not change.
        outputs: a dict that maps patterns of layer paths to the placement of the layer's results: a
            `P` or a `Stage` for every tensor, or a tree of them. A pattern is a glob, as in
            `placements`, or a regular expression. The pattern "" matches the module itself. The
            first pattern that matches a layer applies.
        inputs: a dict that maps patterns of layer paths to the placements of the layer's arguments:
            a `P` for the first argument, or a tuple with one entry for each positional argument. In
            `inputs`, None does not constrain an argument.

    Returns:
        An object whose method `remove()` removes the constraints. In a `with` statement, the end of
        the block removes the constraints.

    Raises:
        TreeError: a pattern matches no layer, or neither outputs nor inputs is given.
        PlacementError: a placement in `outputs` or `inputs` is neither a `P` nor a `Stage`, or a
            layer gets two placements for its results or arguments, from one `pin` call or from
            several.
        ShardError: module is not an nn.Module.

    Source: jax.lax.with_sharding_constraint, and torch's PrepareModuleInput and
        PrepareModuleOutput.

    Example:
        >>> import torch, shardfn as sf
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        >>> sf.pin(model, {"0": sf.P("dp", "tp")}, inputs={"0": sf.P("dp")}).paths
        ('0', '0')
    """
    if not isinstance(module, nn.Module):
        got = f"module is a {type(module).__name__}"
        raise ShardError.of("pin", got, needed="an nn.Module", arg_path="module")
    accept("pin", outputs=outputs, inputs=inputs)
    given = {"outputs": outputs or {}, "inputs": inputs or {}}
    chosen = [
        (verb, path, placement)
        for verb, patterns in given.items()
        for path, placement in _layers(module, verb, patterns)
    ]
    if not chosen:
        fix = "sf.pin(module, {'layers.*.mlp': P('dp', 'tp')})"
        raise TreeError.of("pin", "neither outputs nor inputs is given", fix=fix)
    layers = dict(module.named_modules(remove_duplicate=False))
    _refuse_contradictions(layers, chosen)
    handles = []
    for verb, path, placement in chosen:
        where = f"pin, {verb}[{path!r}]"
        handles.append(HOOKS[verb](layers[path], placement, where))
    return Pins(tuple(path for _, path, _ in chosen), tuple(handles))


def _output(layer: nn.Module, placement: Any, where: str) -> Any:
    """Make the forward hook that constrains the output of a layer."""

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        return pinned(out, placement, where)

    hook.__dict__[PINNED] = placement
    return layer.register_forward_hook(hook)


def _input(layer: nn.Module, placement: Any, where: str) -> Any:
    """Make the forward pre-hook that constrains the inputs of a layer."""
    specs = placement if isinstance(placement, tuple) else (placement,)

    def hook(_: nn.Module, args: Any) -> Any:
        count = min(len(specs), len(args))
        rows = zip(args[:count], specs[:count], strict=True)
        held = [pinned(x, spec, where) for x, spec in rows]
        return (*held, *args[count:])

    hook.__dict__[PINNED] = specs
    return layer.register_forward_pre_hook(hook)


HOOKS_OF = {"outputs": _compat.forward_hooks_of, "inputs": _compat.forward_pre_hooks_of}


def _refuse_contradictions(
    layers: Mapping[str, nn.Module], chosen: Sequence[tuple[str, str, Any]]
) -> None:
    """Refuse two placements for one value. A layer may have several paths, and a value may be
    that of several layers: of a Sequential and of its last.
    """
    wrong = []
    rows: dict[tuple[str, nn.Module], list[tuple[str, Any]]] = {}
    for verb, hooks_of in HOOKS_OF.items():
        for path, layer in layers.items():
            hooks = hooks_of(layer).values()
            pins = [(path, getattr(hook, PINNED, None)) for hook in hooks]
            rows.setdefault((verb, _same(verb, layer)), []).extend(pins)
    for verb, path, placement in chosen:
        given = rows[verb, _same(verb, layers[path])]
        takes = verb == "inputs" and not isinstance(placement, tuple)
        now = (placement,) if takes else placement
        for where, other in given:
            if _contradict(now, other):
                at = "" if layers[where] is layers[path] else f" as {verb}[{where!r}]"
                wrong.append(f"{verb}[{path!r}] is pinned{at} to {other}, and also to {now}")
        given.append((path, now))
    if wrong:
        raise PlacementError.of(
            "pin",
            *dict.fromkeys(wrong),
            needed="one placement for each pinned value",
            fix="call remove() of the earlier pins, or use patterns that do not match these layers",
        )


def _same(verb: str, layer: nn.Module) -> nn.Module:
    """Follow Sequential containers to the innermost layer with the same output, or the
    same input.
    """
    place = -1 if verb == "outputs" else 0
    while isinstance(layer, nn.Sequential) and len(layer):
        if type(layer).forward is not nn.Sequential.forward:
            break
        layer = layer[place]
    return layer


def _contradict(first: Any, second: Any) -> bool:
    """Return whether two trees of placements give one value two placements."""
    if first is None or second is None:
        return False
    if is_constraint(first) and is_constraint(second):
        return first != second
    if is_constraint(first):
        return _contradict(second, first)
    keys = first.keys() if isinstance(first, dict) else range(len(first))
    for key in keys:
        other = second
        if not is_constraint(second):
            other = _part(second, key)
        if _contradict(first[key], other):
            return True
    return False


def _part(tree: Any, key: Any) -> Any:
    """Index a tree of placements by key; None if it has no such part."""
    if isinstance(tree, dict):
        return tree.get(key)
    is_number = isinstance(key, int) and key < len(tree)
    return tree[key] if is_number else None


HOOKS: dict[str, Callable[[nn.Module, Any, str], Any]] = {"outputs": _output, "inputs": _input}


def _layers(module: nn.Module, verb: str, patterns: Mapping[Pattern, Any]) -> list[tuple[str, Any]]:
    """Match the layers of a module by name patterns; the first matching pattern gives the
    placement.
    """
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    found: dict[str, Any] = {}
    idle = []
    for pattern, placement in patterns.items():
        _check(placement, f"pin, {verb}[{written(pattern)}]")
        matched = [path for path in paths if compiled(pattern).fullmatch(path)]
        if not matched:
            text = pattern if isinstance(pattern, str) else pattern.pattern
            close = ", ".join(near(text, map(general, paths[1:])))
            idle.append(f"{verb}[{written(pattern)}] matches no layer; similar names: {close}")
        for path in matched:
            found.setdefault(path, placement)
    if idle:
        fix = "use paths of module.named_modules(), with * for one name and ** for several names"
        raise TreeError.of("pin", *idle, fix=fix)
    return list(found.items())


def _check(placement: Any, where: str) -> None:
    """Refuse a placement that is neither a `P` nor a tree of them."""
    rows = placement if isinstance(placement, (tuple, list)) else [placement]
    if isinstance(placement, dict):
        rows = list(placement.values())
    for row in rows:
        if isinstance(row, (tuple, list, dict)):
            _check(row, where)
        elif not is_constraint(row):
            raise PlacementError.of(
                where, f"{row!r}", needed="a P, a Stage, a tree of them, or None"
            )
