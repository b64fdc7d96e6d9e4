"""What a test over meshes is tried with, and the options that say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import shardfn as sf
from shardfn import P
from shardfn.proof.over_meshes.mesh_spaces import spaces

LIB: Any = sf


def meshes_of(worlds: Any, **options: Any) -> list[str]:
    return [str(space.axes) for space in spaces(worlds, **options)]


@pytest.mark.parametrize(
    ("worlds", "options", "meshes"),
    [
        (3, {}, ["(dp=3)"]),
        ("2..2", {"axes": ("a",)}, ["(a=2)"]),
        ([6, 4], {}, ["(dp=4)", "(dp=2, tp=2)", "(dp=6)", "(dp=2, tp=3)", "(dp=3, tp=2)"]),
        (range(1, 3), {"axes": ["a"]}, ["(a=1)", "(a=2)"]),
        ([2], {}, ["(dp=2)", "(dp=1, tp=2)", "(dp=2, tp=1)"]),
        ([{"x": 2, "y": 3}, {"y": 2}], {}, ["(y=2)", "(x=2, y=3)"]),
        (
            [4],
            {"shapes": {"x": (2,)}, "placements": P("tp"), "axes": ("dp", "tp")},
            ["(dp=1, tp=4)", "(dp=2, tp=2)", "(dp=4, tp=1)"],
        ),
        ([4], {"shapes": {"x": (2,)}, "placements": P("cp")}, ["(cp=4)"]),
        ([4], {"shapes": {"x": (2,)}, "placements": [[Shard(0), Replicate()]]}, ["(dp=2, tp=2)"]),
    ],
)
def test_worlds_are_meshes(worlds: Any, options: dict[str, Any], meshes: list[str]) -> None:
    assert meshes_of(worlds, **options) == meshes


def sizes_of(**options: Any) -> dict[str, tuple[int, ...]]:
    (space,) = spaces([{"dp": 3}], **options)
    return dict(space.sizes)


def test_dims_are_sizes_names_multiples_and_ranges() -> None:
    shapes = {"x": ("b", 4, "3*b", "0..2", [5, 1]), "y": {"z": [("b", "d")]}}
    sizes = sizes_of(shapes=shapes, sizes={"d": 7})
    assert sizes == {"b": (*range(1, 10),), "x.3": (0, 1, 2), "x.4": (1, 5), "d": (7,)}
    (space,) = spaces([{"dp": 3}], shapes=shapes)
    example = space.draw(lambda options: options[-1])
    assert example is not None
    assert [shape for _, shape, _ in example.placed()] == [(9, 4, 27, 2, 5), (9, 9)]


def test_default_sizes_grow_with_the_ranks() -> None:
    rows = spaces([1, 8, 64], shapes={"x": ("b",)}, axes=("a",))
    assert [dict(space.sizes)["b"][-1] for space in rows] == [9, 16, 16]


def test_empty_arguments_when_sizes_say_so() -> None:
    seen = []

    @sf.meshes([2, 3], shapes={"x": ("b", "d")}, sizes={"b": "0..1"}, examples=8)
    def test(mesh, x):
        seen.append(x.shape[0])
        y = sf.shard(lambda x: x.sum(0), mesh)(x)
        torch.testing.assert_close(sf.full(y), sf.full(x).sum(0))

    test()
    assert {*seen} == {0, 1}


def test_an_index_of_an_empty_dim_is_not_drawn() -> None:
    (space,) = spaces(
        [{"dp": 2}],
        shapes={"ids": ("n",), "w": ("v",)},
        sizes={"v": "0..1"},
        dtype={"ids": torch.int64},
        below={"ids": "v"},
    )
    assert space.draw(lambda options: options[0]) is None
    assert space.draw(lambda options: options[-1]) is not None


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            {"worlds": "8..1"},
            ["meshes, worlds: worlds is '8..1', a str", "needed: numbers of ranks of 1 or more"],
        ),
        ({"worlds": "8"}, ["worlds is '8', a str", 'try: @sf.meshes("1..8", shapes=...)']),
        ({"worlds": []}, ["worlds is [], a list"]),
        ({"worlds": [0]}, ["worlds is [0], a list"]),
        ({"worlds": [2, None]}, ["worlds is [2, None], a list"]),
        ({"worlds": {"dp": 0}}, ["worlds is {'dp': 0}, a dict"]),
        ({"worlds": 2**21}, ["worlds is 2097152, a int"]),
        ({"worlds": lambda mesh: 0}, ["meshes, worlds: worlds is <function"]),
        ({"shapes": ["b"]}, ["meshes, shapes: shapes is ['b'], a list", "needed: a dict from"]),
        (
            {"shapes": {"x": "b", "y": ("2..1", -1, None)}},
            [
                "meshes, shapes: x is 'b', a str",
                "dim 0 of y is '2..1', a str",
                "dim 1 of y is -1, a int",
                "dim 2 of y is None, a NoneType",
                "needed: tuples of dims, each a name, '3*name', a size, or a range of sizes "
                "such as '0..7'",
            ],
        ),
        (
            {"placements": "some"},
            ["meshes, placements: placements of x is 'some'", "needed: 'any', 'all', a placement"],
        ),
        ({"placements": []}, ["placements of x is [], a list"]),
        ({"placements": sf.auto}, ["placements of x is sf.auto"]),
        ({"placements": P("a", None, None)}, ["P('a', None, None) names dim 2 of x, but x has 2"]),
        ({"placements": [[Shard(2)]]}, ["[Shard(dim=2)] names dim 2 of x, but x has 2 dims"]),
        (
            {"placements": P("zz"), "axes": ("dp",)},
            ["P('zz') of x names axis 'zz'", "needed: axes of the meshes: dp"],
        ),
        ({"placements": {"y": "any"}}, ["placements names 'y'", "needed: arguments of shapes: x"]),
        (
            {"placements": [[Replicate()] * 4]},
            [
                "the lists of placements have an entry for each mesh axis",
                "try: use sf.P, which names axes",
            ],
        ),
        (
            {"sizes": {"q": 3}},
            [
                "meshes, sizes: the argument sizes has the key 'q', but the argument shapes has no "
                "dim of this name"
            ],
        ),
        (
            {"sizes": {"b": "7..0"}},
            ["sizes of 'b' is '7..0', a str", "needed: a dict from names of dims"],
        ),
        ({"sizes": 3}, ["sizes is 3, a int"]),
        ({"axes": ("a", "a")}, ["meshes, axes: axes is ('a', 'a')", 'try: axes=("dp", "tp")']),
        ({"axes": "dp"}, ["axes is 'dp', a str"]),
        ({"dtype": float}, ["meshes, dtype: dtype of x is <class 'float'>"]),
        ({"dtype": {"q": torch.int8}}, ["dtype names 'q'"]),
        ({"below": 0.5}, ["meshes, below: below of x is 0.5", "needed: an int of 1 or more"]),
        (
            {"below": "q"},
            [
                "the argument below has 'q' for x, but the argument shapes has no dim of this name",
                "try: one of b, d",
            ],
        ),
        ({"examples": 0}, ["meshes, examples: examples is 0, a int"]),
        ({"seed": -1}, ["meshes, seed: seed is -1, a int"]),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], lines: list[str]) -> None:
    given = {"shapes": {"x": ("b", "d")}, **options}
    with pytest.raises(sf.ShardError) as error:
        LIB.meshes(**given)
    for line in lines:
        assert line in str(error.value)
