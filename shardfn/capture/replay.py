"""Run what Dynamo read once more, now under make_fx: each node of its graph, noting what only this graph knows."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CaptureError, problem
from . import prims, sources
from .copying import copied
from .custom_ops import refuse_dropped

BACKWARD = ("_autograd_grad", "_vjp_grad")
CHECKPOINT = "tag_activation_checkpoint"  # how Dynamo calls torch.utils.checkpoint
CONTEXTS = "_checkpoint_context_fn"  # where it keeps a context_fn


class Replay(torch.fx.Interpreter):
    """Run Dynamo's graph, marking what the backward of a grad call makes, and which gradients belong together."""

    def run_node(self, node: torch.fx.Node) -> Any:
        if node.target is prims.align:
            node.meta["custom"] = {**node.meta.get("custom", {}), "gradients": node.name}
        if getattr(node.target, "__name__", None) in BACKWARD:
            node.meta["custom"] = {**node.meta.get("custom", {}), "phase": "backward"}
            outputs = self.fetch_args_kwargs_from_env(node)[0][0]
            inside = sources.place(node.meta["custom"])
            sources.follow_backward((x.grad_fn for x in outputs if isinstance(x, torch.Tensor)), inside)
        if node.op == "call_function":
            self.extra_traceback = False  # our own error says all there is to say
            refuse_dropped(node, self.fetch_args_kwargs_from_env(node)[0])
            self.extra_traceback = True
        return super().run_node(node)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "_name", None) == CHECKPOINT:
            self.extra_traceback = False
            called = _checkpointed(args[0])
            self.extra_traceback = True
            return Replay(called).run(*args[1:])
        return super().call_function(target, args, kwargs)


def _checkpointed(called: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """What torch.utils.checkpoint calls, its nodes noted as those of one call that keeps nothing.

    Raises:
        CaptureError: it says with a context_fn what to keep.
    """
    if called.meta.get(CONTEXTS) is not None:
        fix = "sf.checkpoint(fn, policy=...), with one of checkpoint_policies"
        source = next((line for n in called.graph.nodes if (line := sources.line_of(n.meta.get("stack_trace")))), None)
        text = problem("torch.utils.checkpoint", "it has a context_fn", needed="none", fix=fix, source=source)
        raise CaptureError(text, source=source, fix=fix)
    around = sources.regions(torch.fx.traceback.get_current_meta().get("custom") or {})
    noted = {**around, sources.fresh_region(): "nothing_saveable"}
    graph = copied(called.graph)
    for node in graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), **noted}
    return torch.fx.GraphModule(called, graph)
