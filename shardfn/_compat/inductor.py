"""Inductor: the order of the program kept, and the lowerings of our own ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .patches import patched


def trace_artifact(name: str, text: str) -> None:
    """Put a text into torch's structured trace, which TORCH_TRACE turns on."""
    from torch._logging import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured(
        "artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text
    )


def generated_code(runner: Any) -> str:
    """The Python text that Inductor made for what it returned; empty where it does not keep it."""
    return getattr(runner, "source_code", None) or ""


def _lower_pack(xs: Any) -> Any:
    """Inductor's code for `shardfn::pack`: what makes a tensor writes it into the flat buffer,
    where nothing else reads it.

    As Inductor's own ConcatKernel, which copies whatever has to be flattened first (torch 2.11
    to 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    nodes: Any = V.graph.current_node.args[0]
    xs = [
        x if len(node.users) == 1 else clone(x)
        for x, node in zip(xs, nodes, strict=True)
    ]
    device, dtype, counts = (
        xs[0].get_device(),
        xs[0].get_dtype(),
        [node.meta["val"].numel() for node in nodes],
    )
    whole = ir.ConcatKernel(
        name=None,
        layout=ir.FixedLayout(device, dtype, [sum(counts)], [1]),
        inputs=[],
    )
    storage, offset = ir.StorageBox(whole), 0
    for x, count in zip(xs, counts, strict=True):
        size = list(x.get_size())
        layout = ir.FixedLayout(
            device, dtype, size, ir.FlexibleLayout.contiguous_strides(size), offset
        )
        whole.inputs.append(
            ir.ConcatKernel.realize_into(
                x, ir.ReinterpretView(data=storage, layout=layout)
            )
        )
        offset += count
    whole.name = V.graph.register_buffer(whole)
    whole.inputs = ir.ConcatKernel.unwrap_storage(whole.inputs)
    V.graph.register_operation(whole)
    return ir.TensorBox(storage)


@functools.cache
def _lower_collective(op: Any) -> None:
    """Have Inductor's code start a collective of ours as it starts its own, so that what is sent
    stays as it is until the wait.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lowered(x: Any, *constants: Any) -> Any:
        plain = [list(c) if isinstance(c, (list, tuple)) else c for c in constants]
        kernel = ir._CollectiveKernel.create_out_of_place(op, x, *plain)
        return ir.TensorBox.create(kernel)

    register_lowering(op, type_promotion_kind=None)(lowered)


@functools.cache
def _register_pack() -> None:
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.shardfn.pack.default, type_promotion_kind=None)(
        _lower_pack
    )


def inductor(
    graph: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    finish: Callable[[torch.fx.GraphModule], Any],
    collectives: Sequence[Any],
) -> Callable[[list[Any]], list[Any]]:
    """Compile an ATen graph with Inductor; the result takes a list of inputs, empties it, and
    returns a list.

    Args:
        graph: functional ATen, the inputs as placeholders.
        inputs: fake tensors like the inputs.
        finish: changes the graph when Inductor has simplified it, before it makes code of it.
        collectives: the ops of ours that start one.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import (
        compile_fx_inner,
        record_original_output_strides,
    )
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    _register_pack()
    for op in collectives:
        _lower_collective(op)
    mode = next(x.fake_mode for x in inputs if hasattr(x, "fake_mode"))
    with (
        mode,
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        patched("compilation"),
        torch.no_grad(),
    ):
        lowered = make_fx(
            torch.fx.Interpreter(graph).run,
            decomposition_table=select_decomp_table(),
        )(*inputs)
        joint_graph_passes(lowered)
        finish(lowered)
        output = next(iter(reversed(lowered.graph.nodes)))
        tensors = [
            i for i, x in enumerate(output.args[0]) if isinstance(x, torch.fx.Node)
        ]
        output.meta["user_visible_output_idxs"] = tensors
        record_original_output_strides(lowered)
        return compile_fx_inner(
            lowered, list(inputs), static_input_idxs=[], is_inference=True
        )
