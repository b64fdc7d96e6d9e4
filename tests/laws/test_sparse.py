"""Sparse tensors that a function takes, closes over or makes: values and derivatives are those of
torch, on every mesh. What shardfn does not compute of them is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

N, M, K = 7, 5, 3
generator = torch.Generator().manual_seed(0)
POSITIONS = torch.tensor([[0, 4, 1, 6, 1, 3, 4, 1, 6], [2, 0, 1, 4, 1, 0, 3, 4, 0]])
NUMBERS = torch.randn(9, dtype=torch.float64, generator=generator)
X = torch.randn(M, K, dtype=torch.float64, generator=generator)
Y = torch.randn(N, K, dtype=torch.float64, generator=generator)
ROWS = torch.randn(N, 1, dtype=torch.float64, generator=generator)

Fn = Callable[..., Any]
UNCOALESCED = torch.sparse_coo_tensor(POSITIONS, NUMBERS, (N, M))
MATRICES: dict[str, torch.Tensor] = {
    "uncoalesced": UNCOALESCED,
    "coalesced": UNCOALESCED.coalesce(),
    "csr": UNCOALESCED.to_sparse_csr(),
    "csc": UNCOALESCED.to_sparse_csc(),
    "empty rows": torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), [], (N, M)
    ).double(),
}
PRODUCTS: dict[str, Fn] = {
    "A @ x": lambda a, x, y: a @ x,
    "torch.sparse.mm": lambda a, x, y: torch.sparse.mm(a, x),
    "torch.mm": lambda a, x, y: torch.mm(a, x),
    "A.mm": lambda a, x, y: a.mm(x),
    "spmm": lambda a, x, y: torch.spmm(a, x),
    "A @ vector": lambda a, x, y: a @ x[:, 0],
    "mv": lambda a, x, y: torch.mv(a, x[:, 0]),
    "A.t() @ y": lambda a, x, y: a.t() @ y,
    "A.T @ y": lambda a, x, y: a.T @ y,
    "transpose": lambda a, x, y: a.transpose(0, 1) @ y,
    "y.t() @ A": lambda a, x, y: y.t() @ a,
    "x.t().mm(A.t())": lambda a, x, y: x.t().mm(a.t()),
    "addmm": lambda a, x, y: torch.addmm(y, a, x, beta=2, alpha=3),
    "torch.sparse.addmm": lambda a, x, y: torch.sparse.addmm(y, a, x, alpha=0.5),
    "multiple": lambda a, x, y: (2 * a * 0.5) @ x + (a * y[0, 0]) @ x,
    "quotient": lambda a, x, y: (a / 2) @ x,
    "negative": lambda a, x, y: (-a) @ x,
    "to_dense": lambda a, x, y: a.to_dense() @ x,
    "float": lambda a, x, y: a.float() @ x.float(),
    "two layers": lambda a, x, y: a @ torch.relu(a.t() @ (a @ x)),
    "linear": lambda a, x, y: torch.nn.functional.linear(x.t(), a),
    "sum": lambda a, x, y: a.sum() + x.sum(),
    "questions": lambda a, x, y: x[: a.dim()] * a.shape[0] + a.size(1) * (a.dtype == x.dtype),
    "is a tensor": lambda a, x, y: a @ x if isinstance(a, torch.Tensor) else x,
    "detach": lambda a, x, y: a.detach() @ x,
}
OF_COO: dict[str, Fn] = {
    "sum of rows": lambda a, x, y: torch.sparse.sum(a, dim=1).to_dense(),
    "sum of columns": lambda a, x, y: torch.sparse.sum(a, 0).to_dense(),
    "coalesce": lambda a, x, y: a.coalesce() @ x,
    "scaled rows": lambda a, x, y: (a * ROWS.to(a.device)) @ x,
    "stored": lambda a, x, y: a._values() * a._indices()[1],
    "counted": lambda a, x, y: x * a._nnz(),
    "added": lambda a, x, y: (a + a) @ x,
    "to dense": lambda a, x, y: (y @ x.t()) + a,
    "is sparse": lambda a, x, y: a @ x if a.is_sparse else x,
}
OF_COALESCED: dict[str, Fn] = {
    "values": lambda a, x, y: a.values() * a.indices()[0],
    "abs": lambda a, x, y: a.abs() @ x,
    "square": lambda a, x, y: (a**2) @ x,
    "to_sparse_csr": lambda a, x, y: a.to_sparse_csr() @ x,
}
OF_CSR: dict[str, Fn] = {
    "stored": lambda a, x, y: a.values() * a.col_indices(),
    "rows": lambda a, x, y: a.crow_indices().diff(),
    "tanh": lambda a, x, y: a.tanh() @ x,
    "to_sparse_coo": lambda a, x, y: a.to_sparse_coo() @ x,
}
FNS: dict[str, dict[str, Fn]] = {
    "uncoalesced": PRODUCTS | OF_COO,
    "coalesced": PRODUCTS | OF_COO | OF_COALESCED,
    "csr": PRODUCTS | OF_CSR,
    "csc": dict(PRODUCTS),
    "empty rows": PRODUCTS | OF_COO,
}
for kind, name in (
    ("csr", "A.T @ y"),
    ("csr", "quotient"),
    ("csc", "A.T @ y"),
    ("csc", "quotient"),
):
    del FNS[kind][name]  # torch refuses it


def every(fns: dict[str, Fn]) -> Fn:
    return lambda a, x, y: [fn(a, x, y) for fn in fns.values()]


def check(fns: dict[str, Fn], got: Any, wanted: Any) -> None:
    for name, one, other in zip(fns, got, wanted, strict=True):
        assert_close(sf.full(one), other, rtol=1e-6, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", MATRICES)
def test_functions_of_sparse_tensors_are_torchs(kind: str) -> None:
    a, fns = MATRICES[kind], FNS[kind]
    wanted = every(fns)(a, X, Y)
    check(fns, sf.jit(every(fns), backend="aten")(a, X, Y), wanted)
    check(fns, sf.jit(lambda x, y: every(fns)(a, x, y), backend="aten")(X, Y), wanted)


def test_compiled_functions_of_sparse_tensors_are_torchs() -> None:
    a, fns = MATRICES["csr"], FNS["csr"]
    check(fns, sf.jit(every(fns), backend="inductor")(a, X, Y), every(fns)(a, X, Y))


@pytest.mark.parametrize("kind", ["uncoalesced", "csr"])
@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_functions_of_sharded_sparse_tensors_are_torchs(kind: str, axes: dict[str, int]) -> None:
    a, fns = MATRICES[kind], FNS[kind]
    wanted = every(fns)(a, X, Y)
    last = tuple(axes)[-1]
    with simulated(**axes) as mesh:
        for place in (P(), P(tuple(axes))):
            places = (place, P("a"), P(None, last))
            check(fns, sf.shard(every(fns), mesh, places, backend="aten")(a, X, Y), wanted)
        closed = sf.shard(lambda x, y: every(fns)(a, x, y), mesh, P("a"), backend="aten")
        check(fns, closed(X, Y), wanted)


def layers(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (a.t() @ torch.tanh(a @ x)).pow(2).sum()


@pytest.mark.parametrize("kind", ["uncoalesced", "csr"])
def test_derivatives_of_the_dense_operand_are_torchs(kind: str) -> None:
    a = MATRICES[kind]
    x = X.clone().requires_grad_()
    (true,) = torch.autograd.grad(layers(a, x), x)
    assert_close(sf.grad(lambda x: layers(a, x))(X), true)
    assert_close(sf.value_and_grad(layers, argnums=1)(a, X)[1], true)
    assert_close(sf.vjp(lambda x: layers(a, x), X)[1](torch.ones((), dtype=X.dtype))[0], true)
    assert_close(sf.jvp(lambda x: layers(a, x), (X,), (X,))[1], (true * X).sum())
    with simulated(a=2) as mesh:
        step = sf.shard(sf.grad(layers, argnums=1), mesh, (P("a"), P("a")), backend="aten")
        assert_close(sf.full(step(a, X)), true)


def test_second_derivatives_and_samples() -> None:
    a, dense = UNCOALESCED, UNCOALESCED.to_dense()
    x = X[:, 0]
    true = torch.autograd.functional.hessian(lambda x: layers(dense, x), x)
    assert_close(sf.hessian(lambda x: layers(a, x))(x), true)
    assert_close(sf.jacfwd(lambda x: a @ x)(x), dense)
    mapped = sf.vmap(lambda a, x: a @ x, in_axes=(None, 1), out_axes=1)
    assert_close(mapped(CSR, X), CSR @ X)


MAKERS: dict[str, Fn] = {
    "coo": lambda v: torch.sparse_coo_tensor(POSITIONS, v, (N, M)),
    "coalesced": lambda v: torch.sparse_coo_tensor(
        MATRICES["coalesced"].indices(), v[:8], (N, M), is_coalesced=True
    ),
    "csr": lambda v: torch.sparse_csr_tensor(CSR.crow_indices(), CSR.col_indices(), v[:8], (N, M)),
}
CSR = MATRICES["csr"]


@pytest.mark.parametrize("name", MAKERS)
def test_derivatives_of_the_elements_are_torchs(name: str) -> None:
    make = MAKERS[name]
    loss = lambda v, x: (torch.sparse.mm(make(v), x) ** 3).sum() + make(v).to_dense().pow(2).sum()
    v = NUMBERS.clone().requires_grad_()
    (true,) = torch.autograd.grad(loss(v, X), v)
    assert_close(sf.grad(loss)(NUMBERS, X), true)
    own = NUMBERS.clone().requires_grad_()
    sf.jit(loss, backend="aten")(own, X).backward()
    assert_close(own.grad, true)
    with simulated(a=2, b=2) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (P("a"), P("b", "a")), backend="aten")
        assert_close(sf.full(step(NUMBERS, X)), true)


class Graph(torch.nn.Module):
    """Two layers of a graph network, which holds the adjacency of its graph."""

    def __init__(self, adjacency: torch.Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(K, 4).double(), torch.nn.Linear(4, 2).double()
        if is_buffer:
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.spmm(self.adjacency, self.first(x)))
        return torch.sparse.mm(self.adjacency, self.second(hidden))


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_module_that_holds_a_sparse_tensor(*, is_buffer: bool, layout: torch.layout) -> None:
    sf.random.state.seed(0)
    square = UNCOALESCED.to_dense() @ UNCOALESCED.to_dense().t()
    model = Graph(square.to_sparse(layout=layout), is_buffer=is_buffer)
    wanted = model(Y)
    model(Y).pow(2).sum().backward()
    true = model.first.weight.grad
    model.zero_grad()
    assert_close(sf.jit(model, backend="aten")(Y), wanted)
    sf.jit(lambda x: model(x).pow(2).sum(), backend="aten")(Y).backward()
    assert_close(model.first.weight.grad, true)
    fn, params, buffers = sf.functionalize(model)
    out, after = fn(params, buffers, Y)
    assert_close(out, wanted)
    assert after.keys() == buffers.keys()
    loss = lambda p, b, x: fn(p, b, x)[0].pow(2).sum()
    assert_close(sf.grad(loss)(params, buffers, Y)["first.weight"], true)
    with simulated(a=2) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (P(), P(), P("a")), backend="aten")
        assert_close(sf.full(step(params, buffers, Y)["first.weight"]), true)


def test_loops_and_branches_close_over_sparse_tensors() -> None:
    square = UNCOALESCED.to_dense() @ UNCOALESCED.to_dense().t()
    a = (square / square.abs().max()).to_sparse()
    power = lambda a, x: sf.scan(lambda x, _: (a @ x, None), x, None, length=3)[0]
    assert_close(sf.jit(power, backend="aten")(a, Y), a @ (a @ (a @ Y)))
    branch = lambda x: sf.cond(x.sum() > 0, lambda x: a @ x, lambda x: 2 * (a @ x), x)
    assert_close(sf.jit(branch, backend="aten")(Y), branch(Y))
    true = torch.func.grad(lambda x: (square / square.abs().max()).matrix_power(3).mv(x).sum())
    assert_close(sf.grad(lambda x: power(a, x).sum())(Y[:, 0]), true(Y[:, 0]))


def test_results_outside_of_a_mesh_are_sparse_as_torchs() -> None:
    of_coo = lambda a: (a * 2, a.t(), a.coalesce(), torch.sparse.sum(a, 1))
    for kind, a in MATRICES.items():
        fn = of_coo if a.layout is torch.sparse_coo else lambda a: (a * 2, a)
        for got, true in zip(sf.jit(fn, backend="aten")(a), fn(a), strict=True):
            assert got.layout == true.layout, kind
            assert got._nnz() == true._nnz()
            assert_close(got.to_dense(), true.to_dense())


def test_a_sparse_tensor_that_changes_is_read_again() -> None:
    a = UNCOALESCED.clone()
    fn = sf.jit(lambda x: a @ x, backend="aten")
    for _ in range(2):
        assert_close(fn(X), a @ X)
        a.mul_(2)
        assert_close(fn(X), a @ X)
        (a if a.layout is torch.sparse_csr else a.coalesce()).values().add_(1)
        assert_close(fn(X), a @ X)
        a = MATRICES["csr"]


def test_calls_with_other_sparse_tensors() -> None:
    fn = sf.jit(lambda a, x: a @ x, backend="aten")
    for a in (UNCOALESCED, UNCOALESCED * 2, CSR, UNCOALESCED.to_dense(), UNCOALESCED.coalesce()):
        assert_close(fn(a, X), a @ X)


REFUSED: dict[str, tuple[Fn, str, str]] = {
    "row": (lambda a: a[0], "the code reads rows of a sparse tensor", "A.to_dense()"),
    "exp": (torch.exp, "an argument is a sparse tensor", "A.to_dense()"),
    "cat": (lambda a: torch.cat([a, a]), "an argument is a sparse tensor", "A.to_dense()"),
    "softmax": (
        lambda a: torch.sparse.softmax(a, 1),
        "torch.sparse.softmax: an argument is a sparse tensor",
        "A.to_dense()",
    ),
    "in place": (lambda a: a.mul_(2), "mul_: an argument is a sparse tensor", "A.to_dense()"),
    "product": (lambda a: a @ a.t(), "both matrices are sparse", "A.to_dense()"),
    "number": (lambda a: a + 1, "a number is dense", "A.to_dense()"),
    "added": (
        lambda a: a.coalesce().values(),
        "the number of elements depends on",
        "A.coalesce() out",
    ),
    "not linear": (lambda a: a.abs(), "the sparse tensor is not coalesced", "A.coalesce() outside"),
    "no size": (
        lambda a: torch.sparse_coo_tensor(POSITIONS, NUMBERS) @ X,
        "without size=",
        "size=(n,",
    ),
    "gradient": (sf.grad(lambda a: (a @ X).sum()), "with respect to a sparse", "sparse_coo_tensor"),
    "tangent": (lambda a: sf.jvp(lambda a: a @ X, (a,), (a,)), "with respect to a", "the values"),
    "samples": (
        sf.vmap(lambda a: a * 2),
        "a sparse tensor has a mapped axis",
        "set in_axes to None",
    ),
    "rows of a loop": (
        lambda a: sf.map(lambda r: r * 2, a),
        "the code reads rows of",
        "A.to_dense()",
    ),
    "carry": (
        lambda a: sf.scan(lambda a, _: (a * 2, None), a, None, length=2)[0],
        "the loop's carry holds a sparse tensor",
        "close over it",
    ),
    "made of a dense one": (
        lambda a: (X @ X.t()).to_sparse() @ X,
        "a dense tensor to a sparse one",
        "x.to_dense()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str) -> None:
    fn, got, fix = REFUSED[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(UNCOALESCED)
    assert got in str(caught.value), caught.value
    assert fix in str(caught.value).partition("try: ")[2], caught.value


def test_torchs_errors_are_torchs() -> None:
    fn = sf.jit(lambda a, x: a @ x, backend="aten")
    with pytest.raises(RuntimeError, match="same dtype"):
        fn(UNCOALESCED, X.float())
    with pytest.raises(sf.CaptureError, match="uncoalesced tensor"):
        sf.jit(lambda a: a.values(), backend="aten")(UNCOALESCED)


def test_what_cannot_enter_is_refused_with_its_path() -> None:
    fn = lambda d: d["a"] @ X
    wanted = UNCOALESCED.clone().requires_grad_()
    with pytest.raises(
        sf.ShardError, match=r"argument d\['a'\]: a sparse tensor that requires grad"
    ):
        sf.jit(fn, backend="aten")({"a": wanted})
    with pytest.raises(
        sf.ShardError, match="closed-over sparse tensor: a sparse tensor that requires grad"
    ):
        sf.jit(lambda x: wanted @ x, backend="aten")(X)
    with torch.no_grad():
        assert_close(sf.jit(fn, backend="aten")({"a": wanted}), wanted @ X)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 3), (4, 3))
    with pytest.raises(sf.CaptureError, match=r"d\['a'\] is torch.sparse_coo with dense dims"):
        sf.jit(fn, backend="aten")({"a": hybrid})
    with pytest.raises(sf.TreeError, match="donated argument 0 holds a sparse tensor"):
        sf.jit(fn, donate_argnums=0, backend="aten")({"a": UNCOALESCED})
    with simulated(a=2) as mesh:
        with pytest.raises(
            sf.CaptureError, match="the result is a sparse tensor, whose parts would be DTensors"
        ):
            sf.shard(lambda a: a * 2, mesh, backend="aten")(UNCOALESCED)
        with pytest.raises(sf.CaptureError, match="shard_map: an argument is a sparse tensor"):
            sf.jit(sf.shard_map(lambda a: a @ X, mesh, P(), P()), backend="aten")(UNCOALESCED)


def multiplied() -> bool:
    mesh = sf.make_mesh((dist.get_world_size(),), ("a",))
    loss = lambda a, x: (a @ x).pow(2).sum()
    step = sf.shard(sf.grad(loss, argnums=1), mesh, (P("a"), P("a")), backend="aten")
    return all(
        torch.allclose(sf.full(step(a, X)), 2 * (a.t() @ (a @ X))) for a in (UNCOALESCED, CSR)
    )


def test_real_processes_multiply_sparse_tensors() -> None:
    assert all(run_ranks(2, multiplied))
