"""Stage 1: read a Python function, with the transforms inside it, into one functional ATen
Program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from .. import _compat, _tree
from ..errors import CaptureError, ShardError, problem
from ..ops import higher_order, placement
from ..types import CONSTANTS, TENSOR, Program
from . import annotations as sources
from .closure import closed_over
from .closure.reads import Reads, held_reads
from .control_flow import endings
from .inputs import Inputs, holding
from .printing import program_text
from .refusals import leaks, tensor_classes
from .refusals.explain import explained
from .replay import Replay
from .rewrites import decompositions, python_calls, strides
from .rewrites.custom_op_gradients import differentiated
from .shard_map import axis_names as named
from .shard_map import varying
from .trace import functional, lifted_constants, recording, simplified


@attrs.frozen(eq=False, repr=False)
class Captured:
    """A Program and the tensors that the function closes over, which follow its arguments as
    inputs.
    """

    program: Program
    outside: closed_over.ClosedOver
    mesh: Any  # whose names and sizes the Program depends on; None for most
    own_mesh: Any  # that a transform inside names, and that a call's must equal; None for most
    brought_mesh: (
        Any  # of them, that of a shard_map, which a call without a mesh takes over
    )
    reads: Reads  # what the function has read that is not in its arguments
    strided: dict[
        int, bool
    ]  # inputs whose memory as_strided reads: `strided.settle`

    @property
    def closed_over(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the function closes over."""
        return self.outside.tensors


def capture(
    fn: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    paths: list[str],
    signature_of: Callable[..., Any] | None = None,
    device: str = "cpu",
    whole: frozenset[Any] = frozenset(),
    mesh: Any = None,
) -> Captured:
    """Capture a function on arguments like these.

    Args:
        fn: a pure function of pytrees.
        name: how errors and printed programs call it.
        args: its arguments; tensors and `ShapeDtype`s give only their shape, strides, dtype and
            device.
        kwargs: its keyword arguments.
        paths: the path of each leaf of (args, kwargs).
        signature_of: the user's own function, whose line errors fall back on.
        device: where `ShapeDtype`s live.
        whole: ops that are not taken apart.
        mesh: of the call, which a shard_map inside may ask for.

    Returns:
        The Program and the closed-over tensors.

    Raises:
        CaptureError: the function is not one pure graph; says where and what to do.
    """
    for part in (placement, endings):
        part.install()
    mode = _compat.fake_mode()
    handled = sys.exception()  # the user may be calling from an `except`
    user_fn, (fn, args, kwargs) = fn, holding(fn, args, kwargs)
    inputs = Inputs.like(args, kwargs, paths, device, mode, name)
    try:
        graph, outside, out, names, reads = _read(
            fn, inputs, mode, decompositions.table(whole), named.scope(mesh, device)
        )
    except ShardError:
        raise
    except Exception as error:
        if own := _own(error, handled):
            raise own from None
        raise explained(error, signature_of or user_fn, name, paths, fn) from error
    arguments = dict(zip(paths, inputs.leaves, strict=True))
    outside = outside.named({"": user_fn, **arguments})
    return _captured(name, graph, inputs.tensor_paths, out, outside, names, reads)


def _read(
    fn: Callable[..., Any],
    inputs: Inputs,
    mode: _compat.FakeTensorMode,
    table: Any,
    scope: Any,
) -> tuple[torch.fx.GraphModule, closed_over.ClosedOver, Any, named.Scope, Reads]:
    """Have Dynamo read a function, and flatten what it has read.

    Returns:
        (the ATen graph, the tensors that the function closes over, the tree of results, the
        scope with the meshes that it names, what else the function has read).
    """

    def call(args: Any, kwargs: Any) -> Any:
        named.begin()
        # Dynamo makes no graph of a function without any op (torch 2.13)
        return fn(*args, **kwargs), torch.zeros(())

    name = inputs.name
    tracing, watching = recording(name, table, mode), leaks.swept()
    with (
        _torchs(mode),
        watching as watched,
        _compat.unwound(),
        tracing,
        scope as names,
    ):
        python, read = _compat.capture_python(call, inputs.positional)
        watched.rewind()
        tensor_classes.refuse_made(python, name)
        varying.settle(python, name)
        graph, outside, out = _flatten(python, inputs, mode)
    return graph, outside, out, names, _reads(fn, read, watched)


def _captured(
    name: str,
    graph: torch.fx.GraphModule,
    tensor_paths: list[str],
    out: Any,
    outside: closed_over.ClosedOver,
    names: named.Scope,
    reads: Reads,
) -> Captured:
    """The record of a graph that has been read."""
    sources.attach(graph)
    in_paths = (
        *tensor_paths,
        *(f"<closed over {i}>" for i in range(len(outside.tensors))),
    )
    memory = strides.settled(graph, name, in_paths, list(outside.tensors))
    graph = torch.fx.GraphModule(graph, simplified(graph.graph))
    program, meshes = _program(name, graph, in_paths, out), names.meshes
    return Captured(program, outside, *meshes, reads, memory)


def _reads(
    fn: Callable[..., Any], read: Iterable[_compat.Read], watched: leaks.Watched
) -> Reads:
    """What Dynamo has read, and what modules hold that it leaves whole."""
    return Reads(
        fn, (*read, *held_reads(held for _, held in watched.functions.values()))
    )


@contextlib.contextmanager
def _torchs(mode: _compat.FakeTensorMode) -> Iterator[None]:
    """Torch as it has to be for a capture."""
    with (
        _compat.staging(),  # first: what follows is of the process
        mode,
        _compat.paused_gc(),
        _compat.patched(
            "capture", substitutes=python_calls.TABLE, custom_ops=differentiated()
        ),
    ):
        yield


def _program(
    name: str, graph: torch.fx.GraphModule, in_paths: tuple[str, ...], out: Any
) -> Program:
    out_leaves, out_tree = _tree.flatten(out)
    _refuse_results(out_leaves, _tree.paths(out), name)
    return Program(
        name=name,
        graph=graph,
        in_paths=in_paths,
        out_paths=tuple(
            "result" + p
            for p, x in zip(_tree.paths(out), out_leaves, strict=True)
            if x is TENSOR
        ),
        out_leaves=tuple(out_leaves),
        out_tree=out_tree,
        show=program_text,
    )


def _own(
    error: BaseException | None, handled: BaseException | None
) -> ShardError | None:
    """The error of ours behind one that Dynamo made of it; not one that was handled before."""
    while (
        error is not None
        and error is not handled
        and not isinstance(error, ShardError)
    ):
        error = error.__cause__ or error.__context__
    return None if error is handled else error


def _refuse_results(leaves: list[Any], paths: list[str], name: str) -> None:
    wrong = [
        (p, x)
        for p, x in zip(paths, leaves, strict=True)
        if (x is not TENSOR and not isinstance(x, CONSTANTS)) or _untold(x)
    ]
    if wrong:
        fix = "return tensors and constants; make a class of yours a NamedTuple or a dict"
        lines = [f"result{path} is a {type(x).__name__}" for path, x in wrong]
        text = problem(
            name, *lines, needed="a tree of tensors and constants", fix=fix
        )
        raise CaptureError(text, arg_path="result" + wrong[0][0], fix=fix)


def _untold(x: Any) -> bool:
    """Whether it is str(mesh), which Dynamo takes of a stand-in of the mesh (torch 2.13);
    f"{mesh}" is right.
    """
    return isinstance(x, str) and "FakeScriptObject object at" in x


def _refuse_closed_over(tensors: Sequence[torch.Tensor], name: str) -> None:
    if any(isinstance(x, leaks.LeakedTensor) for x in tensors):
        raise leaks.leaked(f"{name}, a tensor that it closes over")
    wrong = [
        x for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)
    ]
    if wrong:
        fix = "pass it as an argument, which carries its placement"
        raise CaptureError(
            problem(
                name,
                f"it closes over a {type(wrong[0]).__name__}",
                needed="plain tensors",
                fix=fix,
            ),
            fix=fix,
        )


def _flatten(
    python: torch.fx.GraphModule, inputs: Inputs, mode: _compat.FakeTensorMode
) -> tuple[torch.fx.GraphModule, closed_over.ClosedOver, Any]:
    """make_fx over Dynamo's graph: the ATen graph, the closed-over tensors, the result tree
    with TENSOR for tensors.
    """
    name, tensors = inputs.name, inputs.tensors
    positional = inputs.positional
    outside = _entering(python, tensors, positional)
    results: list[Any] = []
    ends: set[int] = set()

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip((*tensors, *outside.tensors), values, strict=True)
        out = _replayed(python, positional, {id(x): v for x, v in pairs})
        tensor_classes.refuse_results(out, name)
        results[:] = [_tree.tree_map(_mark_tensor, out)]
        leaves = list(filter(_tree.is_tensor, _tree.leaves(out)))
        ends.update(closed_over.reached_from(leaves))
        return leaves

    _refuse_closed_over(outside.tensors, name)
    stand_ins = [_stand_in(x, mode) for x in outside.tensors]
    graph = functional(flat, [*tensors, *stand_ins], name, inputs.tensor_paths)
    higher_order.fold(graph)
    constants = lifted_constants(graph, mode, name)
    tensor_classes.refuse_fakes([*outside.tensors, *constants], name)
    return graph, outside.traced(stand_ins, ends, constants), results[0]


def _replayed(
    python: torch.fx.GraphModule, positional: Any, values: dict[int, torch.Tensor]
) -> Any:
    """What Dynamo's graph returns, with values for the tensors of these ids."""
    arguments = _tree.tree_map(lambda x: values.get(id(x), x), positional)
    entering = _compat.codegen_of(python.graph).process_inputs(*arguments)
    outputs = Replay(python).run(
        *(values.get(id(x), x) for x in entering), enable_io_processing=False
    )
    out, _ = _compat.python_results(python, outputs)
    return out


def _stand_in(x: torch.Tensor, mode: _compat.FakeTensorMode) -> torch.Tensor:
    """A fake tensor like one that is closed over."""
    return mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)


def _mark_tensor(x: Any) -> Any:
    """TENSOR for a tensor."""
    return TENSOR if isinstance(x, torch.Tensor) else x


def _entering(
    python: torch.fx.GraphModule, tensors: list[torch.Tensor], positional: Any
) -> closed_over.ClosedOver:
    """The tensors that Dynamo's graph takes and that are no arguments."""
    known = {id(x) for x in tensors}
    inputs = _compat.codegen_of(python.graph).process_inputs(*positional)
    # what is made of an argument, as x.T is, is an input of Dynamo's graph too, and a fake tensor
    rows = zip(inputs, python.graph.find_nodes(op="placeholder"), strict=True)
    mine = [
        (x, node)
        for x, node in rows
        if isinstance(x, torch.Tensor)
        and id(x) not in known
        and not _compat.is_fake(x)
    ]
    lines = tuple(
        next(
            filter(
                None, (sources.line_of(u.meta.get("stack_trace")) for u in n.users)
            ),
            None,
        )
        for _, n in mine
    )
    return closed_over.ClosedOver(tuple(x for x, _ in mine), lines=lines)
