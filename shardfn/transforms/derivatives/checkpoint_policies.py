"""Policies for `checkpoint`: which values of a checkpointed call its backward keeps; under
JAX's names.

A policy is a text. What is not kept is recomputed.
"""

from __future__ import annotations

from ...capture.checkpoint import policies

# save all residuals, as without `checkpoint`
everything_saveable = "everything_saveable"
# save the inputs only
nothing_saveable = "nothing_saveable"
dots_saveable = checkpoint_dots = (
    "dots_saveable"  # keep the results of matrix products, attention and convolutions
)
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = (
    "dots_with_no_batch_dims_saveable"  # not of batches
)


def save_only_these_names(*names: str) -> str:
    """Keep only the values with these names.

    Args:
        names: as `checkpoint_name` gave them.

    Returns:
        The policy.

    Raises:
        ShardError: a name that is no str.

    Source: jax.checkpoint_policies.save_only_these_names.

    Example:
        >>> save_only_these_names("q", "k")
        "save_only_these_names('q', 'k')"
    """
    return _with_names("save_only_these_names", names)


def save_anything_except_these_names(*names: str) -> str:
    """Keep everything, named or not, but the values with these names.

    Args:
        names: as `checkpoint_name` gave them.

    Returns:
        The policy.

    Raises:
        ShardError: a name that is no str.

    Source: jax.checkpoint_policies.save_anything_except_these_names.

    Example:
        >>> save_anything_except_these_names("scores")
        "save_anything_except_these_names('scores')"
    """
    return _with_names("save_anything_except_these_names", names)


def save_any_names_but_these(*names: str) -> str:
    """Keep the values that have a name, but not those with these names.

    Args:
        names: as `checkpoint_name` gave them.

    Returns:
        The policy.

    Raises:
        ShardError: a name that is no str.

    Source: jax.checkpoint_policies.save_any_names_but_these.

    Example:
        >>> save_any_names_but_these("scores")
        "save_any_names_but_these('scores')"
    """
    return _with_names("save_any_names_but_these", names)


def save_from_both_policies(one: str, other: str) -> str:
    """Keep what either of two policies keeps.

    Args:
        one: a policy.
        other: a policy.

    Returns:
        The policy.

    Raises:
        ShardError: one of them is none.

    Source: jax.checkpoint_policies.save_from_both_policies.

    Example:
        >>> save_from_both_policies(dots_saveable, save_only_these_names("h"))
        "save_from_both_policies(dots_saveable, save_only_these_names('h'))"
    """
    text = f"{policies.BOTH}({one}, {other})"
    policies.check("save_from_both_policies", text)
    return text


def _with_names(policy: str, names: tuple[str, ...]) -> str:
    text = f"{policy}({', '.join([repr(name) for name in names])})"
    policies.check(policy, text)
    return text
