"""placements: a placement for every parameter, from patterns or from a plan of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ... import _compat, tree_pairs
from ...errors import PlacementError, TreeError
from ...mesh import axes_of, check_mesh
from ...placement import P, is_spec
from ...placement_table import Leaf, Placements
from ...types import MeshAxes
from . import styles
from .leaves import Params, check_fit, checked_axes, params_of
from .mismatches import gaps, unmatched, unreachable
from .rules import Choice, Reader, Rule, is_of_styles, notes_of, of_base_model, rules_of, winner


@_compat.outside_only
def placements(
    params: Any,
    plan: Any,
    *,
    mesh: Any = None,
    axis: str | tuple[str, ...] | None = None,
    default: Any = None,
    module: nn.Module | None = None,
) -> Placements:
    """Give every parameter the placement of the first pattern that matches its name.

    A pattern is a glob over full parameter paths: `*` matches within one name between dots, and
    `**` matches any number of names. A pattern may also be a regular expression, `re.compile(...)`,
    which must match the full path. A value in `plan` is a placement, or a style of tensor or expert
    parallelism. Styles of Hugging Face plans (`model.tp_plan`, `config.base_model_tp_plan`,
    `model.ep_plan`) are given by name, and styles of `torch.distributed.tensor.parallel` as
    objects. The pattern of a style may also match a module, instead of its parameters. A pattern
    that matches the parameter takes precedence over a pattern that matches the module. Styles that
    place activations have no effect, because sharding propagation places activations.

    Args:
        params: a dict of tensors, DTensors or `ShapeDtype`s, such as `functionalize` returns, or a
            tree of dicts. In a tree of dicts, the path of a parameter consists of the keys, joined
            with dots.
        plan: a dict that maps patterns to placements (`P`, a Placement, a list of them, None) or
            styles.
        mesh: a DeviceMesh. If `mesh` is given, `placements` checks the axis names, and the printed
            table shows the bytes that each rank holds.
        axis: the mesh axis, or axes, over which the styles in `plan` shard parameters. `axis` may
            be omitted for a mesh of one axis.
        default: a placement, or a prefix tree of placements, for parameters that no pattern
            matches. Without `default`, a parameter that no pattern matches raises an error, or is
            replicated if the plan contains styles.
        module: the nn.Module of the parameters. torch's styles need the module to distinguish an
            Embedding from a Linear without bias. With `module`, a pattern may match any name of a
            tied parameter.

    Returns:
        A dict with a placement for each parameter, for `in_placements`, `distribute` and `init`.
        The dict of placements prints as a table.

    Raises:
        TreeError: a pattern matches nothing, a parameter matches no pattern, or a pattern has no
            effect because earlier patterns match the same parameters. The TreeError lists all
            patterns without effect, and all parameters without a pattern.
        PlacementError: a placement does not fit its parameter, or a style is unknown.

    Source: the partition rules of EasyLM and MaxText; transformers' tp_plan;
        torch.distributed.tensor.parallel.parallelize_module.

    Example:
        >>> import torch, shardfn as sf
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
        >>> fn, params, _ = sf.functionalize(module)
        >>> where = sf.placements(params, {"0.*": P("tp"), "1.weight": P(None, "tp")}, default=P())
        >>> print(where)
        path      tensors  shape  dtype    placement      bytes
        0.weight  1        6x4    float32  P('tp')        96 B
        0.bias    1        6      float32  P('tp')        24 B
        1.weight  1        4x6    float32  P(None, 'tp')  96 B
        1.bias    1        4      float32  P()            16 B
        4 tensors, 232 B
        >>> sf.placements(params, {"0": "colwise", "1": "rowwise"}, axis="tp") == where
        True
    """
    check_mesh("placements", mesh, or_none=True)
    mesh_axes = None if mesh is None else axes_of(mesh)
    tree = params_of("placements", params, module)
    rules = of_base_model(rules_of(plan), tree.tensors)
    reader = _reader(rules, mesh_axes, axis, tree, module)
    chosen = _chosen(rules, tree.tensors, reader)
    used = {choice.rule for choices in chosen.values() for choice in choices}
    fallback = _fallback(default, rules, params, tree)
    lines = [*unmatched(_of_parameters(rules), used, tree.tensors)]
    lines += unreachable(chosen)
    if fallback is None:
        lines += gaps(chosen, rules)
    _check(lines)
    specs = {
        path: winner(choices).spec if choices else (fallback or {})[path]
        for path, choices in chosen.items()
    }
    check_fit("placements", tree.tensors, specs, mesh_axes)
    notes = notes_of(rules, used)
    return Placements(tree.filled(specs), tree.tensors, mesh_axes, notes)


def _of_parameters(rules: Sequence[Rule]) -> list[Rule]:
    """The rules without those of activations."""
    return [rule for rule in rules if not styles.is_of_activations(rule.value)]


def _chosen(
    rules: Sequence[Rule], leaves: Sequence[Leaf], reader: Reader
) -> dict[str, list[Choice]]:
    """The placements that the rules give each parameter, by path.

    Raises:
        PlacementError: styles without a reading for their layers.
    """
    chosen: dict[str, list[Choice]] = {}
    wrong: dict[str, None] = {}
    counting = _of_parameters(rules)
    for leaf in leaves:
        chosen[leaf.path] = []
        for rule in counting:
            try:
                choice = reader.choice(rule, leaf)
            except ValueError as error:
                wrong[str(error)] = None
                continue
            if choice is not None:
                chosen[leaf.path].append(choice)
    if wrong:
        fix = "sf.placements(params, plan, axis=..., module=model)"
        raise PlacementError.of("placements, plan", *wrong, fix=fix)
    return chosen


def _reader(
    rules: Sequence[Rule],
    mesh_axes: MeshAxes | None,
    axis: Any,
    tree: Params,
    module: nn.Module | None,
) -> Reader:
    """How styles are read.

    Raises:
        PlacementError: styles without an axis, or an axis that the mesh lacks.
    """
    if axis is None and mesh_axes is not None and len(mesh_axes.names) == 1:
        axis = mesh_axes.names
    if axis is None and is_of_styles(rules):
        names = ("tp",) if mesh_axes is None else mesh_axes.names
        raise PlacementError.of(
            "placements, axis",
            "the plan has styles, which need one mesh axis, but axis is not given",
            fix=" or ".join(f"axis={name!r}" for name in names),
            arg_path="axis",
        )
    names = () if axis is None else checked_axes("placements", mesh_axes, axis)
    layers = {} if module is None else _layers(module)
    paths = frozenset(leaf.path for leaf in tree.tensors)
    return Reader(names[0] if len(names) == 1 else names, layers, paths)


def _layers(module: nn.Module) -> dict[str, type[nn.Module]]:
    """The class of each layer of a module."""
    found = module.named_modules(remove_duplicate=False)
    return {path: type(layer) for path, layer in found}


def _fallback(
    default: Any, rules: Sequence[Rule], params: Any, tree: Params
) -> Mapping[str, Any] | None:
    """The placement of each parameter that nothing matches, by path; None if that is an error.

    Raises:
        TreeError: a tree of defaults that does not match the parameters.
    """
    if default is None:
        if not is_of_styles(rules):
            return None
        default = P()
    try:
        specs = tree_pairs.broadcast_prefix(default, dict(params), is_spec)
    except ValueError as error:
        raise TreeError.of(
            "placements, default",
            "the default does not match the parameters",
            *error.args,
            fix="give a placement, or a prefix tree of placements",
            arg_path="default",
        ) from None
    pairs = zip(tree.leaves, specs, strict=True)
    return {leaf.path: spec for leaf, spec in pairs if leaf is not None}


def _check(lines: Sequence[str]) -> None:
    """Check that each pattern and each parameter has its counterpart.

    Raises:
        TreeError: lists all that have none.
    """
    if lines:
        fix = "use patterns that match the names (the first match counts), or default=P()"
        raise TreeError.of("placements, plan", *lines, fix=fix, arg_path="plan")
