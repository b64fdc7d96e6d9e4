"""Selective checkpointing of torch: what the `context_fn` of `torch.utils.checkpoint` saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ... import _compat
from ...errors import CaptureError
from .policies import Policy

WHERE = "torch.utils.checkpoint"
PREFIX = "context_fn "
SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTED = (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)

_contexts: list[Callable[[], Any]] = []  # by number


@_compat.constant_in_graph
def text_of(context_fn: Callable[[], Any]) -> str:
    """The text that stands for a `context_fn` in a graph.

    Raises:
        CaptureError: its contexts are not those of selective checkpointing.
    """
    _policy_of(context_fn)
    if context_fn not in _contexts:
        _contexts.append(context_fn)
    return f"{PREFIX}{_contexts.index(context_fn)}"


def _policy_of(context_fn: Callable[[], Any]) -> Callable[..., Any]:
    """The function that decides for each op of one call."""
    contexts = context_fn()
    first = contexts[0] if isinstance(contexts, (tuple, list)) and contexts else contexts
    policy = getattr(first, "policy_fn", None)
    if policy is None:
        raise CaptureError.of(
            WHERE,
            "context_fn returns contexts that are not those of selective checkpointing",
            needed="torch.utils.checkpoint.create_selective_checkpoint_contexts",
            fix="sf.checkpoint(fn, policy=...), with one of checkpoint_policies",
        )
    return policy


def saved_by(text: str, forward: Sequence[torch.fx.Node]) -> Policy | None:
    """The policy of a checkpointed call of torch; None if the text is another policy.

    Args:
        text: the policy of the call.
        forward: the ops of its forward, in order, which the user's function is asked about: it may
            count them.
    """
    if not text.startswith(PREFIX):
        return None
    policy = _policy_of(_contexts[int(text.removeprefix(PREFIX))])
    saved = set[torch.fx.Node]()
    for node in forward:
        if not isinstance(node.target, _compat.OpOverload):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        context = SelectiveCheckpointContext(is_recompute=False, op_output=node.meta["val"])
        try:
            answer = policy(context, node.target, *args, **kwargs)
        except Exception as error:
            got = f"the policy raises {type(error).__name__} for {node.target}: {error}"
            raise CaptureError.of(WHERE, got) from error
        if answer in SAVED:
            saved.add(node)
        elif answer not in RECOMPUTED:
            got = f"its policy answers {answer} for {node.target}"
            raise CaptureError.of(WHERE, got, needed=f"one of {SAVED[1:]}, {RECOMPUTED[1:]}")
    return lambda node, names: node in saved
