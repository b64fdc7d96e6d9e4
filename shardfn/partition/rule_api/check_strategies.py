"""Checks of a rule's strategies. A rule that fails is a RuleError that names the op, its
schema, the cause and the line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import RuleError, ShardError, problem
from ...ops.nodes import origin_of
from ...types import PARTIAL_KINDS, AxisPlacement
from .strategy import Choice, OpCall, Rule, replicated

WORDS = {"R", *PARTIAL_KINDS}
FIX = (
    "a list of (placements of the tensor arguments, placements of the results); a placement is "
    "a dim, 'R' or 'sum'"
)


def strategies_of(rule: Rule | None, call: OpCall, name: str, node: torch.fx.Node) -> list[Choice]:
    """Ask a rule for the strategies of a call, and check them. Without a rule: everything
    replicated.

    Args:
        rule: the rule of the op, if it has one.
        call: the op and its global arguments.
        name: of the function.
        node: the node of the Program, for the line in errors.

    Raises:
        RuleError: the rule raises, returns no strategies, or returns placements that do not fit
            the call.
    """
    if rule is None or not call.ins:
        return [replicated(call)]
    try:
        choices = list(dict.fromkeys(rule(call)))
        wrong = (
            "it gives no strategy"
            if not choices
            else next((w for w in (_wrong(c, call) for c in choices) if w), None)
        )
    except ShardError:
        raise
    except Exception as error:
        raise failed(
            f"it raises {type(error).__name__}: {error}", rule, call, name, node
        ) from error
    if wrong:
        raise failed(wrong, rule, call, name, node)
    return choices


def failed(
    cause: str, rule: Rule | None, call: OpCall, name: str, node: torch.fx.Node
) -> RuleError:
    """Make the error for a rule that raises or gives invalid strategies."""
    schema = f"schema {getattr(call.target, '_schema', call.target)}"
    who = (
        f"its rule {getattr(rule, '__module__', '')}.{getattr(rule, '__qualname__', rule)} "
        f"fails: {cause}"
    )
    where, origin = f"{name}, op {call.target}", origin_of(node)
    return RuleError(problem(where, who, schema, needed=FIX, **origin), fix=FIX, **origin)


def _wrong(choice: Choice, call: OpCall) -> str | None:
    """Describe what is wrong with a strategy; None if it fits the call."""
    ins, outs = choice
    if len(ins) != len(call.ins) or len(outs) != len(call.outs):
        given = f"{len(ins)} placements for arguments and {len(outs)} for results"
        needed = f"{len(call.ins)} and {len(call.outs)}"
        return f"the rule returns {given}, but the call has {needed}: {choice}"
    if not (_all_fit(ins, call.ins) and _all_fit(outs, call.outs)):
        shapes = f"{[tuple(x.shape) for x in call.ins]} -> {[tuple(x.shape) for x in call.outs]}"
        return f"the rule returns placements that do not fit {shapes}: {choice}"
    return None


def _all_fit(placements: Sequence[AxisPlacement], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether placements fit the dims of some tensors."""
    for placement, x in zip(placements, tensors, strict=True):
        if isinstance(placement, str):
            if placement not in WORDS:
                return False
        elif not 0 <= (placement[0] if isinstance(placement, tuple) else placement) < x.dim():
            return False
    return True
