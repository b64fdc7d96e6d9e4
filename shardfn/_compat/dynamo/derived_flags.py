"""Whether a tensor that a captured function computes requires grad.

Fake arguments do not require grad: torch.func follows them where a call needs gradients. The flag
of a computed tensor depends on the ops and the modes before it. Autograd itself answers, by a
replay of Dynamo's graph on fake tensors that require grad where the arguments do.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ShardError
from ..tracing import inside_transform, is_fake
from .argument_facts import ENABLED, Argument, argument_of
from .refused import refuse

FLAGS = ("requires_grad", "is_leaf")
READS_FLAG = "the function reads requires_grad of a computed tensor;"


class Replayed:
    """The values of a part of Dynamo's graph, on fake tensors that require grad as the arguments
    of the call do.
    """

    def __init__(self, output: Any, is_enabled: bool) -> None:
        self.graph, self.output = output.graph, output
        self.is_enabled = is_enabled  # after the last node that has run
        self.values: dict[torch.fx.Node, Any] = {}

    def value(self, node: torch.fx.Node) -> Any:
        """Run the graph up to a node, and return its value."""
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(self.is_enabled)
            with self.output.fake_mode:
                for each in self.graph.nodes:
                    if each not in self.values:
                        self.values[each] = self._run(each)
                    if each is node:
                        break
            self.is_enabled = torch.is_grad_enabled()
        finally:
            torch._C._set_grad_enabled(before)
        return self.values[node]

    def _run(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            return _input(node.meta["example_value"])
        if node.op == "get_attr":
            return self.output.get_submodule(str(node.target))
        if node.target is torch.autograd.grad_mode._enter_inference_mode:
            raise NotImplementedError("views of fake tensors are not tracked in inference mode")
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _input(value: Any) -> Any:
    """Return a tensor like an input of the graph, with the flag of the argument or of the tensor
    that the function closes over.
    """
    if not is_fake(value):
        return value
    argument = argument_of(value)
    like = value if argument is None else argument.ask("requires_grad")
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return new.requires_grad_(like is not None and like.requires_grad)


def answer_derived(tensor: Any, tx: Any, name: Any) -> Any:
    """Return a flag of a computed tensor in eager torch; NotImplemented where Dynamo's answer is
    right: no argument requires grad, or torch.func follows those that do.

    Stops Dynamo where the ops before it cannot be replayed.
    """
    node, graph = tensor.proxy.node, tx.output.graph
    is_body = node.graph is not graph or tx.output.current_tracer.parent is not None
    if name not in FLAGS or is_body or inside_transform():
        return NotImplemented
    arguments = _arguments(graph)
    asked = [argument.ask("requires_grad") for argument in arguments]
    for argument in arguments:
        argument.ask(ENABLED)
    if not any(x is not None and x.requires_grad for x in asked):
        return NotImplemented
    record = arguments[0].asked
    if record.replayed is None or record.replayed.graph is not graph:
        record.replayed = Replayed(tx.output, record.is_grad_enabled)
    try:
        return getattr(record.replayed.value(node), name)
    except ShardError:
        raise
    except Exception:
        record.replayed = None
        refuse(READS_FLAG)
        return NotImplemented


def _arguments(graph: torch.fx.Graph) -> list[Argument]:
    """Return the arguments among the inputs of a graph."""
    holders = graph.find_nodes(op="placeholder")
    found = [argument_of(node.meta.get("example_value")) for node in holders]
    return [argument for argument in found if argument is not None]
