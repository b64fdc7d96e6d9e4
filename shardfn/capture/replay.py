"""Run what Dynamo read once more, now under make_fx: each node of its graph, noting what only this graph knows."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..errors import ShardError
from . import prims, sources
from .custom_ops import refuse_dropped

BACKWARD = ("_autograd_grad", "_vjp_grad")
CHECKPOINT = "tag_activation_checkpoint"  # how Dynamo calls torch.utils.checkpoint
NOT_RECOMPUTED = "torch.utils.checkpoint is computed and not recomputed: values are right, and no memory is saved"


class Replay(torch.fx.Interpreter):
    """Run Dynamo's graph, marking what the backward of a grad call makes, and which gradients belong together."""

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.target is prims.align:
            node.meta["custom"] = {**node.meta.get("custom", {}), "gradients": node.name}
        if getattr(node.target, "__name__", None) in BACKWARD:
            node.meta["custom"] = {**node.meta.get("custom", {}), "phase": "backward"}
            outputs = self.fetch_args_kwargs_from_env(node)[0][0]
            sources.follow_backward(x.grad_fn for x in outputs if isinstance(x, torch.Tensor))
        if node.op == "call_function":
            self.extra_traceback = False  # our own error says all there is to say
            refuse_dropped(node, self.fetch_args_kwargs_from_env(node)[0])
            self.extra_traceback = True
        try:
            return super().run_node(node)
        except ShardError:
            self.extra_traceback = False
            raise

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "_name", None) == CHECKPOINT:
            warnings.warn(NOT_RECOMPUTED, stacklevel=2)
            return Replay(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)
