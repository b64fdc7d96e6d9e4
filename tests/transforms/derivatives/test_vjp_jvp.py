"""vjp, jvp, linearize, jacfwd, jacrev, hessian and vmap: torch.func is the judge, alone and in
any order with shard and grad.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from message import without_line
from stagings import counts
from torch import Tensor
from transform_pairs import SHAPED, Shaped

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(5)
X, Y = (torch.randn(5, 3, generator=G, dtype=torch.float64) for _ in range(2))
WORLDS = {"2": ((2,), P("a")), "3": ((3,), P(None, "a")), "2 x 4": ((2, 4), P("a", "b"))}


def of_tree(p: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
    return {"s": (p["w"] * y).sin().sum(0), "t": (p["w"] @ y.T).mean()}


TREE = {"w": X}


def test_jvp_over_trees() -> None:
    close(
        sf.jvp(of_tree, (TREE, Y), ({"w": Y}, X)), torch.func.jvp(of_tree, (TREE, Y), ({"w": Y}, X))
    )


def test_a_primal_may_be_expanded() -> None:
    fn = lambda x: x.sin().cumsum(0) @ Y.T
    wide, own = X[0].expand(5, 3), X[0].expand(5, 3).contiguous()
    wanted = torch.func.jvp(fn, (own,), (Y,))
    close(sf.jvp(fn, (wide,), (Y,)), wanted)
    close(sf.jit(lambda x: sf.jvp(fn, (x.expand(5, 3),), (Y,)), backend="aten")(X[0]), wanted)
    close(sf.linearize(fn, wide)[1](Y), wanted[1])
    close(sf.jacfwd(fn)(wide), torch.func.jacfwd(fn)(own))
    loss = lambda x: fn(x).sum()
    close(sf.hessian(loss)(wide), torch.func.hessian(loss)(own))


def test_vjp_over_trees_called_twice() -> None:
    value, pull = sf.vjp(of_tree, TREE, Y)
    wanted, wanted_pull = torch.func.vjp(of_tree, TREE, Y)
    close(value, wanted)
    for k in (1.0, 2.0):
        cotangent = {"s": value["s"] * k, "t": value["t"] - k}
        close(pull(cotangent), wanted_pull(cotangent))


def test_linearize_is_the_tangent_at_that_point() -> None:
    value, push = sf.linearize(of_tree, TREE, Y)
    close((value, push({"w": Y}, X)), torch.func.jvp(of_tree, (TREE, Y), ({"w": Y}, X)))


def test_auxiliary_data_comes_along() -> None:
    fn = lambda x: (x**2, {"twice": 2 * x, "k": 3, "none": None})
    aux = {"twice": 2 * X[0], "k": 3, "none": None}
    for made in (sf.jacrev, sf.jacfwd):
        rows, found = made(fn, has_aux=True)(X[0])
        close(rows, torch.diag(2 * X[0]))
        assert (found["k"], found["none"]) == (3, None) and torch.equal(
            found["twice"], aux["twice"]
        )
    value, tangent, found = sf.jvp(fn, (X[0],), (Y[0],), has_aux=True)
    close((value, tangent, found["twice"]), (X[0] ** 2, 2 * X[0] * Y[0], aux["twice"]))
    value, pull, found = sf.vjp(fn, X[0], has_aux=True)
    close((value, pull(Y[0])[0], found["twice"]), (X[0] ** 2, 2 * X[0] * Y[0], aux["twice"]))


def test_third_order() -> None:
    fn = lambda x: x**4
    third = sf.grad(sf.grad(sf.grad(fn)))
    close(third(torch.tensor(2.0, dtype=torch.float64)), torch.tensor(48.0, dtype=torch.float64))
    close(sf.vmap(third)(X[0]), 24 * X[0])
    close(sf.jacfwd(sf.jacrev(sf.jacfwd(lambda x: x**4)))(X[0])[0, 0, 0, 0], 24 * X[0, 0])


PAIRED = {**SHAPED, "vmap": lambda m, f: m.vmap(lambda row: f(row[None])[0])}
FUNCTIONS: dict[str, Shaped] = {
    "pointwise": lambda x: torch.sin(x) * x,
    "normalised": lambda x: torch.log_softmax(x, -1) * torch.tanh(x),
    "attending": lambda x: torch.softmax(x @ x.mT, -1) @ x,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(PAIRED, PAIRED)))
def test_every_ordered_pair_equals_torch_func_sharded_and_not(
    outer: str, inner: str, function: str
) -> None:
    ours, wanted = (
        PAIRED[outer](sf, PAIRED[inner](sf, FUNCTIONS[function])),
        PAIRED[outer](torch.func, PAIRED[inner](torch.func, FUNCTIONS[function]))(X),
    )
    world = list(WORLDS)[(list(PAIRED).index(outer) + list(PAIRED).index(inner)) % len(WORLDS)]
    sizes, placement = WORLDS[world]
    with sf.fake_world(torch.Size(sizes).numel()):
        mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
        close(sf.full(sf.shard(ours, mesh, placement, backend="aten")(X)), wanted)


@pytest.mark.parametrize("inner", PAIRED)
@pytest.mark.parametrize("world", WORLDS)
def test_a_transform_of_a_sharded_function_equals_the_plain_one(world: str, inner: str) -> None:
    sizes, placement = WORLDS[world]
    with sf.fake_world(torch.Size(sizes).numel()):
        mesh = sf.make_mesh(sizes, ("a", "b")[: len(sizes)])
        fn = sf.shard(FUNCTIONS["attending"], mesh, placement, backend="aten")
        outer = sf.shard(PAIRED[inner](sf, fn), mesh, placement, backend="aten")
        close(sf.full(outer(X)), PAIRED[inner](torch.func, FUNCTIONS["attending"])(X))


def test_alone_they_run_as_captured_and_capture_once() -> None:
    for name, made in PAIRED.items():
        if name == "bucketed_grad":  # here it is made anew, of a new function, at every call
            continue
        fn = made(sf, FUNCTIONS["pointwise"])
        close(fn(X), made(torch.func, FUNCTIONS["pointwise"])(X))
        before = dict(counts)
        fn(X)
        assert counts == before, name


def test_they_print_as_their_stack() -> None:
    def loss(x: Tensor) -> Tensor:
        return x.sum()

    made = {repr(f(loss)) for f in (sf.vmap, sf.jacrev, sf.jacfwd, sf.hessian)}
    assert made == {"vmap(loss)", "jacrev(loss)", "jacfwd(loss)", "hessian(loss)"}
    assert repr(sf.vmap(sf.grad(loss))) == "vmap(grad(loss))"


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "other sizes": (
        lambda: sf.vmap(of_tree)({"w": X}, Y[:4]),
        "vmap(of_tree): axis 0 of args[0]['w'] has size 5\n  axis 0 of args[1] has size 4\n  "
        "needed: mapped axes of equal sizes\n  try: set in_axes to None for arguments that "
        "all samples share, and map dims of equal size",
    ),
    "no such axis": (
        lambda: sf.vmap(of_tree, in_axes=(0, 2))({"w": X}, Y),
        "vmap(of_tree): args[1] has no dim 2: its shape is (5, 3)\n  needed: mapped axes of "
        "equal sizes\n  try: set in_axes to None for arguments that all samples share, and "
        "map dims of equal size",
    ),
    "nothing mapped": (
        lambda: sf.vmap(of_tree, in_axes=None)({"w": X}, Y),
        "vmap(of_tree): no argument is mapped, and axis_size is not given\n  needed: mapped "
        "axes of equal sizes\n  try: set in_axes to None for arguments that all samples "
        "share, and map dims of equal size",
    ),
    "no prefix": (
        lambda: sf.vmap(of_tree, in_axes=(0,))({"w": X}, Y),
        "vmap(of_tree), in_axes: (0,)\n  args: the axes lack [1]\n  needed: a prefix tree of "
        "axes\n  try: give one int or None for the whole tree, or a tree with the same "
        "structure",
    ),
    "tangents": (
        lambda: sf.jvp(of_tree, ({"w": X}, Y), ({"w": X}, Y[:2])),
        "jvp(of_tree): the tangents do not match the primals\n  tangents[1] is (2, 3) "
        "torch.float64, primals[1] is (5, 3) torch.float64\n  needed: the same tree, shapes "
        "and dtypes\n  try: make the tangents with tree_map over the primals, such as "
        "sf.tree_map(torch.zeros_like, ...)",
    ),
    "cotangent": (
        lambda: sf.vjp(of_tree, {"w": X}, Y)[1](X),
        "vjp(of_tree): the cotangents do not match the results\n  cotangent: the cotangents "
        "have a tensor, the results have a dict\n  needed: the same tree, shapes and "
        "dtypes\n  try: make the cotangents with tree_map over the results, such as "
        "sf.tree_map(torch.zeros_like, ...)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_with_every_argument(case: str) -> None:
    call, text = REFUSALS[case]
    with pytest.raises(sf.TreeError) as caught:
        call()
    assert without_line(caught.value) == text
