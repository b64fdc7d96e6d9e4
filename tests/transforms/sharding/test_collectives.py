"""Collectives by axis name: each, under every transform, against the same computation on whole
arrays in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor
from worlds import simulated

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(11)
WORLDS = {"2": ((2,), ("a",)), "3": ((3,), ("a",)), "2 x 4": ((2, 4), ("a", "b"))}


def example(n: int) -> Tensor:
    """(2n, 3n): both dims can be cut in n pieces."""
    return torch.randn(
        2 * n, 3 * n, generator=torch.Generator().manual_seed(n), dtype=torch.float64
    )


def rows(x: Tensor, n: int) -> Tensor:
    """The number of the rank that has each row, as a column."""
    return torch.arange(n, dtype=x.dtype).repeat_interleave(x.shape[0] // n)[:, None]


# name: (per-rank code of (x, axes), how the result is cut, the same of the whole x and n ranks)
Case = tuple[Callable[[Tensor, Any], Tensor], P, Callable[[Tensor, int], Tensor]]
CASES: dict[str, Case] = {
    "psum": (lambda x, a: x * sf.psum(x.sin().sum(0), a), P("a"), lambda x, n: x * x.sin().sum(0)),
    "pmean": (
        lambda x, a: x.sin() - sf.pmean(x.mean(0), a),
        P("a"),
        lambda x, n: x.sin() - x.mean(0),
    ),
    "pmax": (lambda x, a: x * sf.pmax(x.amax(0), a), P("a"), lambda x, n: x * x.amax(0)),
    "pmin": (
        lambda x, a: x * sf.pmin(x, a).sum(),
        P("a"),
        lambda x, n: x * x.unflatten(0, (n, -1)).amin(0).sum(),
    ),
    "all_gather tiled": (
        lambda x, a: x @ sf.all_gather(x, a, tiled=True).T.sin(),
        P("a"),
        lambda x, n: x @ x.T.sin(),
    ),
    "all_gather dim 1": (
        lambda x, a: sf.all_gather(x.sin(), a, axis=1, tiled=True),
        P(),
        lambda x, n: torch.cat(x.sin().chunk(n), 1),
    ),
    "all_gather stacked": (
        lambda x, a: x * sf.all_gather(x, a, axis=-1).sin().sum((0, 2)),
        P("a"),
        lambda x, n: x * torch.stack(x.chunk(n), -1).sin().sum((0, 2)),
    ),
    "psum_scatter tiled": (
        lambda x, a: sf.psum_scatter(x.sin(), a, scatter_dimension=1, tiled=True) ** 2,
        P(None, "a"),
        lambda x, n: x.sin().unflatten(0, (n, -1)).sum(0) ** 2,
    ),
    "psum_scatter": (
        lambda x, a: sf.psum_scatter(x.sin().unflatten(1, (-1, 3)), a, scatter_dimension=1) ** 2,
        P(None, "a"),
        lambda x, n: x.sin().unflatten(0, (n, -1)).sum(0) ** 2,
    ),
    "all_to_all tiled": (
        lambda x, a: sf.all_to_all(x, a, 1, 0, tiled=True).sin(),
        P(None, "a"),
        lambda x, n: x.sin(),
    ),
    "all_to_all one dim": (
        lambda x, a: sf.all_to_all(x.T, a, 0, 0, tiled=True).sin(),
        P("a"),
        lambda x, n: torch.cat(
            [torch.cat([p.T.chunk(n)[r] for p in x.chunk(n)]) for r in range(n)]
        ).sin(),
    ),
    "all_to_all": (
        lambda x, a: sf.all_to_all(x.unflatten(1, (-1, 3)), a, 1, 0).flatten(0, 1).sin(),
        P(None, "a"),
        lambda x, n: x.sin(),
    ),
    "ppermute": (
        lambda x, a: x * sf.ppermute(x, a, ring(sf.axis_size(a))),
        P("a"),
        lambda x, n: x * x.roll(2, 0),
    ),
    "ppermute of some": (
        lambda x, a: x.sin() + sf.ppermute(x.sin(), a, [(0, 1)]),
        P("a"),
        lambda x, n: x.sin() + torch.where(rows(x, n) == 1, x.sin().roll(2, 0), 0),
    ),
    "axis_index": (
        lambda x, a: x * (1 + sf.axis_index(a)) ** x,
        P("a"),
        lambda x, n: x * (1 + rows(x, n)) ** x,
    ),
}


def ring(n: int) -> list[tuple[int, int]]:
    return [(k, (k + 1) % n) for k in range(n)]


def squares(f: Any) -> Any:
    return lambda x: f(x).square().sum()


def tangent(x: Tensor) -> Tensor:
    return x.cos() + 1


# each of a function, by `sf` or by `torch.func`
TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "value": lambda m, f: f,
    "grad": lambda m, f: m.grad(squares(f)),
    "jvp": lambda m, f: lambda x: m.jvp(f, (x,), (tangent(x),))[1],
    "vjp": lambda m, f: lambda x: m.vjp(f, x)[1](f(x).cos())[0],
    "vmap": lambda m, f: lambda x: m.vmap(f, 2, 1)(torch.stack([x, x.sin()], 2)),
    "jacrev": lambda m, f: m.jacrev(f),
    "jacfwd": lambda m, f: m.jacfwd(f),
    "hessian": lambda m, f: m.hessian(squares(f)),
    "grad of jvp": lambda m, f: m.grad(lambda x: m.jvp(f, (x,), (tangent(x),))[1].square().sum()),
    "vmap of grad": lambda m, f: lambda x: m.vmap(m.grad(squares(f)))(torch.stack([x, x.sin()])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_under_a_transform_equals_whole_arrays(case: str, transform: str) -> None:
    body, out, whole = CASES[case]
    transformed = TRANSFORMS[transform]
    with sf.fake_world(3):
        mesh, x = sf.make_mesh((3,), ("a",)), example(3)
        fn = transformed(sf, sf.shard_map(lambda x: body(x, "a"), mesh, P("a"), out))
        got = sf.full(sf.shard(fn, mesh, backend="aten")(x))
        close(got, transformed(torch.func, lambda x: whole(x, 3))(x))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_and_its_gradient_over_all_axes_at_once(case: str, world: str) -> None:
    shape, names = WORLDS[world]
    body, out, whole = CASES[case]
    over = names if len(names) > 1 else names[0]
    placed = P(*(over if part == "a" else part for part in out.parts))
    with sf.fake_world(torch.Size(shape).numel()):
        mesh, n = sf.make_mesh(shape, names), torch.Size(shape).numel()
        fn = sf.shard_map(lambda x: body(x, over), mesh, P(over), placed, backend="aten")
        close(sf.full(fn(example(n))), whole(example(n), n))
        with sf.use_mesh(mesh):
            close(
                sf.full(sf.grad(squares(fn))(example(n))),
                torch.func.grad(squares(lambda x: whole(x, n)))(example(n)),
            )


@pytest.mark.parametrize("case", CASES)
def test_a_collective_over_one_axis_of_two_leaves_the_other_alone(case: str) -> None:
    body, out, whole = CASES[case]
    with sf.fake_world(8):
        mesh, x = sf.make_mesh((2, 4), ("b", "a")), example(4)
        with sf.use_mesh(mesh):
            fn = sf.shard_map(lambda x: body(x, "a"), None, P("a"), out, axis_names={"a"})
            loss = squares(fn)  # captured once for all placements
            for placed in (P("b"), P(None, "b"), P(("b", "a")), P("a", "b")):
                step = sf.shard(sf.value_and_grad(loss), mesh, placed, backend="aten")
                close(
                    sf.full(step(x)),
                    torch.func.grad_and_value(squares(lambda x: whole(x, 4)))(x)[::-1],
                )


@pytest.mark.parametrize(
    "case",
    [
        "psum",
        "pmax",
        "all_gather tiled",
        "psum_scatter tiled",
        "all_to_all tiled",
        "ppermute",
        "axis_index",
    ],
)
@pytest.mark.parametrize("transform", ["value", "grad", "jvp", "jacrev"])
def test_a_collective_over_samples_is_one_over_ranks(case: str, transform: str) -> None:
    """vmap(axis_name=) over n pieces stands for shard_map over n ranks."""
    body, out, whole = CASES[case]
    transformed = TRANSFORMS[transform]
    x, dim = example(3), out.parts.index("a")
    pieces = sf.vmap(lambda x: body(x, "i"), axis_name="i", out_axes=dim)
    fn = lambda x: pieces(x.unflatten(0, (3, -1))).flatten(dim, dim + 1)
    close(transformed(sf, fn)(x), transformed(torch.func, lambda x: whole(x, 3))(x))


@pytest.mark.parametrize("names", [("i", "dp"), ("dp", "i")])
@pytest.mark.parametrize("case", CASES)
def test_names_of_samples_and_of_ranks_mix(case: str, names: tuple[str, str]) -> None:
    body, out, whole = CASES[case]
    dim = out.parts.index("a") if "a" in out.parts else None
    x = example(6)

    def per_rank(x: Tensor) -> Tensor:  # of (2, rows, columns): the samples in front
        return sf.vmap(lambda x: body(x, names), axis_name="i")(x)

    def split(
        x: Tensor, dim: int
    ) -> Tensor:  # whole -> (3 samples, 2 ranks ...) in the order of the names
        sizes = (3, 2) if names[0] == "i" else (2, 3)
        parts = x.unflatten(dim, (*sizes, x.shape[dim] // 6)).movedim((dim, dim + 1), (0, 1))
        return parts if names[0] == "i" else parts.transpose(0, 1)

    with simulated(dp=2) as mesh:
        inside = sf.shard_map(
            lambda x: per_rank(x.squeeze(1)).unsqueeze(1),
            mesh,
            P(None, "dp"),
            P(None, "dp"),
            backend="aten",
        )
        got, wanted = sf.full(inside(split(x, 0))), whole(x, 6)
        close(got, wanted.expand(3, 2, *wanted.shape) if dim is None else split(wanted, dim))


def test_trees_and_numbers_are_summed_leaf_by_leaf() -> None:
    with simulated(dp=2) as mesh:
        body = lambda p: (
            sf.psum({"a": p["w"], "b": [1, p["w"] > 0]}, "dp"),
            sf.pmean((p["w"], 3), "dp"),
            sf.pmax(2.5, "dp"),
        )
        fn = sf.shard_map(body, mesh, P("dp"), P(), backend="aten")
        w = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
        (tree, means, largest) = sf.full(fn({"w": w}))
        close(tree["a"], torch.tensor([[4.0, 2.0]]))
        assert tree["b"][0] == 2 and tree["b"][1].tolist() == [[2, 1]]
        close(means[0], torch.tensor([[2.0, 1.0]]))
        assert means[1] == 3 and largest == 2.5


def test_sums_of_what_is_equal_send_nothing() -> None:
    with simulated(dp=3) as mesh:
        fn = sf.shard_map(
            lambda x: (sf.psum(x, "dp"), sf.pmean(x, "dp"), sf.pmax(x, "dp")),
            mesh,
            P(),
            P(),
            backend="aten",
        )
        x = torch.arange(4.0)
        close(sf.full(fn(x)), (3 * x, x, x))
        assert not fn.lower(x).collectives


def test_ties_share_the_derivative_of_a_maximum() -> None:
    x = torch.tensor([1.0, 3.0, 3.0], dtype=torch.float64)
    with simulated(dp=3) as mesh, sf.use_mesh(mesh):
        fn = sf.shard_map(lambda x: sf.pmax(x, "dp").squeeze(0) ** 2, None, P("dp"), P())
        close(sf.full(sf.grad(fn)(x)), torch.func.grad(lambda x: x.amax() ** 2)(x))
        close(
            sf.full(sf.jvp(fn, (x,), (x,))[1]),
            torch.func.jvp(lambda x: x.amax() ** 2, (x,), (x,))[1],
        )


def test_axis_size_is_a_number_and_axis_index_is_data() -> None:
    with simulated(a=2, b=4) as mesh:
        body = lambda x: (
            x * 0 + sf.axis_index(("b", "a")) * sf.axis_size("b") + sf.axis_size(("a", "b"))
        )
        fn = sf.shard_map(body, mesh, P(("a", "b")), P(("a", "b")), backend="aten")
        assert sf.full(fn(torch.zeros(8))).tolist() == [
            8.0 + 4 * (b * 2 + a) for a in range(2) for b in range(4)
        ]
        assert (
            len(set(fn.lower(torch.zeros(8)).programs.values())) == 1
        )  # one program for all ranks


def test_what_is_gathered_from_samples_may_be_written_to() -> None:
    def fn(x: Tensor) -> Tensor:
        every = sf.all_gather(x, "i")
        every += 1
        return every.sum(0) * x

    x = example(2)
    close(sf.vmap(fn, axis_name="i")(x), (x.sum(0) + len(x)) * x)


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "all_gather", "ppermute"])
def test_none_in_a_tree_stays_none(name: str) -> None:
    more = ([(0, 1), (1, 0)],) if name == "ppermute" else ()

    def local(x: Tensor) -> Tensor:
        found = getattr(sf, name)({"x": x, "none": (None, x)}, "a", *more)
        assert found["none"][0] is None
        return found["x"].sum().reshape(1) + found["none"][1].sum() * 0

    with simulated(a=2) as mesh:
        found = sf.shard_map(local, mesh, (P("a"),), P("a"))(torch.arange(4.0))
        alone = sf.shard_map(
            lambda x: getattr(sf, name)(x, "a", *more).sum().reshape(1), mesh, (P("a"),), P("a")
        )(torch.arange(4.0))
        close(sf.full(found), sf.full(alone))
