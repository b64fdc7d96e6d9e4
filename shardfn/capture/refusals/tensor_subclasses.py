"""Tensor subclasses that a captured function may not make, take or return: those that neither are
plain nor say what they hold.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _compat, _tree
from ...errors import CaptureError
from ...ops.nodes import args_of
from .. import annotations as sources
from ..dynamo_nodes import name_of
from . import leaked_values

FIX = (
    "under sf.shard use global tensors, which in_placements, out_placements and "
    "sf.constrain(x, placements) place; use sf.jit or sf.shard_map for code with "
    "DTensor.from_local, distribute_tensor, sf.psum or sf.all_gather"
)
DTENSOR = "the function makes a DTensor, or reads the local tensor of one"
PLAIN = (
    "x.as_subclass(torch.Tensor); or give the class a __tensor_flatten__ that names its inner "
    "tensors"
)

# calls of torch.func, in Dynamo's graph, after which a transform follows a tensor
FOLLOWS = ("_wrap_for_grad", "_add_batch_dim", "_make_dual", "make_dual")

# the namespaces of ops of torch that communicate; those that shardfn knows are its own by now
SENDING = ("symm_mem", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def subclass_error(where: str, got: str, source: str | None) -> CaptureError:
    """The error for a tensor subclass."""
    fix = FIX if "DTensor" in got else PLAIN
    return CaptureError.of(where, got, needed="plain tensors", fix=fix, source=source)


def refuse_made(python: torch.fx.GraphModule, name: str) -> None:
    """Refuse a graph of Dynamo's with calls that make tensor subclasses or communicate.

    Raises:
        CaptureError: names the user's line.
    """
    for module in python.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            value = node.meta.get("example_value")
            if name_of(node) in FOLLOWS:
                _refuse_unread(node, name)
            _refuse_sending(node, name)
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and _is_refused(value):
                kind = _compat.class_name(value)
                got = DTENSOR if kind == "DTensor" else f"the function makes a {kind}"
                raise subclass_error(name, got, sources.user_line(node))


def _refuse_sending(node: torch.fx.Node, name: str) -> None:
    """Refuse an op of torch that communicates by itself: as a local op it would be wrong."""
    op = str(node.target).removeprefix("torch.ops.")
    if isinstance(node.target, str) or op.split(".")[0] not in SENDING:
        return
    source = sources.user_line(node)
    got = f"the function calls {op}, which runs collectives of its own"
    needed = "collectives that shardfn knows"
    fix = "torch.distributed.all_gather_into_tensor, reduce_scatter_tensor or all_to_all_single, "
    fix += "and then the product; or DTensors: x.redistribute(mesh, placements) @ w"
    raise CaptureError.of(name, got, needed=needed, fix=fix, source=source)


def _refuse_unread(node: torch.fx.Node, name: str) -> None:
    """Refuse a derivative or vmap of a tensor whose class has a __torch_function__."""
    value = args_of(node)[0].meta.get("example_value")
    if _compat.holds_tensors(value) and _compat.reads_calls(value):
        kind = _compat.class_name(value)
        raise CaptureError.of(
            name,
            f"a derivative or vmap applies to a {kind}, whose class has a __torch_function__",
            fix="pass its inner tensors as arguments, or define __torch_dispatch__ in the class",
            source=sources.user_line(node),
        )


def _is_refused(x: Any) -> bool:
    return _compat.is_foreign(x) and not _compat.holds_tensors(x)


def refuse_results(out: Any, name: str) -> None:
    """Refuse results that are not plain tensors.

    Raises:
        CaptureError: names the first.
    """
    pairs = zip(_tree.paths(out), _tree.leaves(out), strict=True)
    wrong = [(path, x) for path, x in pairs if _is_refused(x)]
    if wrong:
        path, x = wrong[0]
        error = subclass_error(f"{name}, result{path}", f"a {_compat.class_name(x)}", None)
        error.arg_path = "result" + path
        raise error


def refuse_unheld_tensors(out: Any, name: str) -> None:
    """Refuse results whose class names a tensor in its context that is not an inner tensor.

    Raises:
        CaptureError: names the first.
    """
    for path, x in _tree.holders(out):
        context = _compat.opened(x)[1].context
        if any(map(_tree.is_tensor, _tree.leaves((context,)))):
            raise CaptureError.of(
                f"{name}, result{path}",
                f"a {_compat.class_name(x)}, whose __tensor_flatten__ has a tensor in its context",
                fix="list the tensor among the names that __tensor_flatten__ returns",
                arg_path="result" + path,
            )


def refuse_fakes(constants: list[torch.Tensor], name: str) -> None:
    """Refuse a tensor constant without a value.

    Raises:
        CaptureError: it leaked from a trace.
    """
    if any(_compat.is_fake(x) for x in constants):
        raise leaked_values.leaked(f"{name}, a tensor that it holds")
