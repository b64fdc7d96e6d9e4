"""Hooks on parameters, as an identity function whose derivative calls the hooks. Works under
every torch.func transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError

Hook = Callable[[torch.Tensor], Any]  # a gradient -> None, or another gradient


def hooks_of(where: str, path: str, x: torch.Tensor) -> tuple[Hook, ...]:
    """The gradient hooks of a parameter that requires grad. On other tensors hooks never fire.

    Raises:
        CaptureError: a hook that takes anything else than the gradient of one tensor.
    """
    if not x.requires_grad:
        return ()
    hooks = tuple((_compat.backward_hooks_of(x) or {}).values())
    after = getattr(x, "_post_accumulate_grad_hooks", None)
    several = any(map(_is_of_several, hooks))
    if after or several:
        kind = "a post-accumulate-grad hook" if after else "a hook of several tensors"
        raise CaptureError.of(
            f"{where}, parameter {path}",
            f"the parameter has {kind}, which needs an accumulated .grad, but a pure function "
            "has no .grad",
            needed="hooks that take a single gradient",
            fix="p.register_hook(fn), or apply the hook to the gradients that sf.grad returns",
            arg_path=path,
        )
    return hooks


def _is_of_several(hook: Any) -> bool:
    """Whether a hook belongs to torch.autograd.graph.register_multi_grad_hook."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


def hooked_parameter(x: torch.Tensor, hooks: Sequence[Hook], known: dict[Any, Any]) -> torch.Tensor:
    """The value of a parameter, passed through an identity whose backward calls the hooks. The
    hooks take its gradient, and may replace it.

    Args:
        x: the value.
        hooks: in the order in which they fire.
        known: the hooked values of one capture. Calls with the same value share a gradient:
            hooks take the sum, once.
    """
    key = id(x), tuple(map(id, hooks)), torch.is_grad_enabled()
    if key in known:
        return known[key][1]
    out = _Hooked.apply(tuple(hooks), x)
    if _compat.level_of(out) == _compat.level_of(
        x
    ):  # otherwise it belongs to a transform that ends before that of x
        known[key] = x, out
    return out


class _Hooked(torch.autograd.Function):
    """The identity on a parameter, whose backward calls its hooks."""

    @staticmethod
    def forward(hooks: tuple[Hook, ...], x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        for hook in ctx.hooks:
            replaced = hook(g)
            if replaced is not None and (
                not isinstance(replaced, torch.Tensor) or replaced.shape != g.shape
            ):
                got = (
                    tuple(replaced.shape)
                    if isinstance(replaced, torch.Tensor)
                    else type(replaced).__name__
                )
                raise RuntimeError(
                    f"a hook on a parameter returned {got} for a gradient of shape {tuple(g.shape)}"
                )
            g = g if replaced is None else replaced
        return None, g

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: Any, hooks: tuple[Hook, ...], x: torch.Tensor) -> Any:
        return _Hooked.apply(tuple(map(_hook_of_batch, hooks)), x.movedim(in_dims[1], 0)), 0


def _hook_of_batch(hook: Hook) -> Hook:
    """A hook on one sample's gradient as a hook on the gradient of a batch."""

    def one(g: torch.Tensor) -> Any:
        found = hook(g)
        return g if found is None else found

    return torch.func.vmap(one)
