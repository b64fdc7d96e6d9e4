"""Stage 1: read a Python function, with the transforms inside it, into one functional ATen Program."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import torch

from .. import _compat, _tree
from ..errors import CaptureError, ShardError, problem
from ..types import TENSOR, Program, ShapeDtype
from . import decompositions, prims, sources
from .printing import program_text

BACKWARD = ("_autograd_grad", "_vjp_grad")


@attrs.frozen(eq=False)
class Captured:
    """A Program and the tensors that the function closes over, which follow its arguments as inputs."""

    program: Program
    closed_over: tuple[torch.Tensor, ...]


def capture(fn: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], paths: list[str]) -> Captured:
    """Capture a function on arguments like these.

    Args:
        fn: a pure function of pytrees.
        name: how errors and printed programs call it.
        args: its arguments; tensors and `ShapeDtype`s give only their shape, strides, dtype and device.
        kwargs: its keyword arguments.
        paths: the path of each leaf of (args, kwargs).

    Returns:
        The Program and the closed-over tensors.

    Raises:
        CaptureError: the function is not one pure graph; says where and what to do.
    """
    prims.install()
    mode = _compat.FakeTensorMode(allow_non_fake_inputs=True)
    leaves, treedef = _tree.flatten((args, kwargs))
    fakes = [_fake(mode, leaf) for leaf in leaves]

    def call(args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs), torch.zeros(())  # Dynamo makes no graph of a function without any op (torch 2.13)

    try:
        with mode, _compat.paused_gc():
            python = _compat.capture_python(call, _tree.unflatten(treedef, fakes))
            graph, closed_over, out = _flatten(python, fakes, treedef, mode)
    except ShardError:
        raise
    except Exception as error:
        raise _explained(error, name) from error
    tensor_paths = [p for p, x in zip(paths, fakes, strict=True) if isinstance(x, torch.Tensor)]
    _refuse_mutation(graph, name, tensor_paths)
    sources.attach(graph)
    graph.graph.eliminate_dead_code()
    out_leaves, out_tree = _tree.flatten(out)
    out_paths = [p for p, x in zip(_tree.paths(out), out_leaves, strict=True) if x is TENSOR]
    closed_paths = [f"<closed over {i}>" for i in range(len(closed_over))]
    program = Program(
        name=name,
        graph=graph,
        in_paths=(*tensor_paths, *closed_paths),
        out_paths=tuple("result" + p for p in out_paths),
        out_leaves=tuple(out_leaves),
        out_tree=out_tree,
        show=program_text,
    )
    return Captured(program, tuple(closed_over))


def _fake(mode: _compat.FakeTensorMode, leaf: Any) -> Any:
    if isinstance(leaf, ShapeDtype):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)


class _Replay(torch.fx.Interpreter):
    """Run Dynamo's graph, marking what the backward of a grad call makes."""

    def run_node(self, node: torch.fx.Node) -> Any:
        if getattr(node.target, "__name__", None) in BACKWARD:
            node.meta["custom"] = {**node.meta.get("custom", {}), "phase": "backward"}
            outputs = self.fetch_args_kwargs_from_env(node)[0][0]
            sources.follow_backward(x.grad_fn for x in outputs if isinstance(x, torch.Tensor))
        return super().run_node(node)


def _flatten(
    python: torch.fx.GraphModule, fakes: list[Any], treedef: Any, mode: _compat.FakeTensorMode
) -> tuple[torch.fx.GraphModule, list[torch.Tensor], Any]:
    """make_fx over Dynamo's graph: the ATen graph, the closed-over tensors, the result tree with TENSOR for tensors."""
    tensors = [x for x in fakes if isinstance(x, torch.Tensor)]
    positional = _tree.unflatten(treedef, fakes)
    codegen = python.graph._codegen
    known = {id(x) for x in tensors}
    closed_over = [x for x in codegen.process_inputs(*positional) if isinstance(x, torch.Tensor) and id(x) not in known]
    result: list[Any] = []

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        mine = {id(x): v for x, v in zip((*tensors, *closed_over), values, strict=True)}
        inputs = [mine.get(id(x), x) for x in codegen.process_inputs(*positional)]
        outputs = _Replay(python).run(*inputs, enable_io_processing=False)
        codegen.process_inputs(*_tree.tree_map(lambda x: mine.get(id(x), x), positional))
        out, _ = codegen.process_outputs(outputs)
        result[:] = [_tree.tree_map(lambda x: TENSOR if isinstance(x, torch.Tensor) else x, out)]
        return [x for x in _tree.leaves(out) if isinstance(x, torch.Tensor)]

    inputs = [*tensors, *(mode.from_tensor(x) for x in closed_over)]
    graph = _compat.trace_aten(flat, inputs, decompositions.table())
    if any(_mutates(node) for node in graph.graph.nodes):
        functional = torch.func.functionalize(torch.fx.Interpreter(graph).run, remove="mutations")
        graph = _compat.trace_aten(functional, inputs, decompositions.table())
    return graph, closed_over, result[0]


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, _compat.OpOverload) and node.target._schema.is_mutable


def _refuse_mutation(graph: torch.fx.GraphModule, name: str, paths: list[str]) -> None:
    """Functionalisation leaves one `copy_` for each input that the function wrote to."""
    inputs = {node: path for node, path in zip(graph.graph.find_nodes(op="placeholder"), paths, strict=False)}
    wrote = [n for n in graph.graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder"]
    if wrote:
        path = inputs.get(wrote[0].args[0], "a closed-over tensor")
        fix = f"return the new value instead, or write to a copy: x = {path}.clone()"
        text = problem(f"{name}, argument {path}", "the function writes to it in place", needed="a function that only returns", fix=fix)
        raise CaptureError(text, arg_path=path, fix=fix)


# What torch says -> what it means for the user, and what to try.
CAUSES = (
    ("side effects happened", "it changes something outside of itself ({detail})", "return the value instead of storing it"),
    ("Data-dependent branching", "it branches on a tensor's value", "use torch.where, or shardfn's cond"),
    ("data-dependent", "it reads a tensor's value while it is traced", "keep the value a tensor: no .item(), bool(), int()"),
    ("operator `print`", "it prints", "return the value and print it outside"),
    ("return a scalar", "the function to differentiate does not return a scalar", "return loss.sum() or loss.mean()"),
)


def _explained(error: BaseException, name: str) -> CaptureError:
    said = str(error)
    source = _user_line(said) or _raised_at(error)
    if isinstance(error, _compat.DATA_DEPENDENT):
        said = "data-dependent " + said
    for sign, got, fix in CAUSES:
        if sign in said:
            detail = ", ".join(re.findall(r"\[?[\"']([A-Z]\['[^\"]*)[\"']", said)) or "see below"
            return _error(name, got.format(detail=detail), fix, source)
    first = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    return _error(name, f"it cannot be read as one graph: {type(error).__name__}: {first}", "write it as a pure function of tensors", source)


def _error(name: str, got: str, fix: str, source: str | None) -> CaptureError:
    return CaptureError(problem(name, got, needed="one pure graph of tensor ops", fix=fix, source=source), source=source, fix=fix)


def _user_line(text: str) -> str | None:
    """The last line of user code that a Dynamo message names."""
    found = [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', text) if not sources.is_ours(file)]
    return found[-1] if found else None


def _raised_at(error: BaseException) -> str | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not sources.is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
