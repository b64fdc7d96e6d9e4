"""checkpoint: a function whose backward recomputes intermediate values instead of saving them.

Dynamo reads this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
from torch.utils.checkpoint import checkpoint_sequential, noop_context_fn

from ... import _compat, _tree
from ...capture import annotations as sources
from ...capture.checkpoint import policies, torch_policies
from ...capture.dtensors import replaced_calls
from ...errors import CaptureError, TreeError
from ...ops import placement
from .._options import check_function
from .._transformed import Transformed
from .checkpoint_policies import nothing_saveable


@attrs.define(eq=False, repr=False, slots=False)
class Checkpoint(Transformed):
    """A function under `checkpoint`."""

    verb: ClassVar[str] = "checkpoint"
    held: tuple[Callable[..., Any]]
    policy: str

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and annotate its ops as one checkpointed call with this policy."""
        with sources.annotate_checkpointed(sources.fresh_region(), self.policy):
            return self.fn(*args, **kwargs)

    def options(self) -> Any:
        return self.policy


def checkpoint(fn: Callable[..., Any] | None = None, *, policy: str | None = None) -> Any:
    """Rematerialize a function: the backward recomputes residuals instead of saving them.

    `checkpoint` does not change the values that the function returns. The backward repeats the
    all-gathers of the function's forward, but not its random draws, because random numbers are
    saved. If no gradient is computed, `checkpoint` has no effect. For second derivatives, the
    results of the first backward are saved.

    Args:
        fn: a pure function of pytrees. Without fn, `checkpoint` returns a decorator.
        policy: one of `checkpoint_policies`, which chooses the residuals that are saved in addition
            to the arguments. By default, `checkpoint` saves only the arguments of fn.

    Returns:
        A function with the same arguments and results as fn.

    Raises:
        ShardError: the policy is unknown.
        TreeError: fn is not a function.

    Source: jax.checkpoint; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost",
    arXiv:1604.06174.

    Example:
        >>> import torch, shardfn as sf
        >>> layer = sf.checkpoint(lambda x: x.sin().sin())
        >>> sf.grad(lambda x: layer(x).sum())(torch.zeros(2))
        tensor([1., 1.])
    """
    text = nothing_saveable if policy is None else policy
    check_text("checkpoint, policy", isinstance(text, str), type(text).__name__, POLICY)
    policies.check("checkpoint, policy", text)
    if fn is None:
        return functools.partial(checkpoint, policy=text)
    check_function("checkpoint", fn, ", policy=...")
    return Checkpoint((fn,), text)


@_compat.read_by_dynamo
def of_torch(
    function: Callable[..., Any],
    *args: Any,
    context_fn: Any = noop_context_fn,
    use_reentrant: Any = None,
    preserve_rng_state: Any = True,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = True,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint: a call of `checkpoint` that saves nothing, or what its context_fn
    says. Its other options say how eager torch computes the same.
    """
    policy = nothing_saveable
    if context_fn is not noop_context_fn:
        policy = torch_policies.text_of(context_fn)
    with sources.annotate_checkpointed(sources.fresh_region(), policy):
        return function(*args, **kwargs)


@_compat.read_by_dynamo
def sequential_of_torch(
    functions: Any,
    segments: int,
    input: Any,
    use_reentrant: Any = None,
    *,
    preserve_rng_state: Any = True,
) -> Any:
    """torch.utils.checkpoint.checkpoint_sequential: each segment but the last is a call of
    `checkpoint` that saves nothing.
    """
    is_module = isinstance(functions, torch.nn.Sequential)
    steps = list(functions.children()) if is_module else list(functions)
    check_segments(segments, len(steps))
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        with sources.annotate_checkpointed(sources.fresh_region(), nothing_saveable):
            for step in steps[start : start + size]:
                input = step(input)
    for step in steps[last:]:
        input = step(input)
    return input


@_compat.constant_in_graph
def check_segments(segments: Any, count: int) -> None:
    """Check the number of segments of so many functions.

    Raises:
        CaptureError: a segment would have no function.
    """
    if isinstance(segments, int) and 1 <= segments <= count:
        return
    raise CaptureError.of(
        "torch.utils.checkpoint.checkpoint_sequential, segments",
        f"segments is {segments!r} for {count} functions",
        needed="at least one function in each segment",
        fix="segments=1, or at most as many segments as functions",
    )


replaced_calls.FUNCTIONS.update(
    {
        torch.ops.higher_order.tag_activation_checkpoint: of_torch,
        checkpoint_sequential: sequential_of_torch,
    }
)
POLICY = "one of checkpoint_policies, such as dots_saveable"


@_compat.constant_in_graph
def check_text(where: str, is_text: bool, kind: str, fix: str) -> None:
    """Check that an option is a str.

    Raises:
        TreeError: it is not.
    """
    if not is_text:
        raise TreeError.of(where, f"a {kind}", needed="a str", fix=fix)


def checkpoint_name(x: Any, name: str) -> Any:
    """Name a value for the policies of `checkpoint` and for `saved_residuals`. `checkpoint_name`
    does not change the value of x.

    Args:
        x: a tensor, or a pytree of tensors.
        name: the name, which several values may share.

    Returns:
        x.

    Raises:
        TreeError: the name is not a str.

    Source: jax.ad_checkpoint.checkpoint_name.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.checkpoint_name(torch.ones(2), "h")
        tensor([1., 1.])
    """
    check_text(
        "checkpoint_name, name",
        isinstance(name, str),
        type(name).__name__,
        "checkpoint_name(x, 'h')",
    )
    if not _compat.is_tracing():
        return x
    return _tree.refill(
        (x,),
        iter(
            [
                placement.name_value(v, name) if isinstance(v, torch.Tensor) else v
                for v in _tree.quick_leaves((x,))
            ]
        ),
    )[0]
