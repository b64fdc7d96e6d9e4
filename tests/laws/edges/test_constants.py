"""Numbers and None in results and arguments are what JAX makes of them, or refused by name."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from effort import examples
from equality import close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.arange(1.0, 4.0, dtype=F64)
DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}

# A leaf of a result: "x" is the argument, "x+1" a value computed from it, all else a constant.
LEAVES = st.sampled_from(["x", "x+1", 1, -2, 2.5, True, None])
SHAPES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.sampled_from("ba"), inner, min_size=1, max_size=2)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=4,
)


def filled(shape: Any, x: Tensor) -> Any:
    """A tree by its plan."""
    if isinstance(shape, dict):
        return {key: filled(child, x) for key, child in shape.items()}
    if isinstance(shape, tuple):
        return tuple([filled(child, x) for child in shape])
    if isinstance(shape, str):
        return x if shape == "x" else x + 1
    return shape


def stacked(trees: list[Any]) -> Any:
    """The trees of all rows as one: tensors stacked, numbers as tensors, None as it is."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: stacked([tree[key] for tree in trees]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([tree[i] for tree in trees]) for i in range(len(first)))
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.stack(trees)
    return torch.tensor(trees, dtype=DTYPES[type(first)])


def assert_equal(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_equal(got[key], wanted[key])
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(wanted, Tensor):
        close(got, wanted)
    else:
        assert got == wanted


LOOPS: dict[str, Callable[[Any], Any]] = {
    "scan": lambda shape: sf.scan(lambda c, x: (c, filled(shape, x)), X[0], X)[1],
    "scan in reverse": lambda shape: sf.scan(
        lambda c, x: (c, filled(shape, x)), X[0], X, reverse=True
    )[1],
    "map": lambda shape: sf.map(lambda x: filled(shape, x), X),
    "vmap": lambda shape: sf.vmap(lambda x: filled(shape, x))(X),
    "vmap by name": lambda shape: sf.vmap(lambda x: filled(shape, x), axis_name="i")(X),
}


@pytest.mark.parametrize("loop", LOOPS)
@given(SHAPES)
@examples(4)
def test_constants_of_each_row_are_stacked(loop: str, shape: Any) -> None:
    assert_equal(LOOPS[loop](shape), stacked([filled(shape, x) for x in X]))


def test_constants_of_each_row_are_stacked_in_code_that_runs_as_it_is() -> None:
    got = torch.func.vmap(lambda y: sf.scan(lambda c, x: (c + x, (x, 1)), y.sum() * 0, y)[1])(
        X.expand(2, 3)
    )
    assert_equal(got, (X.expand(2, 3), torch.ones(2, 3, dtype=torch.int64)))


def other(shape: Any) -> Any:
    """The same tree with other numbers."""
    if isinstance(shape, dict):
        return {key: other(child) for key, child in reversed(list(shape.items()))}
    if isinstance(shape, tuple):
        return tuple([other(child) for child in shape])
    if isinstance(shape, bool):
        return not shape
    return shape + 3 if isinstance(shape, (int, float)) else shape


def as_tensors(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: as_tensors(child) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple([as_tensors(child) for child in tree])
    return torch.tensor(tree, dtype=DTYPES[type(tree)]) if isinstance(tree, (int, float)) else tree


@given(SHAPES, st.booleans())
@examples(8)
def test_a_branch_chooses_its_numbers(shape: Any, choice: bool) -> None:
    got = sf.cond(
        torch.tensor(choice), lambda: filled(shape, X), lambda: filled(other(shape), 2 * X)
    )
    wanted = as_tensors(filled(shape, X) if choice else filled(other(shape), 2 * X))
    assert_equal(got, {key: wanted[key] for key in got} if isinstance(wanted, dict) else wanted)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_branch_chooses_its_numbers_on_every_rank(backend: str) -> None:
    with simulated(dp=2) as mesh:
        fn = lambda x: sf.cond(x.sum() > 100, lambda: (x, 1, 2.0), lambda: (2 * x, 2, 3.0))
        got = sf.full(sf.shard(fn, mesh, P("dp"), backend=backend)(X))
    assert_equal(got, (2 * X, torch.tensor(2), torch.tensor(3.0)))


def test_a_number_takes_the_dtype_of_the_tensor_beside_it() -> None:
    assert_equal(
        sf.cond(torch.tensor(False), lambda: X.sum(), lambda: 1), torch.tensor(1.0, dtype=F64)
    )
    assert_equal(sf.scan(lambda c, x: (0, x), X[0], X)[0], torch.tensor(0.0, dtype=F64))
    carry = {"i": torch.tensor(0), "x": X[0]}
    got = sf.while_loop(lambda c: c["i"] < 2, lambda c: {"x": 7, "i": c["i"] + 1}, carry)
    assert_equal(got, {"i": torch.tensor(2), "x": torch.tensor(7.0, dtype=F64)})


REFUSED: dict[str, Callable[[], Any]] = {
    "texts of two branches": lambda: sf.cond(
        torch.tensor(True), lambda: (X, "a"), lambda: (X, "b")
    ),
    "numbers of two kinds": lambda: sf.cond(torch.tensor(True), lambda: (X, 1), lambda: (X, 1.5)),
    "a number and None": lambda: sf.cond(torch.tensor(True), lambda: (X, 1), lambda: (X, None)),
    "a number for a vector": lambda: sf.cond(torch.tensor(True), lambda: X, lambda: 1.0),
    "a text of each sample": lambda: sf.vmap(lambda x: (x, "a"))(X),
    "a float for an integer carry": lambda: sf.scan(lambda c, x: (0.5, x), torch.tensor(1), X),
    "a number to differentiate": lambda: sf.grad(lambda p: p["a"].sum() * p["n"])(
        {"a": X, "n": 2.0}
    ),
    "a float to push": lambda: sf.jvp(lambda x, n: x * n, (X, 2.0), (X, 1.0)),
    "a whole number to differentiate": lambda: sf.grad(lambda p: p.sum())(torch.arange(3)),
    "a Jacobian of a count": lambda: sf.jacrev(lambda x: (x, 3))(X),
    "a Jacobian of whole numbers": lambda: sf.jacfwd(lambda x: x.long())(X),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(case: str) -> None:
    with pytest.raises(sf.TreeError) as caught:
        REFUSED[case]()
    assert (caught.value.source or "").startswith(__file__) and caught.value.fix


TREE = {"a": X, "none": None}


def loss(p: Any) -> Tensor:
    return (p["a"] ** 3).sum()


def test_none_leaves_pass_every_derivative() -> None:
    assert_equal(sf.grad(loss)(TREE), {"a": 3 * X**2, "none": None})
    assert_equal(sf.bucketed_grad(loss)(TREE)[1], {"a": 3 * X**2, "none": None})
    assert_equal(sf.value_and_grad(loss)(TREE), (loss(TREE), {"a": 3 * X**2, "none": None}))
    assert_equal(sf.jvp(loss, (TREE,), (TREE,)), (loss(TREE), (3 * X**3).sum()))
    assert_equal(sf.vjp(loss, TREE)[1](torch.ones((), dtype=F64)), ({"a": 3 * X**2, "none": None},))
    assert_equal(sf.jacrev(loss)(TREE), {"a": 3 * X**2, "none": None})
    assert_equal(sf.hessian(loss)(TREE)["a"], {"a": torch.diag(6 * X), "none": None})
    assert_equal(sf.vmap(lambda p: (p["a"], p["none"]))(TREE), (X, None))
    with simulated(dp=3) as mesh:
        got = sf.full(sf.shard(sf.bucketed_grad(loss), mesh, P("dp"), backend="aten")(TREE))
    assert_equal(got[1], {"a": 3 * X**2, "none": None})


def test_the_derivatives_of_constants_are_zeros() -> None:
    value, tangent = sf.jvp(lambda x: (x, 3, 2.5, None), (X,), (2 * X,))
    assert_equal(value, (X, 3, 2.5, None))
    assert_equal(tangent, (2 * X, 0, 0.0, None))
    assert_equal(sf.vjp(lambda x: (x, 3), X)[1]((2 * X, 0)), (2 * X,))
    assert_equal(
        sf.jacfwd(lambda x: (x, 2.5, None))(X),
        (torch.eye(3, dtype=F64), torch.zeros(3, dtype=F64), None),
    )
    _, aux = sf.grad(lambda x: (x.sum(), {"n": 3, "s": "text", "none": None}), has_aux=True)(X)
    assert aux == {"n": 3, "s": "text", "none": None}


class Pair(NamedTuple):
    x: Any
    n: Any


@dataclasses.dataclass
class Plain:
    x: Any
    n: Any = 2


@optree.dataclasses.dataclass(namespace="shardfn")
class Registered:
    x: Any
    n: Any = optree.dataclasses.field(default=2, pytree_node=False)


class Table(dict):
    """A dict of the user's own class."""


def scaled(x: Tensor, n: Any) -> Any:
    return x * n


ARGUMENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "an int": (scaled, (X, 2)),
    "a float": (scaled, (X, 2.5)),
    "a bool": (scaled, (X, True)),
    "a complex number": (scaled, (X, 2j)),
    "None": (lambda x, n: x if n is None else 2 * x, (X, None)),
    "numpy float64": (scaled, (X, np.float64(2.5))),
    "numpy float32": (scaled, (X, np.float32(2.5))),
    "numpy int64": (scaled, (X, np.int64(2))),
    "numpy bool": (scaled, (X, np.bool_(True))),
    "numpy text": (lambda x, n: x * len(n), (X, np.str_("ab"))),
    "numpy array": (lambda x, n: x * torch.as_tensor(n), (X, np.arange(3.0))),
    "numpy scalar array": (lambda x, n: x * torch.as_tensor(n), (X, np.array(2.0))),
    "torch.Size": (lambda x, n: x.reshape(n), (X, torch.Size([3, 1]))),
    "a size that is returned": (lambda x: (x, x.shape, tuple(x.shape)), (X,)),
    "a dtype": (lambda x, n: x.to(n), (X, torch.float32)),
    "a slice": (lambda x, n: x[n], (X, slice(0, 2))),
    "a range": (lambda x, n: x * len(n), (X, range(2))),
    "a set": (lambda x, n: x * len(n), (X, {1, 2})),
    "a NamedTuple": (lambda p: Pair(p.x * p.n, p.n), (Pair(X, 3),)),
    "an OrderedDict": (lambda d: OrderedDict(b=d["a"], a=d["b"]), (OrderedDict(b=X, a=2 * X),)),
    "a defaultdict": (lambda d: d["a"] * 2, (defaultdict(int, a=X),)),
    "a deque": (lambda d: d[0] * 2, (deque([X, X]),)),
    "a dataclass": (lambda p: p.x * p.n, (Plain(X),)),
    "a dataclass inside": (lambda d: d["p"].x * 2, ({"p": Plain(X)},)),
    "a registered dataclass": (lambda p: p.x * p.n, (Registered(X),)),
    "a registered dataclass inside": (lambda d: d[0].x * 2, ([Registered(X)],)),
    "a dict of a class": (lambda d: d["a"] * 2, (Table(a=X),)),
    "a dataclass that is returned": (Plain, (X,)),
}


@pytest.mark.parametrize("outer", ["jit", "shard", "vmap", "jvp"])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_any_kind_is_right_or_refused_by_name(case: str, outer: str) -> None:
    fn, args = ARGUMENTS[case]
    wanted = fn(*args)
    try:
        got = through(outer, fn, args)
    except sf.ShardError as error:
        assert (error.fix or error.arg_path) and "cannot be captured as one graph" not in str(error)
        assert case not in MUST_PASS or outer == "jvp"
    else:
        sf.tree_map(assert_value, got, wanted)


MUST_PASS = (
    "an int",
    "a bool",
    "None",
    "a dtype",
    "a NamedTuple",
    "an OrderedDict",
    "torch.Size",
    "a float",
)


def assert_value(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert_close(got, wanted)
    else:
        assert got == wanted


def through(outer: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of these arguments under a transform that leaves its value."""
    if outer == "jit":
        return sf.jit(fn, backend="aten")(*args)
    if outer == "jvp":
        tangents = sf.tree_map(
            lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else None, args
        )
        return sf.jvp(fn, args, tangents)[0]
    if outer == "vmap":
        one = sf.vmap(fn, in_axes=None, out_axes=None, axis_size=2)
        return one(*args)
    with simulated(dp=2) as mesh:
        return sf.full(sf.shard(fn, mesh, backend="aten")(*args))


OF_ONE, OF_THREE = np.array([2]), np.array([True, False, True])
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an element": lambda x: x * torch.from_numpy(OF_ONE).item(),
    "NumPy's own read": lambda x: x * OF_ONE.item(),
    "a float": lambda x: x * float(torch.as_tensor(OF_ONE)),
    "a list": lambda x: x * torch.from_numpy(OF_ONE).tolist()[0],
    "a size": lambda x: x[: torch.from_numpy(OF_ONE).item()],
    "a mask": lambda x: x[torch.from_numpy(OF_THREE)],
    "a copied mask": lambda x: x[torch.tensor(OF_THREE)],
    "values alone": lambda x: x * torch.from_numpy(OF_THREE),
    "an index": lambda x: x.index_select(0, torch.from_numpy(OF_ONE)),
}


@pytest.mark.parametrize("name", READS)
def test_values_of_an_array_that_changes_are_no_constants(name: str) -> None:
    """A call with other values in a closed-over array has their result, or the read is refused."""
    fn, x = READS[name], torch.arange(3.0)
    before = OF_ONE.copy(), OF_THREE.copy()
    run = sf.jit(fn, backend="aten")
    try:
        torch.testing.assert_close(run(x), fn(x))
        OF_ONE[0], OF_THREE[1] = 1, True
        torch.testing.assert_close(run(x), fn(x))
    except sf.CaptureError as error:
        assert "value" in str(error).split("\n")[0]
    finally:
        OF_ONE[:], OF_THREE[:] = before
