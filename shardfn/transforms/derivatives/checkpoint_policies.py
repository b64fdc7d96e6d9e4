"""Policies for `checkpoint`, under JAX's names: which residuals a checkpointed call saves.

A policy is a str. Values that are not saved are recomputed.

- `everything_saveable` saves all residuals, as without `checkpoint`.
- `nothing_saveable` saves the inputs only.
- `dots_saveable` saves the results of matrix products, attention and convolutions.
- `dots_with_no_batch_dims_saveable` saves those of products without batch dims.

Example:
    >>> import torch, shardfn as sf
    >>> f = lambda w, x: torch.tanh(torch.sin(x @ w)).sum()
    >>> w, x = torch.ones(3, 3), torch.ones(2, 3)
    >>> for policy in (everything_saveable, nothing_saveable, dots_saveable):
    ...     print(policy, len(sf.saved_residuals(sf.checkpoint(f, policy=policy), w, x)))
    everything_saveable 4
    nothing_saveable 2
    dots_saveable 3
"""

from __future__ import annotations

from ...capture.checkpoint import policies

everything_saveable = "everything_saveable"
nothing_saveable = "nothing_saveable"
dots_saveable = checkpoint_dots = "dots_saveable"
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = (
    "dots_with_no_batch_dims_saveable"
)


def save_only_these_names(*names: str) -> str:
    """Save only the residuals with the given names.

    Args:
        names: the names that `checkpoint_name` gave to values.

    Returns:
        The policy.

    Raises:
        ShardError: a name is not a str.

    Source: jax.checkpoint_policies.save_only_these_names.

    Example:
        >>> save_only_these_names("q", "k")
        "save_only_these_names('q', 'k')"
    """
    return _with_names("save_only_these_names", names)


def save_anything_except_these_names(*names: str) -> str:
    """Save all residuals, with or without a name, except those with the given names.

    Args:
        names: the names that `checkpoint_name` gave to values.

    Returns:
        The policy.

    Raises:
        ShardError: a name is not a str.

    Source: jax.checkpoint_policies.save_anything_except_these_names.

    Example:
        >>> save_anything_except_these_names("scores")
        "save_anything_except_these_names('scores')"
    """
    return _with_names("save_anything_except_these_names", names)


def save_any_names_but_these(*names: str) -> str:
    """Save all residuals that have a name, except those with the given names.

    Args:
        names: the names that `checkpoint_name` gave to values.

    Returns:
        The policy.

    Raises:
        ShardError: a name is not a str.

    Source: jax.checkpoint_policies.save_any_names_but_these.

    Example:
        >>> save_any_names_but_these("scores")
        "save_any_names_but_these('scores')"
    """
    return _with_names("save_any_names_but_these", names)


def save_from_both_policies(one: str, other: str) -> str:
    """Save the residuals that at least one of two policies saves.

    Args:
        one: a policy.
        other: a policy.

    Returns:
        The policy.

    Raises:
        ShardError: one of the arguments is not a policy.

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
