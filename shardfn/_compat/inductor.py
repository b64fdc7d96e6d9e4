"""Compilation of an ATen graph by Inductor, and Inductor's lowerings of shardfn's own ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from . import by_kernels, decomposed
from .block_calls import calling, lower_call, prepared
from .compilations.modules import extend, know_numbers
from .patches import patched
from .tracing import OpOverload


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a named text to torch's structured trace, which TORCH_TRACE turns on. `text` is called
    only then.
    """
    from torch._logging._internal import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text)


def generated_code(runner: Any) -> str:
    """Return the source code of a function that Inductor compiled, or "" if Inductor did not keep
    it.
    """
    while not getattr(runner, "source_code", None) and hasattr(runner, "__wrapped__"):
        runner = runner.__wrapped__
    return getattr(runner, "source_code", None) or ""


def _lower_pack(xs: Any) -> Any:
    """Lower `shardfn::pack`: compute each tensor that nothing else reads directly into the flat
    buffer.

    Like Inductor's ConcatKernel, which however copies tensors that have to be flattened (torch
    2.11 to 2.13).
    """
    from torch._inductor import ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    nodes: Any = V.graph.current_node.args[0]
    xs = [x if len(node.users) == 1 else clone(x) for x, node in zip(xs, nodes, strict=True)]
    device = xs[0].get_device()
    dtype = xs[0].get_dtype()
    counts = [node.meta["val"].numel() for node in nodes]
    unit_stride: Any = [1]
    whole = ir.ConcatKernel(
        name=None, layout=ir.FixedLayout(device, dtype, [sum(counts)], unit_stride), inputs=[]
    )
    storage = ir.StorageBox(whole)
    offset: Any = 0  # Inductor takes ints for its expressions
    for x, count in zip(xs, counts, strict=True):
        size = list(x.get_size())
        layout = ir.FixedLayout(
            device, dtype, size, ir.FlexibleLayout.contiguous_strides(size), offset
        )
        whole.inputs.append(
            ir.ConcatKernel.realize_into(x, ir.ReinterpretView(data=storage, layout=layout))
        )
        offset += count
    whole.name = V.graph.register_buffer(whole)
    whole.inputs = ir.ConcatKernel.unwrap_storage(whole.inputs)
    V.graph.register_operation(whole)
    return ir.TensorBox(storage)


@functools.cache
def _after_class() -> Any:
    """Make the Inductor IR class of `shardfn::after`, once torch's IR is imported."""
    from torch._inductor import ir

    class After(ir.FallbackKernel):
        """A value by another name, after a second one in the order of the code: no op runs."""

        def codegen(self, wrapper: Any) -> None:
            inputs: list[Any] = list(self.inputs)
            x, token = (value.codegen_reference() for value in inputs)
            wrapper.writeline(f"{self.get_name()} = {x}  # after {token}")

    return After


def _lower_after(x: Any, token: Any) -> Any:
    """Lower `shardfn::after`, which orders a value after a token, to an assignment."""
    from torch._inductor import ir

    op = torch.ops.shardfn.after.default
    return ir.TensorBox.create(_after_class().create(op, x, token))


@functools.cache
def _lower_collective(op: Any) -> None:
    """Register the lowering of one of our collectives as a collective of Inductor's, so that the
    sent buffer stays unchanged until the wait.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lowered(x: Any, *constants: Any) -> Any:
        plain = [list(c) if isinstance(c, (list, tuple)) else c for c in constants]
        kernel = ir._CollectiveKernel.create_out_of_place(op, x, *plain)
        return ir.TensorBox.create(kernel)

    register_lowering(op, type_promotion_kind=None)(lowered)


class Loader:
    """A tensor argument of a formula: its sizes, and a function that loads one element."""

    def __init__(self, x: Any) -> None:
        self.sizes, self.at = [_number(n) for n in x.get_size()], x.make_loader()


def _number(n: Any) -> Any:
    """Convert a size of Inductor's to an int, unless it has free symbols."""
    return n if getattr(n, "free_symbols", None) else int(n)


def _expression(n: Any) -> Any:
    """Convert a SymInt to its sympy expression."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _operator(name: str) -> Callable[[Integer, Integer | int], Integer]:
    """Make an operator method of Integer from the name of an op of Inductor's."""

    def apply(left: Integer, right: Integer | int) -> Integer:
        from torch._inductor.virtualized import ops

        if isinstance(right, int):
            right = Integer(ops.constant(right, torch.int64))
        return Integer(getattr(ops, name)(left.value, right.value))

    return apply


class Integer:
    """An int64 in code that Inductor is writing, with the operators of a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    __add__ = __radd__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = __rmul__ = _operator("mul")
    __and__ = _operator("bitwise_and")
    __or__ = _operator("bitwise_or")
    __xor__ = __rxor__ = _operator("bitwise_xor")
    __lshift__ = _operator("bitwise_left_shift")
    __rshift__ = _operator("bitwise_right_shift")


_formulas: dict[Any, Callable[..., Any]] = {}


def lower_by_formula(op: OpOverload, formula: Callable[..., Any]) -> None:
    """Register a pointwise formula as Inductor's lowering of an op, fused into whatever reads the
    result.

    Args:
        op: one of ours; its result has the shape, dtype and device of its fake.
        formula: an element of the result, from (Inductor's operations, the place of the element,
            the arguments of the op); a tensor argument comes as a `Loader`.
    """
    _formulas[op] = formula


def _lower_formula(op: OpOverload, *args: Any) -> Any:
    """Lower an op to a pointwise kernel by its registered formula."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V, ops

    like = V.graph.current_node.meta["val"]
    arguments = [Loader(x) if isinstance(x, ir.TensorBox) else x for x in args]
    return ir.Pointwise.create(
        device=like.device,
        dtype=like.dtype,
        inner_fn=lambda place: _formulas[op](ops, place, *arguments),
        ranges=[_expression(n) for n in like.shape],
    )


_effects: list[OpOverload] = []


def keep_effects(op: OpOverload) -> None:
    """Mark an op of ours as having side effects: torch keeps calls whose results nothing reads, and
    Inductor keeps their order.

    Args:
        op: one that does more than compute its results.
    """
    torch.fx.node.has_side_effect(op)
    _effects.append(op)


@functools.cache
def _effect_class() -> Any:
    """Make the Inductor IR class of ops with side effects, once torch's IR is imported."""
    from torch._inductor import dependencies, ir
    from torch._inductor.virtualized import V

    class Effect(ir.FallbackKernel):
        """A call of torch's kernel, after the one before it in the order of the program."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            effects: dict[Any, Any] = V.graph.effectful_ops
            self.before = effects.get(Effect)
            effects[Effect] = self

        def get_read_writes(self) -> Any:
            both = super().get_read_writes()
            if self.before is not None:
                both.reads.add(dependencies.StarDep(self.before.get_name()))
            return both

        def has_side_effects(self) -> bool:
            return True

    return Effect


def _lower_effect(op: OpOverload, *args: Any) -> Any:
    """Lower an op with side effects to a call of its kernel, in program order."""
    from torch._inductor import ir

    plain = [list(x) if isinstance(x, (list, tuple)) else x for x in args]
    results = _effect_class().create(op, *plain)
    return [ir.TensorBox.create(x) for x in results] if isinstance(results, (list, tuple)) else None


@functools.cache
def _register_lowerings() -> None:
    """Register the lowerings of pack, after, and of all ops with side effects or formulas."""
    from torch._inductor.lowering import register_lowering

    register_lowering(torch.ops.shardfn.pack.default, type_promotion_kind=None)(_lower_pack)
    register_lowering(torch.ops.shardfn.after.default, type_promotion_kind=None)(_lower_after)
    register_lowering(torch.ops.shardfn.call_block.default, type_promotion_kind=None)(lower_call)
    for op in _effects:
        lower = functools.partial(_lower_effect, op)
        register_lowering(op, type_promotion_kind=None)(lower)
    for op in _formulas:
        lower = functools.partial(_lower_formula, op)
        register_lowering(op, type_promotion_kind=None)(lower)


def _run_by_kernels(graph: torch.fx.Graph) -> None:
    """Register torch's kernels as fallbacks for the ops of a graph that Inductor does not lower,
    such as interpolations, which torch.compile decomposes before their gradient.

    It would do so itself, but refuses where the environment has the variable CI, which GitHub
    sets (torch 2.13).
    """
    from torch._decomp import decomposition_table
    from torch._inductor.lowering import (
        FALLBACK_ALLOW_LIST,
        lowerings,
        make_fallback,
        tag_to_layout_constraint,
    )
    from torch._library.utils import get_layout_constraint_tag

    for node in graph.nodes:
        op = node.target
        if op not in decomposition_table or op in lowerings:
            continue
        if op.name().split(".")[0] not in FALLBACK_ALLOW_LIST:
            tag = get_layout_constraint_tag(op, with_default=True)
            constraint = tag_to_layout_constraint(tag)
            make_fallback(op, layout_constraint=constraint, warn=False)


@contextlib.contextmanager
def _faking(mode: Any) -> Iterator[None]:
    """Enter a fake tensor mode as Inductor expects it while it compiles."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with mode, tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
        yield


def _after_joint_passes(
    run: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """Trace a function with Inductor's decompositions, and run Inductor's joint-graph passes."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    lowered = make_fx(run, decomposition_table=decomposed.table())(*inputs)
    with patched("patterns"):
        joint_graph_passes(lowered)
    lowered.graph.eliminate_dead_code()
    return lowered


@attrs.frozen(eq=False)
class Source:
    """A function that Inductor compiles.

    Args:
        run: interprets a graph of functional ATen.
        inputs: fake tensors like its inputs. Sizes that are symbols stay such.
        finish: changes the graph when Inductor has simplified it, before it makes code of it.
    """

    run: Callable[..., Any]
    inputs: Sequence[torch.Tensor]
    finish: Callable[[torch.fx.GraphModule], Any]

    def lowered(self) -> torch.fx.GraphModule:
        """Trace the function and simplify its graph, up to where Inductor makes code of it."""
        from torch._inductor.compile_fx import record_original_output_strides

        module = _after_joint_passes(self.run, self.inputs)
        self.finish(module)
        by_kernels.mark(module.graph)
        _run_by_kernels(module.graph)
        output = next(iter(reversed(module.graph.nodes)))
        tensors = [i for i, x in enumerate(output.args[0]) if isinstance(x, torch.fx.Node)]
        output.meta["user_visible_output_idxs"] = tensors
        record_original_output_strides(module)
        return module


def inductor(
    program: Source,
    collectives: Sequence[Any],
    checked: Sequence[int] = (),
    blocks: Mapping[int, Source] | None = None,
    last: str = "",
) -> Callable[[list[Any]], list[Any]]:
    """Compile a program with Inductor. The result takes a list of inputs, empties it, and returns
    a list.

    Args:
        program: the program.
        collectives: the ops of ours that start one.
        checked: positions of inputs whose layout the caller checks, so that the code need not.
        blocks: the blocks that the program calls, by number.
        last: code at the end of the module that Inductor generates, if any.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode

    _register_lowerings()
    for op in collectives:
        _lower_collective(op)
    inputs = list(program.inputs)
    modes = [x.fake_mode for x in inputs if hasattr(x, "fake_mode")]
    mode = modes[0] if modes else FakeTensorMode()  # a program without inputs
    with _faking(mode), patched("compilation", checked=frozenset(checked)):
        lowered = program.lowered()
        bodies = {k: prepared(x.lowered(), x.inputs) for k, x in (blocks or {}).items()}
        with calling(bodies):
            compiled = compile_fx_inner(lowered, inputs, static_input_idxs=[], is_inference=True)
    if last:
        extend(compiled, last)
    know_numbers(compiled)
    return compiled
