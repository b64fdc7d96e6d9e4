"""Sparse tensors where they enter and leave a capture: split into the tensors that they store, and
joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _compat, _tree
from ...errors import CaptureError, ShardError, TreeError, call_site
from .sparse_matrices import ADDED, COALESCED, LAYOUTS, UNCOALESCED, SparseMatrix, called


def is_supported(x: Any) -> bool:
    """Whether a tensor is sparse, and of a kind that can be split into stored tensors."""
    if not isinstance(x, torch.Tensor) or x.layout not in LAYOUTS.values():
        return False
    if x.layout is not torch.sparse_coo:
        return x.dim() == 2
    with _compat.values():
        return x.dim() > 0 and x.dense_dim() == 0


def split(x: torch.Tensor) -> SparseMatrix:
    """Split a sparse tensor into the tensors that it stores. They share its memory."""
    with _compat.values(), _compat.neutral():
        return _split(x)


def _split(x: torch.Tensor) -> SparseMatrix:
    if x.layout is torch.sparse_coo:
        state = COALESCED if x.is_coalesced() else UNCOALESCED
        numbers, elements = _compat.coordinates_of(x), _compat.elements_of(x)
        return SparseMatrix("coo", x.shape, state, numbers.unbind(0), elements)
    kind = "csr" if x.layout is torch.sparse_csr else "csc"
    is_csr = kind == "csr"
    ends = x.crow_indices() if is_csr else x.ccol_indices()
    others = x.col_indices() if is_csr else x.row_indices()
    return SparseMatrix(kind, x.shape, COALESCED, (ends, others), x.values().detach())


def split_held(x: Any) -> Any:
    """The parts of a sparse tensor, and any other value as it is."""
    return split(x) if is_supported(x) else x


def results(tree: Any) -> Any:
    """The results of a call, with torch's sparse tensors.

    Raises:
        CaptureError: the call was on a mesh.
    """
    return _tree.tree_map(_joined, tree, is_leaf=lambda x: isinstance(x, SparseMatrix))


def _joined(a: Any) -> Any:
    if not isinstance(a, SparseMatrix):
        return a
    if isinstance(a.elements, DTensor):
        raise CaptureError.of(
            "a result",
            "the result is a sparse tensor, whose parts would be DTensors",
            needed="dense results on a mesh",
            fix="return A.to_dense(), or A.values() and A.indices()",
        )
    if a.kind != "coo":
        ends, others = a.positions
        make = torch.sparse_csr_tensor if a.kind == "csr" else torch.sparse_csc_tensor
        return make(ends, others, a.elements, a.shape)
    is_coalesced = a.state == COALESCED
    positions = torch.stack(tuple(a.positions))
    made = torch.sparse_coo_tensor(positions, a.elements, a.shape, is_coalesced=is_coalesced)
    return made.coalesce() if a.state == ADDED else made


def refuse_followed(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse sparse arguments that autograd follows. torch gives a dense gradient or a sparse one,
    by the function that reads them.

    Raises:
        ShardError: names the first.
    """
    leaves = _tree.leaves((args, kwargs))
    wrong = [i for i, x in enumerate(leaves) if is_supported(x) and _is_followed(x)]
    if wrong:
        path = _tree.argument_paths(fn, args, kwargs)[wrong[0]]
        raise _followed(f"{name}, argument {path}", path)


def _is_followed(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _followed(where: str, path: str) -> ShardError:
    return ShardError.of(
        where,
        "a sparse tensor that requires grad",
        needed="sparse tensors that do not require grad",
        fix="pass the values, which may require grad, and build the sparse tensor inside the "
        "function: torch.sparse_coo_tensor(indices, values, size)",
        source=call_site(),
        arg_path=path or None,
    )


def refuse_donated(name: str, args: _tree.TreeDef, numbers: Iterable[int]) -> None:
    """Refuse donated arguments that hold sparse tensors, whose tensors are views of one memory.

    Raises:
        TreeError: names the first.
    """
    for n in numbers:
        if _has_matrix(args.child(n)):
            raise TreeError.of(
                name,
                f"donated argument {n} holds a sparse tensor",
                needed="dense tensors to donate",
                fix="leave this argument out of donate_argnums",
                source=call_site(),
            )


def _has_matrix(tree: _tree.TreeDef) -> bool:
    return tree.type is SparseMatrix or any(map(_has_matrix, tree.children()))


def _parts(x: torch.Tensor) -> tuple[Any, ...]:
    """The parts of a sparse tensor that a function closes over, for `SparseMatrix`."""
    if _is_followed(x):
        raise _followed("a closed-over sparse tensor", "")
    made = split(x)
    return made.kind, made.shape, made.state, tuple(made.positions), made.elements


@_compat.read_by_dynamo
def _made(*parts: Any) -> SparseMatrix:
    return SparseMatrix(*parts)


PARTS = "the inner tensors of a sparse tensor"


@_compat.read_by_dynamo
def _parts_of(a: SparseMatrix) -> tuple[Any, ...]:
    """The parts of a sparse tensor, for `rejoined`."""
    return PARTS, a.kind, a.shape, a.state, tuple(a.positions), a.elements


def takes_parts(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that Dynamo keeps as one call: it gets the parts of sparse tensors, of which
    `rejoined` makes them again.
    """
    fn.__dict__["takes_parts"] = True
    return fn


def _takes_parts(fn: Any) -> bool:
    return "takes_parts" in getattr(fn, "__dict__", {})


def rejoined(tree: Any) -> Any:
    """A tree of plain containers with sparse tensors in place of their parts."""
    if isinstance(tree, dict):
        return {key: rejoined(x) for key, x in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        if tree and isinstance(tree[0], str) and tree[0] == PARTS:
            kind, shape, *others = tree[1:]
            return SparseMatrix(kind, torch.Size(shape), *others)
        return type(tree)(map(rejoined, tree))
    return tree


IN_DYNAMO = _compat.Sparse(
    SparseMatrix, is_supported, _parts, _made, called, _parts_of, _takes_parts
)
