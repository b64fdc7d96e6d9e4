"""Blocks of a program as functions of the code that Inductor writes, one for all calls."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .strides import WithRecordedStrides
from .tracing import call_copied

Bodies = Mapping[int, torch.fx.GraphModule]
_BODIES: contextvars.ContextVar[Bodies] = contextvars.ContextVar("shardfn_bodies")


@contextlib.contextmanager
def calling(bodies: Bodies) -> Iterator[None]:
    """Enter a context in which Inductor lowers calls of blocks.

    Args:
        bodies: the graphs of the blocks, by number, as `prepared` returns them.
    """
    token = _BODIES.set(bodies)
    try:
        yield
    finally:
        _BODIES.reset(token)


class WithCalls(WithRecordedStrides):
    """The interpreter of a program with calls of blocks, which enter a trace as they are."""

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.target is torch.ops.shardfn.call_block.default:
            return call_copied(n, self.fetch_args_kwargs_from_env(n)[0])
        return super().run_node(n)


def prepared(body: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Run the passes that Inductor runs on a whole program on the graph of a block, in place."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    view_to_reshape(body)
    compile_fx.fake_tensor_prop(body, list(inputs))
    compile_fx.record_original_output_strides(body)
    compile_fx._recursive_post_grad_passes(body, is_inference=True)
    return body


@functools.cache
def _call_class() -> Any:
    """Make the Inductor IR class of a call, once torch's IR is imported."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    class Result(ir.MultiOutput):
        """A result of a call."""

        shares: Sequence[str] = ()  # names of what has the same memory

        def get_inputs_that_alias_output(self) -> Sequence[str]:
            return self.shares

    class Call(ir.InvokeSubgraph):
        """A call of the function of a block, which writes to its last operands."""

        def __init__(self, subgraph: Any, operands: Sequence[Any], written: int) -> None:
            device = operands[0].get_device()
            super().__init__(subgraph, operands, ir.MultiOutputLayout(device=device))
            self.mutation_outputs = [
                ir.MutationOutput(ir.NoneLayout(device=device), x, self)
                for x in operands[len(operands) - written :]
            ]

        def results(self, outputs: Sequence[Any]) -> list[Any]:
            """Return the results of the call, with the strides that they have in the function of
            the block. A result may be a part of an operand, or of memory that it shares with
            another: no other value takes its memory.
            """
            operands = dict(zip(self.subgraph.graph.graph_inputs, self.inputs, strict=True))
            names = [x.get_name() for x in outputs]
            results = []
            for k, (x, name) in enumerate(zip(outputs, names, strict=True)):
                # it starts at its own first element
                layout = ir.FixedLayout(x.get_device(), x.get_dtype(), x.get_size(), x.get_stride())
                own = Result(layout, self, [(list, k)], skip_size_stride_alignment_checks=True)
                if name in operands:
                    own.shares = [operands[name].get_name()]
                elif names.count(name) > 1:
                    own.shares = [self.get_name()]
                results.append(own)
            return results

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and before the first one the function."""
            operands = [x.codegen_reference() for x in self.inputs]
            wrapper.codegen_subgraph(self.subgraph, operands, self.get_name())

        @classmethod
        def of(cls, number: int, operands: Sequence[Any], written: int, examples: Any) -> Any:
            """Lower a call, and the block if this is its first call."""
            from torch._inductor.lowering import constrain_to_fake_tensor

            graph, bodies = V.graph, _BODIES.get()
            name = f"block_{list(bodies).index(number)}"
            if name not in graph.seen_subgraphs:
                body = bodies[number]
                subgraph = ir.Subgraph(name=name, graph_module=body)
                subgraph.graph = graph.make_subgraph(body, examples, name)
                with V.set_graph_handler(subgraph.graph):
                    subgraph.graph.run(*examples)
                graph.seen_subgraphs[name] = subgraph
            subgraph = graph.seen_subgraphs[name]
            own = [
                constrain_to_fake_tensor(cls.realize_input(x), example)
                for x, example in zip(operands, examples, strict=True)
            ]
            call = cls(subgraph, own, written)
            call.outputs = call.results(subgraph.graph.graph_outputs)
            return call

    return Call


def lower_call(read: Sequence[Any], written: Sequence[Any], number: int) -> list[Any]:
    """Lower a call of a block."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    nodes: Any = V.graph.current_node.args
    examples = [node.meta["val"] for node in (*nodes[0], *nodes[1])]
    call = _call_class().of(number, [*read, *written], len(written), examples)
    return [ir.TensorBox.create(x) for x in call.outputs]
