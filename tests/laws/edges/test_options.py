"""Every option of every public function: what is legal is taken as written, all else is refused
by name, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from message import without_line
from torch.distributed.tensor import Shard
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

DTYPE = torch.float64
A, B, C = (torch.tensor(x, dtype=DTYPE) for x in ([1.0, 2.0], [3.0, 5.0], [7.0, 11.0]))
ARGS = (A, B, C)


def product(a: Any, b: Any, c: Any) -> Any:
    return (a * b * b * c).sum()


number = st.integers(-5, 5)
odd = st.sampled_from([True, False, 1.0, 0.0, "0", None, "ab"])
argnums = st.one_of(
    number, odd, st.lists(st.one_of(number, number, number, odd), min_size=1, max_size=3).map(tuple)
)


def legal(numbers: Any, count: int) -> tuple[int, ...] | None:
    """The positions that argnums names; None if it is not legal."""
    every = numbers if isinstance(numbers, tuple) else (numbers,)
    if not all(type(n) is int and -count <= n < count for n in every):
        return None
    positions = tuple(n % count for n in every)
    return positions if len(set(positions)) == len(positions) else None


def within(nested: bool, call: Callable[[], Any]) -> Any:
    """The call on its own, or inside a jit."""
    return sf.jit(lambda x: (call(), x), backend="aten")(A)[0] if nested else call()


def check(nested: bool, call: Callable[[], Any], wanted: Any) -> None:
    """A call that is right, or that is refused by name where nothing is wanted."""
    if wanted is None:
        with pytest.raises(sf.ShardError):
            within(nested, call)
    else:
        assert_close(within(nested, call), wanted)


GRADIENTS = (B * B * C, 2 * A * B * C, A * B * B)
TAKE: dict[str, Callable[[Any], Any]] = {
    "grad": lambda n: sf.grad(product, argnums=n)(*ARGS),
    "value_and_grad": lambda n: sf.value_and_grad(product, argnums=n)(*ARGS)[1],
    "jacrev": lambda n: sf.jacrev(product, argnums=n)(*ARGS),
    "jacfwd": lambda n: sf.jacfwd(product, argnums=n)(*ARGS),
    "bucketed_grad": lambda n: sf.bucketed_grad(product, argnums=n)(*ARGS)[1],
}


@given(verb=st.sampled_from(list(TAKE)), numbers=argnums, nested=st.booleans())
@examples(45)
def test_argnums(verb: str, numbers: Any, nested: bool) -> None:
    found = legal(numbers, 3)
    chosen = None if found is None else tuple(GRADIENTS[n] for n in found)
    wanted = chosen if chosen is None or isinstance(numbers, tuple) else chosen[0]
    check(nested, lambda: TAKE[verb](numbers), wanted)


@given(numbers=argnums, nested=st.booleans())
@examples(8)
def test_argnums_of_hessian(numbers: Any, nested: bool) -> None:
    found = legal(numbers, 3)
    trace = lambda: sf.hessian(product, argnums=numbers)(*ARGS)
    flat = lambda: [x for row in trace() for x in row] if isinstance(numbers, tuple) else [trace()]
    wanted = None
    if found is not None:
        pairs = torch.func.hessian(product, argnums=found)(*ARGS)
        wanted = [x for row in pairs for x in row]
    check(nested, flat, wanted)


@given(numbers=argnums, nested=st.booleans())
@examples(25)
def test_nondiff_argnums(numbers: Any, nested: bool) -> None:
    found = legal(numbers, 3)
    still = found or ()

    def call() -> Any:
        fn = sf.custom_jvp(
            lambda *args: args[0] * 2 + args[1] * 3 + args[2] * 5, nondiff_argnums=numbers
        )
        rule = lambda *rest: (fn(*rest[0]) if len(rest) == 2 else rest[-2][0] * 0, rest[-1][0] * 7)
        fn.defjvp(rule)
        args = [2.0 if n in still else x for n, x in enumerate(ARGS)]
        return fn(*args)

    args = [2.0 if n in still else x for n, x in enumerate(ARGS)]
    wanted = None if found is None or len(found) == 3 else args[0] * 2 + args[1] * 3 + args[2] * 5
    if found is None or len(found) < 3:
        check(nested, call, wanted)


@given(numbers=argnums)
@examples(25)
def test_batch_argnums(numbers: Any) -> None:
    loss = lambda w, x, y: ((x @ w - y) ** 2).mean()
    w, x, y = (A, torch.arange(8.0, dtype=DTYPE).reshape(4, 2), torch.arange(4.0, dtype=DTYPE))
    if numbers is None:
        return  # the default
    call = lambda: sf.accumulate(sf.grad(loss), 2, batch_argnums=numbers)(w, x, y)
    found = legal(numbers, 3)
    if found is None or set(found) == {1, 2}:
        wanted = None if found is None else torch.func.grad(loss)(w, x, y)
        check(False, call, wanted)


@given(static=argnums, donated=argnums)
@examples(60)
def test_static_and_donated_argnums(static: Any, donated: Any) -> None:
    fn = lambda a, b, c: a * b + c
    wrong = legal(static, 3) is None or legal(donated, 3) is None
    frozen, given_away = set(legal(static, 3) or ()), set(legal(donated, 3) or ())
    args = [2.0 if n in frozen else x.clone() for n, x in enumerate(ARGS)]
    call = lambda: sf.jit(fn, backend="aten", static_argnums=static, donate_argnums=donated)(*args)
    if wrong or frozen & given_away:
        with pytest.raises(sf.ShardError):
            call()
        return
    wanted = fn(*[x if isinstance(x, float) else x.clone() for x in args])
    got = call()
    assert wanted == got if isinstance(wanted, float) else got.equal(wanted)
    for n in given_away - frozen:
        with pytest.raises(sf.ShardError, match="was donated"):
            args[n] + 1


parts = st.sampled_from(
    [
        None,
        "x",
        "y",
        ("x", "y"),
        ("y", "x"),
        ("x", "x"),
        ("x",),
        (),
        "z",
        3,
        True,
        (None,),
        ("x", 3),
        "",
        "x,y",
        "*",
    ]
)


def fits(spec: P) -> bool:
    """Whether a P places a tensor of two dims on a mesh with the axes x and y."""
    names = [
        n for p in spec.parts for n in (p if isinstance(p, tuple) else () if p is None else (p,))
    ]
    known = all(type(n) is str and n in ("x", "y") for n in names)
    return known and len(set(names)) == len(names) and len(spec.parts) <= 2


X = torch.arange(16.0, dtype=DTYPE).reshape(4, 4)
PLACE: dict[str, Callable[[Any, P], Any]] = {
    "in_placements": lambda m, p: sf.shard(lambda x: x + 1, m, p, backend="aten")(X),
    "out_placements": lambda m, p: sf.shard(lambda x: x + 1, m, None, p, backend="aten")(X),
    "constrain": lambda m, p: sf.shard(lambda x: sf.constrain(x + 1, p), m, backend="aten")(X),
    "constrain under grad": lambda m, p: sf.shard(
        sf.grad(lambda x: (sf.constrain(x, p) ** 2 / 2 + x).sum()), m, backend="aten"
    )(X),
    "nested in": lambda m, p: sf.shard(sf.shard(lambda x: x + 1, m, p), m, backend="aten")(X),
    "nested out": lambda m, p: sf.shard(sf.shard(lambda x: x + 1, m, None, p), m, backend="aten")(
        X
    ),
    "shard_map in": lambda m, p: sf.shard_map(lambda x: x + 1, m, p, p, backend="aten")(X),
    "shard_map nested": lambda m, p: sf.shard(
        sf.shard_map(lambda x: x + 1, m, p, p), m, backend="aten"
    )(X),
    "distribute": lambda m, p: sf.distribute(X + 1, m, p),
    "jit": lambda m, p: sf.jit(lambda x: sf.constrain(x + 1, p), backend="aten")(
        sf.distribute(X, m, P("x"))
    ),
}


@given(where=st.sampled_from(list(PLACE)), spec=st.lists(parts, max_size=3).map(lambda p: P(*p)))
@examples(50)
def test_axes_of_a_placement(where: str, spec: P) -> None:
    with simulated(x=2, y=2) as mesh:
        call = lambda: sf.full(PLACE[where](mesh, spec))
        in_order = ("y", "x") not in spec.parts or not where.startswith("shard_map")
        check(False, call, X + 1 if fits(spec) and in_order else None)


@given(axis=parts)
@examples(16)
def test_spmd_axis(axis: Any) -> None:
    with simulated(x=2, y=2) as mesh:
        call = lambda: sf.full(
            sf.shard(sf.vmap(lambda r: r + 1, spmd_axis=axis), mesh, backend="aten")(X)
        )
        check(False, call, X + 1 if fits(P(axis)) else None)


@pytest.mark.parametrize("spec", [P(("x", "x")), P("x", "x"), P(3), P("z")], ids=repr)
def test_from_local_and_the_other_doors_say_the_same(spec: P) -> None:
    with simulated(x=2, y=2) as mesh:
        said = []
        for call in (lambda: sf.from_local(X, mesh, spec), lambda: sf.distribute(X, mesh, spec)):
            with pytest.raises(sf.PlacementError) as caught:
                call()
            said.append(str(caught.value))
        assert all(repr(spec) in text for text in said)


def test_axes_in_another_order_than_the_meshs_have_shards_that_dtensor_has() -> None:
    with simulated(x=3, y=2) as mesh, pytest.raises(sf.PlacementError) as caught:
        sf.shard(lambda x: sf.constrain(x, P(("y", "x"))), mesh, backend="aten")(torch.ones(7, 2))
    assert without_line(caught.value) == (
        "constrain: P(('y', 'x')) shards dim 0 of size 7 over axes in another order than the "
        "mesh's (x=3, y=2), in shards that DTensor cannot describe; pad it by 1, so that 2 "
        "divides it, or write ('x', 'y')\n  try: use P with axes of the mesh and one entry "
        "for each dim"
    )
    with pytest.raises(sf.PlacementError, match="uses axis 'x' twice"):
        sf.constrain(X, P(("x", "x")))


TREES: dict[str, Any] = {
    "another key": {"a": P(), "b": P(), "c": P()},
    "no key": {"a": P()},
    "a list": [P(), P()],
    "a text": "x",
    "a number": 3,
}


@pytest.mark.parametrize("case", list(TREES))
def test_a_tree_of_placements_that_does_not_fit(case: str) -> None:
    both = {"a": X, "b": X}
    twice = lambda d: {key: x * 2 for key, x in d.items()}
    with sf.fake_world(4):
        mesh, placed = sf.make_mesh((2, 2), ("x", "y")), TREES[case]
        calls = [
            lambda: sf.shard(twice, mesh, (placed,), backend="aten")(both),
            lambda: sf.shard(twice, mesh, None, placed, backend="aten")(both),
            lambda: sf.shard(lambda d: sf.constrain(twice(d), placed), mesh, backend="aten")(both),
            lambda: sf.shard(sf.shard(twice, mesh, (placed,)), mesh, backend="aten")(both),
            lambda: sf.shard(sf.shard(twice, mesh, None, placed), mesh, backend="aten")(both),
            lambda: sf.shard_map(twice, mesh, (placed,), P(), backend="aten")(both),
            lambda: sf.distribute(both, mesh, placed),
            lambda: sf.constrain(both, placed),
        ]
        for call in calls:
            with pytest.raises((sf.TreeError, sf.PlacementError)):
                call()


def test_shard_map_asks_for_in_placements() -> None:
    with simulated(x=4) as mesh:
        said = (
            "shard_map(<lambda>), in_placements: in_placements is missing, but the call has 1 "
            "arguments\n  needed: a placement for each\n  try: in_placements=P('axis') for a "
            "sharded argument, P() for a replicated one"
        )
        with pytest.raises(sf.TreeError) as caught:
            sf.shard_map(lambda x: x, mesh, out_placements=P(), backend="aten")(X)
        assert without_line(caught.value) == said
        inner = sf.shard(sf.shard_map(lambda x: x, mesh, None, P()), mesh, P("x"), backend="aten")
        with pytest.raises(sf.TreeError) as caught:
            inner(X)
        assert without_line(caught.value) == said
        assert sf.full(sf.shard_map(lambda x: x, mesh, P(), P(), backend="aten")(X)).equal(X)


class Named:
    """Static, and equal to all of its kind."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "x",
    [[3], {"k": 3}, {3}, bytearray(b"1"), torch.ones(1).numpy(), Named()],
    ids=lambda x: type(x).__name__,
)
def test_a_static_argument_without_a_hash_is_refused(x: Any) -> None:
    with pytest.raises(sf.TreeError) as caught:
        sf.jit(lambda a, b: a * 2, backend="aten", static_argnums=1)(A, x)
    assert f"jit(<lambda>): static argument 1 is a {type(x).__name__}, which has no hash" in str(
        caught.value
    )
    assert "needed: a hashable constant\n  try: pass a tuple in place of a list" in str(
        caught.value
    )


def test_static_and_donated_positions_that_do_not_fit_say_so() -> None:
    fn = lambda a, b=2.0: a * b
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: sf.jit(fn, donate_argnums=2),
            "donate_argnums is (2,), but the function takes 2 positional arguments",
        ),
        (
            lambda: sf.jit(fn, static_argnums=-3),
            "static_argnums is (-3,), but the function takes 2 positional arguments",
        ),
        (
            lambda: sf.jit(fn, donate_argnums=(0, 0)),
            "donate_argnums is (0, 0), which contains an argument twice",
        ),
        (lambda: sf.jit(fn, donate_argnums=True), "donate_argnums is True"),
        (
            lambda: sf.jit(fn, static_argnums=1, donate_argnums=1),
            "argument 1 is static and donated",
        ),
        (
            lambda: sf.jit(fn, static_argnums=1, donate_argnums=-1)(A, 3.0),
            "argument 1 is static and donated",
        ),
        (
            lambda: sf.jit(fn, static_argnums=1)(A, b=3.0),
            "static_argnums is (1,), but b is passed by keyword",
        ),
        (
            lambda: sf.jit(lambda *xs: xs[0], donate_argnums=3)(A),
            "donate_argnums is (3,), but the call has 1 positional arguments",
        ),
    ]
    for call, said in cases:
        with pytest.raises(sf.TreeError) as caught:
            call()
        assert said in str(caught.value) and "  try: " in str(caught.value)
    assert sf.jit(fn, backend="aten", static_argnums=1)(A).equal(A * 2)


def world(**options: Any) -> Any:
    return sf.fake_world(**{"n": 2, **options})


def entered(mesh: Any) -> None:
    with sf.use_mesh(mesh):
        pass


def scanned(**options: Any) -> Any:
    return sf.scan(lambda c, _: (c, c), A, None, **{"length": 2, **options})


REFUSED: dict[str, Callable[[Any], Any]] = {
    "fake_world n": lambda x: world(n=x),
    "fake_world rank": lambda x: world(rank=x),
    "fake_world numerics": lambda x: world(numerics=x),
    "use_mesh": entered,
    "make_mesh shape": lambda x: sf.make_mesh(x, ("x",)),
    "make_mesh sizes": lambda x: sf.make_mesh((x,), ("x",)),
    "make_mesh names": lambda x: sf.make_mesh((2,), x),
    "make_mesh name": lambda x: sf.make_mesh((2,), (x,)),
    "make_mesh device_type": lambda x: sf.make_mesh((2,), ("x",), x or 3),
    "shard mesh": lambda x: sf.shard(lambda a: a, x if x is not None else 3)(A),
    "shard backend": lambda x: sf.shard(lambda a: a, backend=x),
    "shard implicit_comm": lambda x: sf.shard(lambda a: a, implicit_comm=x),
    "shard_map mesh": lambda x: sf.shard_map(lambda a: a, x if x is not None else 3, P(), P())(A),
    "shard_map axis_names": lambda x: sf.shard_map(
        lambda a: a, sf.make_mesh((2,), ("x",)), P(), P(), axis_names=x or 3
    )(A),
    "distribute mesh": lambda x: sf.distribute(A, x, P()),
    "from_local mesh": lambda x: sf.from_local(A, x, P()),
    "from_local x": lambda x: sf.from_local(x, sf.make_mesh((2,), ("x",)), P()),
    "vmap axis_size": lambda x: sf.vmap(lambda a: a + 1, axis_size=x if x is not None else 0)(A),
    "vmap in_axes": lambda x: sf.vmap(lambda a: a + 1, in_axes=x)(A),
    "vmap out_axes": lambda x: sf.vmap(lambda a: a + 1, out_axes=x)(A),
    "vmap axis_name": lambda x: sf.vmap(
        lambda a: a + 1, axis_name=x if x not in (None, "no") else 3
    )(A),
    "scan length": lambda x: scanned(length=x),
    "scan reverse": lambda x: scanned(reverse=x if not isinstance(x, bool) else 1),
    "accumulate microbatches": lambda x: sf.accumulate(sf.grad(product), x),
    "checkpoint policy": lambda x: sf.checkpoint(lambda a: a, policy=x if x is not None else 3),
    "bucketed_grad cap": lambda x: sf.bucketed_grad(product, cap=x),
    "bucketed_grad max_in_flight": lambda x: sf.bucketed_grad(product, max_in_flight=x),
    "bucketed_grad reduce_dtype": lambda x: sf.bucketed_grad(
        product, reduce_dtype=x if x is not None else 3
    )(*ARGS),
    "grad has_aux": lambda x: sf.grad(product, has_aux=x if not isinstance(x, bool) else 1),
    "jacrev has_aux": lambda x: sf.jacrev(product, has_aux=x if not isinstance(x, bool) else 1),
    "grad fn": sf.grad,
    "vmap fn": sf.vmap,
    "jit fn": lambda x: sf.jit(x if x is not None else 3),
    "hessian fn": sf.hessian,
    "custom_vjp fn": sf.custom_vjp,
    "accumulate fn": lambda x: sf.accumulate(x, 2),
}


LEGAL = {
    ("fake_world numerics", "True"),
    ("make_mesh name", "'no'"),
    ("vmap in_axes", "-1"),
    ("vmap out_axes", "-1"),
}


@pytest.mark.parametrize("option", list(REFUSED))
def test_an_option_of_another_kind_is_refused(option: str) -> None:
    for x in (-1, 2.5, True, "no", None):
        if (option, repr(x)) in LEGAL:
            continue
        if option.startswith("fake_world"):
            with pytest.raises(sf.ShardError):
                REFUSED[option](x)
            continue
        with sf.fake_world(2), pytest.raises(sf.ShardError):
            REFUSED[option](x)


def test_a_dtensor_is_not_placed_a_second_time() -> None:
    with simulated(x=2) as mesh:
        placed = sf.distribute(X, mesh, P("x"))
        for call in (sf.distribute, sf.from_local):
            with pytest.raises(
                sf.PlacementError, match="is a DTensor, which already has placements"
            ):
                call(placed, mesh, Shard(0))
        with pytest.raises(sf.PlacementError, match=r"x\[1\] is torch.float32 on cpu"):
            sf.from_local([X, X.float()], mesh, Shard(0))
