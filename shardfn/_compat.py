"""The only file that touches private torch modules or asks for torch's version (2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the functional collective ops
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "DATA_DEPENDENT",
    "DYNAMIC_SHAPE",
    "FakeTensorMode",
    "capture_python",
    "constant_in_graph",
    "OpOverload",
    "core_decompositions",
    "dtensors",
    "dtensor_spec",
    "fake_store",
    "generated_code",
    "gone_spec",
    "inductor",
    "inside_transform",
    "is_unreduced",
    "is_tracing",
    "keep_in_graph",
    "paused_gc",
    "quiet",
    "register_group",
    "trace_artifact",
    "trace_aten",
    "unreduced_spec",
    "unwound",
]

DATA_DEPENDENT = DataDependentOutputException
DYNAMIC_SHAPE = DynamicOutputShapeException
is_tracing = torch.compiler.is_dynamo_compiling


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Tracing makes many objects that live on; collecting garbage among them is an eighth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging what an error of ours is about to say."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


@contextlib.contextmanager
def unwound() -> Iterator[None]:
    """Leave no torch.func level behind when a trace fails in the middle of one."""
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it asserts when the last level goes (torch 2.11)
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if depth == 0:
            functorch.set_inplace_requires_grad_allowed(False)
            autograd._saved_tensors_hooks_enable()
        raise


def inside_transform() -> bool:
    """Whether a torch.func transform is at work around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def keep_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo leave calls of this function whole."""
    return torch._dynamo.allow_in_graph(fn)


def constant_in_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo call this function of constants as it is, and take its result for a constant.

    What torch.compiler.assume_constant_result does, without importing torch._dynamo, which takes seconds (torch 2.11 to 2.15).
    """
    fn._dynamo_marked_constant = True
    return fn


def capture_python(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Dynamo's reading of a Python function: one graph, no break, no side effect replayed."""
    from torch._dynamo.convert_frame import fullgraph_capture
    from torch._dynamo.functional_export import create_fx_graph_from_captured_output
    from torch._dynamo.utils import get_metrics_context
    from torch._export.utils import _compiling_state_context

    # shapes stay numbers: Dynamo would make symbols of them once it has read two functions of different shapes
    wanted = {"replay_side_effects": False, "side_effect_replay_policy": "error", "automatic_dynamic_shapes": False}
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    with _compiling_state_context(), torch._dynamo.config.patch(known), get_metrics_context():
        out = fullgraph_capture(fn, args, {})
    return create_fx_graph_from_captured_output(out, fn, args, {})


def trace_aten(fn: Callable[..., Any], args: Sequence[Any], decompositions: dict[Any, Any]) -> torch.fx.GraphModule:
    """Flatten a function of fake tensors to one ATen graph whose nodes keep their source lines."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.fx.traceback.preserve_node_meta():
        return make_fx(fn, decomposition_table=decompositions, tracing_mode="real")(*args)


@functools.cache
def core_decompositions() -> dict[Any, Any]:
    """torch's decompositions into core ATen, and those of losses and batch norms, which core ATen keeps whole."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    aten = torch.ops.aten
    whole = (
        aten.nll_loss_forward, aten.nll_loss_backward, aten._log_softmax, aten._log_softmax_backward_data,
        aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training,
    )  # fmt: skip
    extra = {getattr(op, name): None for op in whole for name in op.overloads()}
    return {**core_aten_decompositions(), **{op: decomposition_table[op] for op in extra if op in decomposition_table}}


def fake_store() -> dist.Store:
    """The store of a process group that has no other processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Bind a name of ours, the same on every rank, to this rank's process group."""
    registry = torch._C._distributed_c10d
    try:
        if registry._resolve_process_group(name) == group:
            return
        registry._unregister_process_group(name)
    except RuntimeError:
        pass  # the name is free
    registry._register_process_group(name, group)


def dtensor_spec(mesh: Any, placements: tuple[Placement, ...], shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """DTensor's own record of a mesh, placements and global metadata."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), tuple(stride), dtype))


@functools.cache
def _unreduced_class() -> type:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    class UnreducedSpec(DTensorSpec):
        """Of a gradient that nobody has reduced yet; equal to none of a value that is pending for another reason."""

        def __eq__(self, other: object) -> bool:
            return type(other) is type(self) and super().__eq__(other)

        __hash__ = DTensorSpec.__hash__

    return UnreducedSpec


def unreduced_spec(spec: Any) -> Any:
    """The spec of a gradient that leaves a program before it is reduced."""
    return _unreduced_class()(spec.mesh, spec.placements, spec.tensor_meta)


def is_unreduced(spec: Any) -> bool:
    """Whether a spec is one of those."""
    return type(spec) is _unreduced_class()


def gone_spec(spec: Any) -> Any:
    """A spec like another that equals no spec: of a tensor that must not be mistaken for a live one."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    class GoneSpec(DTensorSpec):
        def __eq__(self, other: object) -> bool:
            return False

        def __hash__(self) -> int:
            return id(self)

    return GoneSpec(spec.mesh, spec.placements, spec.tensor_meta)


def dtensors(locals_: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[DTensor]:
    """Local tensors as DTensors, by the shortest way."""
    make = getattr(torch.Tensor, "_dtensor__new__", None)
    if make is None:
        return [DTensor(x, spec, requires_grad=False) for x, spec in zip(locals_, specs, strict=True)]
    return [make(DTensor, x, spec, requires_grad=False) for x, spec in zip(locals_, specs, strict=True)]


@contextlib.contextmanager
def _inductor_order() -> Iterator[None]:
    """Inductor's reordering for memory puts every reduction last; keep the order of the program (torch 2.11 to 2.13)."""
    from torch._inductor import config

    wanted = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    with config.patch({name: value for name, value in wanted.items() if hasattr(config, name)}):
        yield


def trace_artifact(name: str, text: str) -> None:
    """Put a text into torch's structured trace, which TORCH_TRACE turns on."""
    from torch._logging import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text)


def generated_code(runner: Any) -> str:
    """The Python text that Inductor made for what it returned; empty where it does not keep it."""
    return getattr(runner, "source_code", None) or ""


def _lower_pack(xs: Any) -> Any:
    """Inductor's code for `shardfn::pack`: what makes a tensor writes it into the flat buffer, where nothing else reads it.

    As Inductor's own ConcatKernel, which copies whatever has to be flattened first (torch 2.11 to 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    nodes: Any = V.graph.current_node.args[0]
    xs = [x if len(node.users) == 1 else clone(x) for x, node in zip(xs, nodes, strict=True)]
    device, dtype, counts = xs[0].get_device(), xs[0].get_dtype(), [node.meta["val"].numel() for node in nodes]
    whole = ir.ConcatKernel(name=None, layout=ir.FixedLayout(device, dtype, [sum(counts)], [1]), inputs=[])
    storage, offset = ir.StorageBox(whole), 0
    for x, count in zip(xs, counts, strict=True):
        size = list(x.get_size())
        layout = ir.FixedLayout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(size), offset)
        whole.inputs.append(ir.ConcatKernel.realize_into(x, ir.ReinterpretView(data=storage, layout=layout)))
        offset += count
    whole.name = V.graph.register_buffer(whole)
    whole.inputs = ir.ConcatKernel.unwrap_storage(whole.inputs)
    V.graph.register_operation(whole)
    return ir.TensorBox(storage)


@functools.cache
def _register_lowerings() -> None:
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.shardfn.pack.default, type_promotion_kind=None)(_lower_pack)


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], list[Any]]:
    """Compile an ATen graph with Inductor; the result takes a list of inputs, empties it, and returns a list.

    Args:
        graph: functional ATen, the inputs as placeholders.
        inputs: fake tensors like the inputs.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    _register_lowerings()
    mode = next(x.fake_mode for x in inputs if hasattr(x, "fake_mode"))
    with mode, tracing(TracingContext(mode)), V.set_fake_mode(mode), _inductor_order(), torch.no_grad():
        lowered = make_fx(torch.fx.Interpreter(graph).run, decomposition_table=select_decomp_table())(*inputs)
        joint_graph_passes(lowered)
        output = next(iter(reversed(lowered.graph.nodes)))
        tensors = [i for i, x in enumerate(output.args[0]) if isinstance(x, torch.fx.Node)]
        output.meta["user_visible_output_idxs"] = tensors
        record_original_output_strides(lowered)
        return compile_fx_inner(lowered, list(inputs), static_input_idxs=[], is_inference=True)
