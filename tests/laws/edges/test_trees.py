"""Two trees are paired by key, whatever the order of insertion; trees that differ are refused
by path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from equality import close
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
Tree = Any


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def built(shape: Any, seed: int) -> Tree:
    """A tree of vectors of three from its plan: a number is a leaf."""
    if isinstance(shape, dict):
        return {
            key: built(child, seed + 7 * i + 1)
            for i, (key, child) in enumerate(sorted(shape.items()))
        }
    if isinstance(shape, list):
        return [built(child, seed + 5 * i + 2) for i, child in enumerate(shape)]
    return values(3, seed=seed + shape)


def shuffled(tree: Tree, turn: int) -> Tree:
    """The same tree with the keys of every dict in another order."""
    if isinstance(tree, dict):
        keys = sorted(tree)
        keys = keys[turn % len(keys) :] + keys[: turn % len(keys)]
        return {key: shuffled(tree[key], turn) for key in reversed(keys)}
    return [shuffled(child, turn) for child in tree] if isinstance(tree, list) else tree


def weighted(tree: Tree) -> Tensor:
    """A number that tells every leaf from every other, by its path."""
    if isinstance(tree, dict):
        return sum(
            ((ord(key[0]) % 7 + 1) * weighted(tree[key]) for key in sorted(tree)), start=zero()
        )
    if isinstance(tree, list):
        return sum(((i + 2) * weighted(child) for i, child in enumerate(tree)), start=zero())
    return (tree * tree).sum() + 3 * tree[0]


def zero() -> Tensor:
    return torch.zeros((), dtype=F64)


def doubled(tree: Tree) -> Tree:
    return sf.tree_map(lambda x: 2 * x, tree)


def assert_same(got: Tree, wanted: Tree) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_same(mine, theirs)
    else:
        close(got, wanted)


def squares(tree: Tree) -> Tree:
    return sf.tree_map(lambda x: x * x, tree)


def ruled_vjp(turn: int) -> Any:
    """A custom_vjp whose fwd and bwd return their dicts in other orders than the function."""
    fn = sf.custom_vjp(squares)
    backward = lambda kept, g: (shuffled(sf.tree_map(lambda x, c: 2 * x * c, kept, g), turn + 1),)
    fn.defvjp(lambda tree: (shuffled(squares(tree), turn), tree), backward)
    return fn


def ruled_jvp(turn: int) -> Any:
    """A custom_jvp whose rule returns its dicts in other orders than the function."""
    fn = sf.custom_jvp(squares)

    def rule(primals: Any, tangents: Any) -> Any:
        dots = sf.tree_map(lambda x, t: 2 * x * t, primals[0], tangents[0])
        return shuffled(squares(primals[0]), turn), shuffled(dots, turn + 1)

    fn.defjvp(rule)
    return fn


def stepping(turn: int) -> Callable[[Tree, Tensor], Any]:
    return lambda c, x: (shuffled(sf.tree_map(lambda v: v + x, c), turn), None)


def growing(turn: int) -> Callable[[Tree], Tree]:
    return lambda c: shuffled(sf.tree_map(lambda v: v + 1, c), turn)


def batches(tree: Tree, n: int) -> Tree:
    return sf.tree_map(lambda x: torch.stack([x * (i + 1) for i in range(n)]), tree)


def axes_like(tree: Tree) -> Tree:
    return sf.tree_map(lambda x: 0, tree)


ROWS = torch.arange(2.0, dtype=F64)
# Each: (tree, another tree like it, a turn) -> (with keys in another order, in one order).
PAIRS: dict[str, Callable[[Tree, Tree, int], tuple[Any, Any]]] = {
    "jvp": lambda t, d, k: (
        sf.jvp(weighted, (t,), (shuffled(d, k),)),
        torch.func.jvp(weighted, (t,), (d,)),
    ),
    "vjp": lambda t, d, k: (
        sf.vjp(squares, t)[1](shuffled(d, k))[0],
        sf.tree_map(lambda x, c: 2 * x * c, t, d),
    ),
    "vjp under jit": lambda t, d, k: (
        sf.jit(lambda x, c: sf.vjp(squares, x)[1](c)[0], backend="aten")(t, shuffled(d, k)),
        sf.tree_map(lambda x, c: 2 * x * c, t, d),
    ),
    "linearize": lambda t, d, k: (
        sf.linearize(weighted, t)[1](shuffled(d, k)),
        torch.func.jvp(weighted, (t,), (d,))[1],
    ),
    "custom_vjp": lambda t, d, k: (
        sf.grad(lambda x: weighted(ruled_vjp(k)(x)))(t),
        torch.func.grad(lambda x: weighted(squares(x)))(t),
    ),
    "custom_jvp": lambda t, d, k: (
        sf.jvp(lambda x: weighted(ruled_jvp(k)(x)), (t,), (d,)),
        torch.func.jvp(lambda x: weighted(squares(x)), (t,), (d,)),
    ),
    "custom_jvp, transposed": lambda t, d, k: (
        sf.grad(lambda x: weighted(ruled_jvp(k)(x)))(t),
        torch.func.grad(lambda x: weighted(squares(x)))(t),
    ),
    "cond": lambda t, d, k: (sf.cond(torch.tensor(False), lambda: t, lambda: shuffled(d, k)), d),
    "scan": lambda t, d, k: (sf.scan(stepping(k), t, ROWS)[0], sf.tree_map(lambda x: x + 1, t)),
    "while_loop": lambda t, d, k: (
        sf.while_loop(lambda c: c["a"][0] < 1, growing(k), {"a": zero().reshape(1), "t": t})["t"],
        sf.tree_map(lambda x: x + 1, t),
    ),
    "in_axes": lambda t, d, k: (
        sf.vmap(weighted, in_axes=(shuffled(axes_like(t), k),))(batches(t, 2)),
        torch.stack([weighted(t), weighted(sf.tree_map(lambda x: 2 * x, t))]),
    ),
    "out_axes": lambda t, d, k: (
        sf.vmap(squares, out_axes=shuffled(axes_like(t), k))(batches(t, 2)),
        squares(batches(t, 2)),
    ),
    "tree_map": lambda t, d, k: (
        sf.tree_map(torch.sub, t, shuffled(d, k)),
        sf.tree_map(torch.sub, t, d),
    ),
    "the order that a function reads": lambda t, d, k: (
        [ordered(shuffled(t, i)) for i in (k, k + 1, k)],
        [order(shuffled(t, i)) for i in (k, k + 1, k)],
    ),
    "the order of keywords": lambda t, d, k: (
        [keywords(**shuffled({"a": t, "b": d}, i)) for i in (0, 1, 0)],
        [spread(**shuffled({"a": t, "b": d}, i)) for i in (0, 1, 0)],
    ),
}


def order(tree: Tree) -> Tensor:
    """What depends on the order in which a dict was filled."""
    if isinstance(tree, dict):
        return sum(((i + 1) * order(child) for i, child in enumerate(tree.values())), start=zero())
    return sum(map(order, tree), start=zero()) if isinstance(tree, list) else tree.sum()


def spread(**trees: Tree) -> Tensor:
    return order(dict(trees))


ordered = sf.jit(order, backend="aten")
keywords = sf.jit(spread, backend="aten")


SHAPES = st.recursive(
    st.integers(0, 3),
    lambda inner: (
        st.dictionaries(st.sampled_from("awbx"), inner, min_size=2, max_size=3)
        | st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=4,
).filter(lambda shape: isinstance(shape, dict))


@pytest.mark.parametrize("pair", PAIRS)
@given(SHAPES, st.integers(0, 3))
@examples(2)
def test_trees_are_paired_by_key(pair: str, shape: Any, turn: int) -> None:
    tree, other = built(shape, 1), built(shape, 100)
    got, wanted = PAIRS[pair](tree, other, turn)
    assert_same(got, wanted)


def lacking(tree: Tree) -> Tree:
    return dict(list(tree.items())[1:])


MUTATIONS: dict[str, Callable[[Tree], Tree]] = {
    "a key less": lacking,
    "a key more": lambda t: {**t, "new": torch.ones(3, dtype=F64)},
    "another key": lambda t: {**lacking(t), "new": next(iter(t.values()))},
    "a list for a dict": lambda t: list(t.values()),
    "a leaf for the tree": lambda t: torch.ones(3, dtype=F64),
    "another dtype": lambda t: sf.tree_map(lambda x: x.float(), t),
    "another shape": lambda t: sf.tree_map(lambda x: x[:2], t),
    "a number": lambda t: sf.tree_map(lambda x: 1.0, t),
}


def with_bwd(mutate: Callable[[Tree], Tree]) -> Any:
    fn = sf.custom_vjp(squares)
    fn.defvjp(lambda t: (squares(t), t), lambda kept, g: (mutate(g),))
    return fn


def with_fwd(mutate: Callable[[Tree], Tree]) -> Any:
    fn = sf.custom_vjp(squares)
    fn.defvjp(lambda t: (mutate(squares(t)), t), lambda kept, g: (g,))
    return fn


def with_rule(mutate: Callable[[Tree], Tree]) -> Any:
    fn = sf.custom_jvp(squares)
    fn.defjvp(lambda primals, tangents: (squares(primals[0]), mutate(tangents[0])))
    return fn


REFUSED: dict[str, Callable[[Tree, Callable[[Tree], Tree]], Any]] = {
    "jvp": lambda t, m: sf.jvp(weighted, (t,), (m(t),)),
    "vjp": lambda t, m: sf.vjp(squares, t)[1](m(t)),
    "linearize": lambda t, m: sf.linearize(weighted, t)[1](m(t)),
    "bwd": lambda t, m: sf.grad(lambda x: weighted(with_bwd(m)(x)))(t),
    "fwd": lambda t, m: sf.grad(lambda x: weighted(with_fwd(m)(x)))(t),
    "custom_jvp": lambda t, m: sf.jvp(lambda x: weighted(with_rule(m)(x)), (t,), (t,)),
    "cond": lambda t, m: sf.cond(torch.tensor(True), lambda: t, lambda: m(t)),
    "scan": lambda t, m: sf.scan(lambda c, x: (m(c), None), t, ROWS),
    "while_loop": lambda t, m: sf.while_loop(lambda c: weighted(c) < 0, m, t),
}


CASES = [
    (call, mutation)
    for i, call in enumerate(REFUSED)
    for j, mutation in enumerate(MUTATIONS)
    if (i + j) % 3 == 0
]


@pytest.mark.parametrize(("call", "mutation"), CASES)
def test_a_tree_that_differs_is_refused_with_the_users_line(call: str, mutation: str) -> None:
    tree = {"b": values(3, seed=1), "a": {"x": values(3, seed=2), "w": values(3, seed=3)}}
    with pytest.raises(sf.TreeError) as caught:
        REFUSED[call](tree, MUTATIONS[mutation])
    assert caught.value.source is not None and caught.value.source.startswith(__file__)
    assert caught.value.fix


def test_placements_are_paired_by_key() -> None:
    x = {"w": values(4, 2, seed=1), "b": values(4, seed=2)}
    where = {"b": P("dp"), "w": P(None, "dp")}
    with simulated(dp=2) as mesh:
        placed = sf.distribute(x, mesh, where)
        assert [str(placed[key].placements[0]) for key in ("w", "b")] == ["S(1)", "S(0)"]
        out = sf.shard(lambda t: t, mesh, (where,), shuffled(where, 0), backend="aten")(x)
        assert [str(out[key].placements[0]) for key in ("w", "b")] == ["S(1)", "S(0)"]
        pinned = sf.shard(lambda t: sf.constrain(doubled(t), where), mesh, backend="aten")(x)
        assert [str(pinned[key].placements[0]) for key in ("w", "b")] == ["S(1)", "S(0)"]
        per_rank = sf.shard_map(doubled, mesh, (where,), where, backend="aten")(x)
        assert_same(sf.full(per_rank), doubled(x))


def test_a_batch_may_hold_None_and_aux_numbers() -> None:
    loss = lambda w, batch: ((w * batch["x"]).mean(), {"n": 2, "none": None})
    x = values(4, seed=3)
    grads, aux = sf.accumulate(sf.grad(loss, has_aux=True), 2)(
        torch.tensor(2.0, dtype=F64), {"x": x, "mask": None}
    )
    assert_same(grads, x.mean())
    assert_same(aux["n"], torch.tensor([2, 2]))
    assert aux["none"] is None
