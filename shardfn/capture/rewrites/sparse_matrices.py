"""A sparse tensor inside a captured function: the dense tensors that it stores, and torch's
functions of sparse tensors as lookups and sums of dense ones.

Propagation, derivatives and compilers see dense tensors only.

Dynamo reads this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from ...errors import CaptureError
from .python_substitutes import misused

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}

# whether two stored elements may have the same position
COALESCED, UNCOALESCED = "coalesced", "uncoalesced"
# torch would have added such elements, and their number is not known
ADDED = "added"

# functions of one element that are zero at zero
UNARY = frozenset(
    (
        *("abs", "neg", "sqrt", "relu", "sign", "sin", "tan", "sinh", "tanh", "asin", "atan"),
        *("asinh", "atanh", "expm1", "log1p", "floor", "ceil", "round", "trunc"),
    )
)
# names under which torch calls the same function
SAME = {
    "_sparse_mm": "matmul",
    "mm": "matmul",
    "mv": "matmul",
    "spmm": "matmul",
    "dsmm": "matmul",
    "_sparse_addmm": "addmm",
    "addmv": "addmm",
    "_sparse_sum": "sum",
    "multiply": "mul",
    "truediv": "div",
    "rtruediv": "rdiv",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "_nnz": "nnz",
}


NEEDED = (
    "dense tensors; for sparse tensors only products with dense tensors, multiples, sums, "
    "transposes and to_dense"
)
DENSE = "A.to_dense(), where A is the sparse tensor; or its indices and values"
FOLLOWED = (
    "a derivative",
    "the derivative is taken with respect to a sparse tensor",
    "pass the values as an argument, and call torch.sparse_coo_tensor(indices, values, size) "
    "inside the function",
)
ROWS = ("scan, map or an index", "the code reads rows of a sparse tensor", "A.to_dense()")
# functions under which others run: the name for errors, what is wrong, what to write
REFUSED: dict[str, tuple[str, str, str]] = {
    "_wrap_for_grad": FOLLOWED,
    "_make_dual": FOLLOWED,
    "_add_batch_dim": (
        "vmap",
        "a sparse tensor has a mapped axis",
        "set in_axes to None for the sparse tensor; or use A.to_dense()",
    ),
    "getitem": ROWS,
    "to_local": ("shard_map", "an argument is a sparse tensor", "close over it"),
    "redistribute": (
        "constrain",
        "the constrained value is a sparse tensor",
        "in in_placements, place the stored elements of the sparse argument",
    ),
    "mark_entering": ("a loop", "the loop's carry holds a sparse tensor", "close over it"),
}


class SparseMatrix:
    """A sparse tensor, as the dense tensors that it stores.

    Args:
        kind: "coo", "csr" or "csc".
        shape: of the tensor.
        state: whether positions are distinct, for "coo".
        positions: for "coo" the coordinates of the elements, a tensor for each dim; else the
            compressed row or column, and the other coordinates.
        elements: the stored elements.
    """

    def __init__(
        self,
        kind: str,
        shape: torch.Size,
        state: str,
        positions: tuple[torch.Tensor, ...],
        elements: torch.Tensor,
    ) -> None:
        self.kind, self.shape, self.state = kind, shape, state
        self.positions, self.elements = positions, elements

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return ATTRIBUTES[name](self)
        if name.startswith("__") or not _is_of_tensors(name):
            raise AttributeError(name)
        return functools.partial(_method, name, self)

    def __matmul__(self, other: Any) -> Any:
        return called("matmul", (self, other), {})

    def __rmatmul__(self, other: Any) -> Any:
        return called("matmul", (other, self), {})

    def __mul__(self, other: Any) -> Any:
        return called("mul", (self, other), {})

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return called("div", (self, other), {})

    def __add__(self, other: Any) -> Any:
        return called("add", (self, other), {})

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return called("sub", (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return called("rsub", (self, other), {})

    def __pow__(self, other: Any) -> Any:
        return called("pow", (self, other), {})

    def __neg__(self) -> Any:
        return called("neg", (self,), {})

    def __abs__(self) -> Any:
        return called("abs", (self,), {})

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return called("__getitem__", (self, key), {})

    def __iter__(self) -> Any:
        return called("__iter__", (self,), {})

    def __imul__(self, other: Any) -> Any:
        return called("mul_", (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return called("div_", (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return called("add_", (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return called("sub_", (self, other), {})


@_compat.constant_in_graph
def _is_of_tensors(name: str) -> bool:
    return hasattr(torch.Tensor, name)


def is_sparse(x: Any) -> bool:
    """Whether a value stands for a sparse tensor."""
    return isinstance(x, SparseMatrix)


def _method(name: str, *args: Any, **kwargs: Any) -> Any:
    return called(name, args, kwargs)


def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch, by its name, of which an argument is sparse."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = SAME.get(name, name)
    if name in UNARY:
        return _of_elements(name, *args)
    if name not in OPS:
        _refuse(name, "")
    return OPS[name](*args, **kwargs)


@_compat.constant_in_graph
def _refuse(name: str, got: str, fix: str = "") -> None:
    """Refuse a function of a sparse tensor.

    Raises:
        CaptureError: always.
    """
    shown = name.replace("_sparse_", "torch.sparse.")
    where, known, advice = REFUSED.get(name, (shown, "an argument is a sparse tensor", DENSE))
    raise CaptureError.of(where, got or known, needed=NEEDED, fix=fix or advice)


def sparse_coo_tensor(
    indices: Any,
    values: Any,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    check_invariants: Any = None,
    is_coalesced: bool | None = None,
) -> SparseMatrix:
    """torch.sparse_coo_tensor."""
    name = "torch.sparse_coo_tensor"
    if size is None:
        _refuse(name, "without size= the size depends on the values of the indices", "size=(n, m)")
    values = torch.as_tensor(values, dtype=dtype, device=device)
    indices = torch.as_tensor(indices, dtype=torch.int64, device=values.device)
    shape = torch.Size(size or ())
    if indices.dim() != 2 or indices.shape[0] != len(shape) or values.dim() != 1:
        got = (
            f"indices have shape {tuple(indices.shape)} and values have shape {tuple(values.shape)}"
        )
        _refuse(
            name, got + f" for size {tuple(shape)}", "give indices one row for each dim of size"
        )
    if indices.shape[1] != values.shape[0]:
        misused(name, f"{indices.shape[1]} indices and {values.shape[0]} values")
    state = COALESCED if is_coalesced else UNCOALESCED
    return SparseMatrix("coo", shape, state, indices.unbind(0), values)


def sparse_csr_tensor(
    crow_indices: Any, col_indices: Any, values: Any, size: Any = None, **options: Any
) -> SparseMatrix:
    """torch.sparse_csr_tensor."""
    return _compressed("csr", crow_indices, col_indices, values, size, **options)


def sparse_csc_tensor(
    ccol_indices: Any, row_indices: Any, values: Any, size: Any = None, **options: Any
) -> SparseMatrix:
    """torch.sparse_csc_tensor."""
    return _compressed("csc", ccol_indices, row_indices, values, size, **options)


def _compressed(
    kind: str,
    ends: Any,
    others: Any,
    values: Any,
    size: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    check_invariants: Any = None,
) -> SparseMatrix:
    name = f"torch.sparse_{kind}_tensor"
    if size is None:
        _refuse(name, "without size= the size depends on the values of the indices", "size=(n, m)")
    values = torch.as_tensor(values, dtype=dtype, device=device)
    ends = torch.as_tensor(ends, device=values.device)
    others = torch.as_tensor(others, device=values.device)
    shape = torch.Size(size or ())
    if len(shape) != 2 or ends.dim() != 1 or values.dim() != 1:
        _refuse(
            name,
            "the sparse tensor is batched or has dense dims",
            "use a matrix without batch and dense dims",
        )
    return SparseMatrix(kind, shape, COALESCED, (ends, others), values)


def _size(a: SparseMatrix, dim: int | None = None) -> Any:
    return a.shape if dim is None else a.shape[dim]


def _refuse_added(a: SparseMatrix, name: str) -> None:
    if a.state == ADDED:
        _refuse(
            f"{name} of a sparse tensor",
            "elements at equal positions are added, so the number of elements depends on values",
            "call A.coalesce() outside of the function",
        )


def _stored(a: SparseMatrix, name: str) -> SparseMatrix:
    """The same tensor, if its stored elements are known."""
    _refuse_added(a, name)
    return a


def _coalesced(a: SparseMatrix, name: str) -> SparseMatrix:
    """The same tensor, if its positions are known to be distinct."""
    _refuse_added(a, name)
    if a.state == UNCOALESCED:
        got = f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first"
        misused(f"{name} of a sparse tensor", got)
    return a


def _part(kind: str, number: int) -> Callable[[SparseMatrix], torch.Tensor]:
    def part(a: SparseMatrix) -> torch.Tensor:
        if a.kind != kind:
            misused("a sparse tensor", f"the layout must be {LAYOUTS[kind]}; got {LAYOUTS[a.kind]}")
        return a.positions[number]

    return part


def _indices(a: SparseMatrix) -> torch.Tensor:
    if a.kind != "coo":
        misused("indices", f"the layout must be torch.sparse_coo; got {LAYOUTS[a.kind]}")
    return torch.stack(a.positions)


def _like(a: SparseMatrix, elements: torch.Tensor) -> SparseMatrix:
    """A sparse tensor with other elements at the same positions."""
    return SparseMatrix(a.kind, a.shape, a.state, a.positions, elements)


def coordinates(a: SparseMatrix) -> tuple[torch.Tensor, ...]:
    """The coordinates of the stored elements, a tensor for each dim."""
    if a.kind == "coo":
        return a.positions
    ends, others = a.positions
    order = torch.arange(others.shape[0], dtype=ends.dtype, device=ends.device)
    compressed = torch.searchsorted(ends, order, right=True) - 1
    return (compressed, others) if a.kind == "csr" else (others, compressed)


def _to_dense(a: SparseMatrix, dtype: Any = None, **others: Any) -> torch.Tensor:
    zeros = a.elements.new_zeros(a.shape)
    out = zeros.index_put(coordinates(a), a.elements, accumulate=True)
    return out if dtype is None else out.to(dtype)


def _transposed(a: SparseMatrix, one: int = 0, other: int = 1) -> SparseMatrix:
    if len(a.shape) != 2 or {one % 2, other % 2} != {0, 1}:
        _refuse(
            "transpose",
            f"cannot transpose dims {one} and {other} of a sparse tensor with {len(a.shape)} dims",
        )
    rows, columns = a.shape
    kind = {"coo": "coo", "csr": "csc", "csc": "csr"}[a.kind]
    positions = a.positions[::-1] if a.kind == "coo" else a.positions
    # coalesced elements of another order count as uncoalesced in torch
    state = UNCOALESCED if a.state == COALESCED and a.kind == "coo" else a.state
    return SparseMatrix(kind, torch.Size((columns, rows)), state, positions, a.elements)


def _coalesce(a: SparseMatrix) -> SparseMatrix:
    if a.kind != "coo":
        misused("coalesce", f"the layout must be torch.sparse_coo; got {LAYOUTS[a.kind]}")
    state = ADDED if a.state == UNCOALESCED else a.state
    return SparseMatrix(a.kind, a.shape, state, a.positions, a.elements)


def _of_elements(name: str, a: SparseMatrix, *args: Any) -> SparseMatrix:
    """A function of each element that is zero at zero."""
    if name != "neg":
        _distinct(a, name)
    return _like(a, getattr(torch, name)(a.elements, *args))


def _distinct(a: SparseMatrix, name: str) -> None:
    """Refuse a function of the sums of elements with equal positions."""
    if a.state != COALESCED:
        got = "the op is not linear, and the sparse tensor is not coalesced"
        _refuse(f"{name} of a sparse tensor", got, "call A.coalesce() outside of the function")


def _power(a: Any, exponent: Any) -> SparseMatrix:
    if not is_sparse(a) or is_sparse(exponent) or isinstance(exponent, torch.Tensor):
        _refuse("pow", "")
    if exponent <= 0:
        _refuse(
            "pow", f"the exponent {exponent} of a sparse tensor does not keep zero elements zero"
        )
    _distinct(a, "pow")
    return _like(a, a.elements**exponent)


def _multiplied(a: Any, b: Any) -> SparseMatrix:
    """A sparse tensor times a number or a dense tensor, which has its positions."""
    if not isinstance(a, SparseMatrix):
        a, b = b, a
    if isinstance(b, SparseMatrix):
        _refuse("mul", "both arguments are sparse tensors")
    return _like(a, a.elements * _factor(a, b))


def _divided(a: Any, b: Any) -> SparseMatrix:
    if not is_sparse(a) or is_sparse(b):
        _refuse("div", "the divisor is a sparse tensor")
    if isinstance(b, torch.Tensor) and b.dim():
        _refuse("div", "a sparse tensor is divided by a dense tensor", "A * (1 / x)")
    return _like(a, a.elements / b)


def _factor(a: SparseMatrix, b: Any) -> Any:
    """What each element is multiplied by."""
    if not isinstance(b, torch.Tensor) or b.dim() == 0:
        return b
    return b.expand(a.shape)[coordinates(a)]


def _added(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """A sum: dense, if one of the tensors is, else with the elements of both."""
    if not isinstance(a, SparseMatrix):
        return a + _dense_term(a, b) * alpha
    if not isinstance(b, SparseMatrix):
        return _dense_term(b, a) + b * alpha
    if a.kind != "coo" or b.kind != "coo" or a.shape != b.shape:
        _refuse("add", "both arguments are sparse tensors", "A.to_sparse_coo(); or A.to_dense()")
    elements = torch.cat([a.elements, b.elements * alpha])
    positions = [torch.cat(pair) for pair in zip(a.positions, b.positions, strict=True)]
    return SparseMatrix("coo", a.shape, ADDED, tuple(positions), elements)


def _dense_term(dense: Any, a: SparseMatrix) -> torch.Tensor:
    if not isinstance(dense, torch.Tensor):
        _refuse("add", "the sum of a sparse tensor and a number is dense", "A.to_dense()")
    return _to_dense(a)


def _product(a: Any, b: Any) -> torch.Tensor:
    """The product of a sparse matrix and a dense tensor, from either side."""
    if is_sparse(a) and is_sparse(b):
        _refuse("matmul", "both matrices are sparse, and the size of the product depends on values")
    if is_sparse(a):
        return _times(a, b, is_first=True)
    return _times(b, a, is_first=False)


def _times(a: SparseMatrix, x: torch.Tensor, *, is_first: bool) -> torch.Tensor:
    """A @ x, or x @ A: rows or columns of x, each times an element, added up."""
    wanted = a.shape[1] if is_first else a.shape[0]
    dim = -2 if is_first and x.dim() > 1 else -1
    if len(a.shape) != 2:
        _refuse("matmul", f"a sparse tensor of {len(a.shape)} dims")
    if x.dim() == 0 or x.shape[dim] != wanted or x.dtype != a.elements.dtype:
        zeros = a.elements.new_zeros(a.shape)
        return zeros @ x if is_first else x @ zeros  # the error is torch's
    rows, columns = coordinates(a)
    read, written = (columns, rows) if is_first else (rows, columns)
    size = a.shape[0] if is_first else a.shape[1]
    factors = a.elements if dim == -1 else a.elements.unsqueeze(-1)
    terms = x.index_select(dim, read) * factors
    shape = list(x.shape)
    shape[dim] = size
    return x.new_zeros(shape).index_add(dim, written, terms)


def _reversed_product(a: Any, b: Any) -> torch.Tensor:
    return _product(b, a)


def _added_product(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    if isinstance(input, SparseMatrix):
        _refuse("addmm", "the summand is a sparse tensor", "A.to_dense() + B @ C")
    product = _product(a, b)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else (input if beta == 1 else input * beta) + product


def _linear(x: torch.Tensor, weight: Any, bias: Any = None) -> torch.Tensor:
    if not isinstance(weight, SparseMatrix):
        _refuse(
            "linear", "the input or the bias of linear is a sparse tensor", "A @ weight.t() + bias"
        )
    out = _times(_transposed(weight), x, is_first=False)
    return out if bias is None else out + bias


def _sum(a: SparseMatrix, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of all elements, a dense number; or over dims, a sparse tensor."""
    elements = a.elements if dtype is None else a.elements.to(dtype)
    if dim is None or dim == ():
        return elements.sum()
    dims = {d % len(a.shape) for d in ((dim,) if isinstance(dim, int) else dim)}
    if keepdim:
        _refuse("sum", "a sparse tensor, and keepdim=True", "A.to_dense().sum(dim, keepdim=True)")
    if len(dims) == len(a.shape):
        return elements.sum()
    left = [d for d in range(len(a.shape)) if d not in dims]
    numbers = coordinates(a)
    positions = tuple([numbers[d] for d in left])
    shape = torch.Size([a.shape[d] for d in left])
    return SparseMatrix("coo", shape, ADDED, positions, elements)


def _to(a: SparseMatrix, *args: Any, **kwargs: Any) -> SparseMatrix:
    return _like(a, a.elements.to(*args, **kwargs))


def _to_coo(a: SparseMatrix, *args: Any, **kwargs: Any) -> SparseMatrix:
    return SparseMatrix("coo", a.shape, a.state, coordinates(a), a.elements)


def _converted(kind: str, a: SparseMatrix) -> SparseMatrix:
    """A coalesced matrix with its rows compressed."""
    if a.kind == kind:
        return a
    if a.kind != "coo" or kind != "csr" or a.state != COALESCED or len(a.shape) != 2:
        got = f"a sparse tensor of layout {LAYOUTS[a.kind]}, {a.state}"
        _refuse(f"to_sparse_{kind}", got, "convert the tensor outside of the function")
    rows, columns = a.positions
    order = torch.arange(a.shape[0] + 1, dtype=rows.dtype, device=rows.device)
    return SparseMatrix(
        kind, a.shape, COALESCED, (torch.searchsorted(rows, order), columns), a.elements
    )


ATTRIBUTES: dict[str, Callable[[SparseMatrix], Any]] = {
    "dtype": lambda a: a.elements.dtype,
    "device": lambda a: a.elements.device,
    "layout": lambda a: LAYOUTS[a.kind],
    "ndim": lambda a: len(a.shape),
    "requires_grad": lambda a: a.elements.requires_grad,
    "is_sparse": lambda a: a.kind == "coo",
    "is_sparse_csr": lambda a: a.kind == "csr",
    "is_cuda": lambda a: a.elements.is_cuda,
    "is_nested": lambda a: False,
    "is_quantized": lambda a: False,
    "T": _transposed,
    "mT": _transposed,
}

OPS: dict[str, Callable[..., Any]] = {
    "size": _size,
    "dim": lambda a: len(a.shape),
    "ndimension": lambda a: len(a.shape),
    "numel": lambda a: a.shape.numel(),
    "nnz": lambda a: _stored(a, "_nnz").elements.shape[0],
    "sparse_dim": lambda a: len(a.shape),
    "dense_dim": lambda a: 0,
    "is_coalesced": lambda a: a.state != UNCOALESCED,
    "is_floating_point": lambda a: a.elements.is_floating_point(),
    "is_complex": lambda a: a.elements.is_complex(),
    "values": lambda a: _coalesced(a, "values").elements,
    "_values": lambda a: _stored(a, "_values").elements.detach(),
    "indices": lambda a: _indices(_coalesced(a, "indices")),
    "_indices": lambda a: _indices(_stored(a, "_indices")),
    "crow_indices": _part("csr", 0),
    "col_indices": _part("csr", 1),
    "ccol_indices": _part("csc", 0),
    "row_indices": _part("csc", 1),
    "coalesce": _coalesce,
    "to_dense": _to_dense,
    "t": _transposed,
    "transpose": _transposed,
    "swapaxes": _transposed,
    "matmul": _product,
    "rmatmul": _reversed_product,
    "addmm": _added_product,
    "linear": _linear,
    "mul": _multiplied,
    "rmul": _multiplied,
    "div": _divided,
    "add": _added,
    "radd": _added,
    "sub": lambda a, b, *, alpha=1: _added(a, b, alpha=-alpha),
    "rsub": lambda a, b: _added(b, a, alpha=-1),
    "pow": _power,
    "sum": _sum,
    "to": _to,
    "float": lambda a: _to(a, torch.float32),
    "double": lambda a: _to(a, torch.float64),
    "half": lambda a: _to(a, torch.float16),
    "bfloat16": lambda a: _to(a, torch.bfloat16),
    "detach": lambda a: _like(a, a.elements.detach()),
    "clone": lambda a: _like(a, a.elements.clone()),
    "to_sparse_coo": _to_coo,
    "to_sparse_csr": functools.partial(_converted, "csr"),
    "to_sparse_csc": functools.partial(_converted, "csc"),
}

TABLE = {
    torch.sparse_coo_tensor: sparse_coo_tensor,
    torch.sparse_csr_tensor: sparse_csr_tensor,
    torch.sparse_csc_tensor: sparse_csc_tensor,
}
