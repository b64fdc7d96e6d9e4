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
from ..ops import higher_order, placement, shard_map
from ..types import CONSTANTS, TENSOR, Program, ShapeDtype
from . import annotations as sources
from .closure import closed_over
from .closure.reads import Reads, held_reads
from .control_flow import endings
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
    reads: Reads  # what the function has read that is not in its arguments
    strided: dict[int, bool] = attrs.field(
        factory=dict
    )  # the inputs whose memory as_strided reads: `strided.settle`

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
    for part in (placement, endings, shard_map):
        part.install()
    mode, handled = (
        _compat.fake_mode(),
        sys.exception(),
    )  # the user may be calling from an `except`
    user_fn, (fn, args, kwargs) = fn, _holding(fn, args, kwargs)
    leaves, treedef = _tree.flatten((args, kwargs))
    fakes = _fakes(mode, leaves, device, paths, name)
    tensor_paths = [
        p for p, x in zip(paths, fakes, strict=True) if isinstance(x, torch.Tensor)
    ]

    def call(args: Any, kwargs: Any) -> Any:
        named.begin()
        return fn(*args, **kwargs), torch.zeros(
            ()
        )  # Dynamo makes no graph of a function without any op (torch 2.13)

    try:
        tracing, watching, scope = (
            recording(name, decompositions.table(whole), mode),
            leaks.swept(),
            named.scope(mesh, device),
        )
        with (
            _torchs(mode),
            watching as watched,
            _compat.unwound(),
            tracing,
            scope as names,
        ):
            python, read = _compat.capture_python(
                call, _tree.unflatten(treedef, fakes)
            )
            watched.rewind()
            tensor_classes.refuse_made(python, name)
            varying.settle(python, name)
            graph, outside, out = _flatten(
                python, fakes, treedef, mode, (name, tensor_paths)
            )
    except ShardError:
        raise
    except Exception as error:
        if own := _own(error, handled):
            raise own from None
        raise explained(error, signature_of or user_fn, name, paths, fn) from error
    outside = outside.named({"": user_fn, **dict(zip(paths, leaves, strict=True))})
    mesh = names.mesh if names.uses_mesh else None
    return _captured(
        name, graph, tensor_paths, out, outside, mesh, _reads(fn, read, watched)
    )


def _captured(
    name: str,
    graph: torch.fx.GraphModule,
    tensor_paths: list[str],
    out: Any,
    outside: closed_over.ClosedOver,
    mesh: Any,
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
    return Captured(
        _program(name, graph, in_paths, out), outside, mesh, reads, memory
    )


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


def _holding(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], Any, Any]:
    """A function that holds those of its arguments that are objects, which Dynamo takes only
    where they are closed over.
    """
    odd = [i for i, x in enumerate(args) if _is_object(x)]
    named = {key: x for key, x in kwargs.items() if _is_object(x)}
    if not odd and not named:
        return fn, args, kwargs

    def held(*given: Any, **others: Any) -> Any:
        return fn(
            *[args[i] if i in odd else x for i, x in enumerate(given)],
            **{**others, **named},
        )

    return (
        held,
        tuple(None if i in odd else x for i, x in enumerate(args)),
        {**kwargs, **dict.fromkeys(named)},
    )


def _is_object(x: Any) -> bool:
    (leaf, *more), _ = _tree.flatten((x, None))
    return (
        leaf is x
        and len(more) == 1
        and not isinstance(x, (torch.Tensor, ShapeDtype, *CONSTANTS))
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


def _fakes(
    mode: _compat.FakeTensorMode,
    leaves: list[Any],
    device: str,
    paths: list[str],
    name: str,
) -> list[Any]:
    strides.refuse_unstrided(name, leaves, paths)
    return [_fake(mode, leaf, device) for leaf in leaves]


def _fake(mode: _compat.FakeTensorMode, leaf: Any, device: str) -> Any:
    if isinstance(leaf, ShapeDtype):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
        )


def _flatten(
    python: torch.fx.GraphModule,
    fakes: list[Any],
    treedef: Any,
    mode: _compat.FakeTensorMode,
    names: tuple[str, list[str]],
) -> tuple[torch.fx.GraphModule, closed_over.ClosedOver, Any]:
    """make_fx over Dynamo's graph: the ATen graph, the closed-over tensors, the result tree
    with TENSOR for tensors.
    """
    tensors = [x for x in fakes if isinstance(x, torch.Tensor)]
    positional = _tree.unflatten(treedef, fakes)
    codegen = python.graph._codegen
    outside = _entering(python, tensors, positional)
    result: list[Any] = []
    ends: set[int] = set()

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        mine = {
            id(x): v
            for x, v in zip((*tensors, *outside.tensors), values, strict=True)
        }
        traced = codegen.process_inputs(
            *_tree.tree_map(lambda x: mine.get(id(x), x), positional)
        )
        outputs = Replay(python).run(
            *(mine.get(id(x), x) for x in traced), enable_io_processing=False
        )
        out, _ = _compat.python_results(python, outputs)
        tensor_classes.refuse_results(out, names[0])
        result[:] = [
            _tree.tree_map(
                lambda x: TENSOR if isinstance(x, torch.Tensor) else x, out
            )
        ]
        results = [x for x in _tree.leaves(out) if isinstance(x, torch.Tensor)]
        ends.update(closed_over.reached_from(results))
        return results

    _refuse_closed_over(outside.tensors, names[0])
    stand_ins = [
        mode.from_tensor(x.detach()).requires_grad_(x.requires_grad)
        for x in outside.tensors
    ]
    graph = functional(flat, [*tensors, *stand_ins], *names)
    higher_order.fold(graph)
    constants = lifted_constants(graph, mode, names[0])
    tensor_classes.refuse_fakes([*outside.tensors, *constants], names[0])
    outside = outside.traced(stand_ins, ends, constants)
    return graph, outside, result[0]


def _entering(
    python: torch.fx.GraphModule, tensors: list[torch.Tensor], positional: Any
) -> closed_over.ClosedOver:
    """The tensors that Dynamo's graph takes and that are no arguments."""
    known = {id(x) for x in tensors}
    inputs = python.graph._codegen.process_inputs(*positional)
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
