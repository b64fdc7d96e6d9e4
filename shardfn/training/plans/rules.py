"""The rules of a plan: which parameters each of its patterns matches, and the placement there."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from ...errors import PlacementError, TreeError
from ...patterns import compiled, near, parent, written
from ...placement import is_spec
from ...placement_table import Leaf
from . import styles

Key = str | re.Pattern[str]
DEEPEST = 2  # names before a plan of the base model


@attrs.frozen(eq=False)
class Rule:
    """One entry of a plan. `under` stands before its pattern, for a plan of the base model."""

    key: Key
    value: Any
    under: str = ""
    pattern: re.Pattern[str] = attrs.field(init=False)

    @pattern.default
    def _compiled(self) -> re.Pattern[str]:
        return compiled(self.key)

    @property
    def is_style(self) -> bool:
        return styles.is_style(self.value)

    def __str__(self) -> str:
        return written(self.key)

    def matches(self, path: str) -> bool:
        """Whether a full path matches."""
        if self.under:
            before = f"{self.under}."
            if not path.startswith(before):
                return False
            path = path.removeprefix(before)
        return self.pattern.fullmatch(path) is not None

    def way_to(self, leaf: Leaf) -> tuple[str, bool] | None:
        """The name under which it matches a parameter, and whether it names the module that
        holds the parameter, as only a style may. None if it does not match.
        """
        direct = next((name for name in leaf.names if self.matches(name)), None)
        if direct is not None:
            return direct, False
        if not self.is_style:
            return None
        held = (name for name in leaf.names if self.matches(parent(name)))
        name = next(held, None)
        return None if name is None else (name, True)


@attrs.frozen
class Choice:
    """The placement that one rule gives a parameter."""

    rule: Rule
    spec: Any
    of_module: bool


@attrs.frozen
class Reader:
    """How styles are read: over a mesh axis, with the classes of layers that are known."""

    axis: Any
    layers: dict[str, type[nn.Module]]
    paths: frozenset[str]

    def choice(self, rule: Rule, leaf: Leaf) -> Choice | None:
        """The placement that a rule gives a parameter; None if it does not match.

        Raises:
            ValueError: a style without a reading for its layer.
        """
        way = rule.way_to(leaf)
        if way is None:
            return None
        name, of_module = way
        if not rule.is_style:
            return Choice(rule, rule.value, of_module)
        style = rule.value
        holder = parent(name)
        layer = styles.layer_of(style, holder, self.layers, self.paths)
        if layer is None:
            raise ValueError(
                f"{leaf.path}: {styles.name_of(style)} shards a Linear and an Embedding "
                "differently; pass module=model to tell them apart"
            )
        dims = styles.dims_of(style, layer)
        if dims is None:
            raise ValueError(
                f"{leaf.path}: {styles.name_of(style)} is not supported for a "
                f"{layer.__name__}; give a P in place of the style"
            )
        last = name.rpartition(".")[2]
        spec = dims.spec(last, len(leaf.shape), self.axis)
        return Choice(rule, spec, of_module)


def rules_of(plan: Any) -> list[Rule]:
    """The rules of a plan.

    Raises:
        TreeError: the plan is not a dict of patterns.
        PlacementError: values that are neither placements nor styles with a reading.
    """
    if not isinstance(plan, Mapping):
        raise TreeError.of(
            "placements, plan",
            f"a {type(plan).__name__}",
            needed="a dict from patterns to placements or styles",
            fix="{'**.weight': P('tp')}",
            arg_path="plan",
        )
    strange = [key for key in plan if not isinstance(key, (str, re.Pattern))]
    if strange:
        lines = [f"{key!r} is not a pattern" for key in strange]
        needed = "globs such as '**.weight', or re.compile(...)"
        raise TreeError.of("placements, plan", *lines, needed=needed, arg_path="plan")
    _check_values(plan)
    return [Rule(key, value) for key, value in plan.items()]


def _check_values(plan: Mapping[Key, Any]) -> None:
    """Check that the values of a plan have a reading.

    Raises:
        PlacementError: lists those that have none.
    """
    wrong = []
    for key, value in plan.items():
        if styles.is_style(value):
            if not styles.is_known(value):
                name = styles.name_of(value)
                like = ", ".join(near(name.strip("'"), styles.known_names()))
                wrong.append(
                    f"{written(key)}: the style {name} places no parameters; a similar style "
                    f"is {like}"
                )
        elif not is_spec(value):
            wrong.append(f"{written(key)}: {value!r} is not a placement")
    if wrong:
        raise PlacementError.of(
            "placements, plan",
            *wrong,
            needed="a P, a Placement, a list of Placements, None, or a style",
            fix="P('axis', None)",
            arg_path="plan",
        )


def of_base_model(rules: Sequence[Rule], leaves: Sequence[Leaf]) -> list[Rule]:
    """The rules, where a plan of names of Hugging Face is one of the base model: below the one
    module that has what it names.

    Raises:
        TreeError: several modules have it.
    """
    named = [rule for rule in rules if isinstance(rule.value, str)]
    if not named or any(rule.way_to(leaf) for rule in named for leaf in leaves):
        return list(rules)
    for depth in range(1, DEEPEST + 1):
        tops = dict.fromkeys(_top(leaf.path, depth) for leaf in leaves)
        below = [
            top
            for top in tops
            if top and any(_moved(r, top).way_to(x) for r in named for x in leaves)
        ]
        if len(below) > 1:
            raise TreeError.of(
                "placements, plan",
                f"the plan's names occur in each of {', '.join(below)}, so the plan is ambiguous",
                fix=f"{{f'{below[0]}.{{name}}': style for name, style in plan.items()}}",
                arg_path="plan",
            )
        if below:
            top = below[0]
            return [_moved(r, top) if r in named else r for r in rules]
    return list(rules)


def _top(path: str, depth: int) -> str:
    """The first names of a path; "" where it has no more than these."""
    names = path.split(".")
    return ".".join(names[:depth]) if len(names) > depth else ""


def _moved(rule: Rule, under: str) -> Rule:
    return attrs.evolve(rule, under=under)


def winner(choices: Sequence[Choice]) -> Choice:
    """The first choice. A style that names the parameter comes before one of its module."""
    first = choices[0]
    if not first.of_module:
        return first
    closer = (c for c in choices if c.rule.is_style and not c.of_module)
    return next(closer, first)


def notes_of(rules: Sequence[Rule], used: Container[Rule]) -> list[str]:
    """Lines for the table: the entries of a plan that gave nothing a placement."""
    of_activations = [r for r in rules if styles.is_of_activations(r.value)]
    others = [r for r in rules if r not in used and r not in of_activations]
    under = next((rule.under for rule in rules if rule.under), "")
    lines = [f"the plan applies to {under}"] if under else []
    if of_activations:
        names = ", ".join(map(str, of_activations))
        lines.append(f"styles for activations only, which sharding propagation places: {names}")
    if others:
        lines.append(f"entries that match no parameter: {', '.join(map(str, others))}")
    return lines


def is_of_styles(rules: Sequence[Rule]) -> bool:
    """Whether a plan has styles, and so replicates what it does not name."""
    return any(rule.is_style for rule in rules)
