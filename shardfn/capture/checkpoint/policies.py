"""Policies of checkpointed calls: the values that are saved for the backward. They are texts,
which pass through Dynamo and make_fx.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from ...errors import ShardError

aten = torch.ops.aten

DOTS = (aten.mm, aten.addmm, aten.mv, aten.addmv, aten.dot, aten.vdot)
BATCHED_DOTS = (aten.bmm, aten.baddbmm)
OTHER_DOTS = (
    aten.convolution,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
    aten._scaled_dot_product_attention_math,
)

EVERYTHING = "everything_saveable"
Names = frozenset[str]
Policy = Callable[
    [torch.fx.Node, Names], bool
]  # whether a forward value, which has these names, is saved


def _is_dot(node: torch.fx.Node, _: Names) -> bool:
    op = getattr(node.target, "overloadpacket", None)
    return op in DOTS or op in BATCHED_DOTS or op in OTHER_DOTS


def _is_dot_without_batch(node: torch.fx.Node, _: Names) -> bool:
    """Whether a product has no batch dim, or one of size 1, which torch.einsum makes of a
    product of matrices.
    """
    op = getattr(node.target, "overloadpacket", None)
    return op in DOTS or (op in BATCHED_DOTS and node.meta["val"].shape[0] == 1)


PLAIN: dict[str, Policy] = {
    EVERYTHING: lambda node, names: True,
    "nothing_saveable": lambda node, names: False,
    "dots_saveable": _is_dot,
    "checkpoint_dots": _is_dot,
    "dots_with_no_batch_dims_saveable": _is_dot_without_batch,
    "checkpoint_dots_with_no_batch_dims": _is_dot_without_batch,
}
NAMED: dict[str, Callable[[Names], Policy]] = {
    "save_only_these_names": lambda wanted: lambda node, names: bool(names & wanted),
    "save_anything_except_these_names": lambda unwanted: lambda node, names: not names & unwanted,
    "save_any_names_but_these": lambda unwanted: lambda node, names: bool(names - unwanted),
}
BOTH = "save_from_both_policies"


@functools.cache
def read(text: str) -> Policy:
    """The policy that a text stands for.

    Args:
        text: a name of PLAIN, a name of NAMED with names after it, or two policies:
            `save_only_these_names('q', 'k')`.

    Raises:
        ValueError, SyntaxError: it is not a policy.

    Example:
        >>> read("save_only_these_names('q')")(None, frozenset({"q"}))
        True
    """
    return _meaning(ast.parse(text, mode="eval").body)


@_compat.constant_in_graph
def check(where: str, text: str) -> None:
    """Check that a text is a policy.

    Raises:
        ShardError: it is not a policy.
    """
    try:
        read(text)
    except (SyntaxError, ValueError):
        raise ShardError.of(
            where,
            f"the policy is {text}",
            needed="one of checkpoint_policies",
            fix=f"{', '.join(PLAIN)}; {', '.join(NAMED)} with names; or {BOTH} of two policies",
        ) from None


def _meaning(tree: ast.expr) -> Policy:
    """The policy of a parsed text.

    Raises:
        ValueError: it is not a policy.
    """
    if isinstance(tree, ast.Name) and tree.id in PLAIN:
        return PLAIN[tree.id]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        if tree.func.id in NAMED:
            return NAMED[tree.func.id](frozenset(_text(x) for x in tree.args))
        if tree.func.id == BOTH and len(tree.args) == 2:
            one, other = map(_meaning, tree.args)
            return lambda node, names: one(node, names) or other(node, names)
    raise ValueError


def _text(tree: ast.expr) -> Any:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        return tree.value
    raise ValueError
