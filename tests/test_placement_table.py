"""The table of placements: a dict for every use, and what it prints. The placements of arguments
are text that can be pasted.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import shardfn as sf
from shardfn import P, ShapeDtype

PARAMS = {
    "layers.0.w": ShapeDtype((5, 4)),
    "layers.1.w": ShapeDtype((5, 4)),
    "layers.2.w": ShapeDtype((5, 4)),
    "head": ShapeDtype(()),
}
PLAN = {"layers.[01].w": P("dp", "tp"), "**": P()}


def test_equal_layers_share_a_row_and_uneven_shards_count_as_the_largest() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        text = str(sf.placements(PARAMS, PLAN, mesh=mesh))
    assert text == (
        "path        tensors  shape  dtype    placement      bytes a rank\n"
        "layers.*.w  2        5x4    float32  P('dp', 'tp')  48 B\n"
        "layers.2.w  1        5x4    float32  P()            80 B\n"
        "head        1        ()     float32  P()            4 B\n"
        "4 tensors on (dp=2, tp=2): 244 B, 132 B a rank"
    )


def test_a_rank_has_the_bytes_of_its_own_stages() -> None:
    plan = {
        "layers.0.w": P("tp", pp=0),
        "layers.1.w": P("tp", pp=0),
        "layers.2.w": [sf.Replicate(), sf.Stage(1, chunk=2)],
        "head": P(),
    }
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("tp", "pp"))
        where = sf.placements(PARAMS, plan, mesh=mesh)
        assert where.nbytes == 100
        both = {"layers.*.w": P(pp=0, tp=1), "head": P(tp=0)}
        assert sf.placements(PARAMS, both, mesh=mesh).nbytes == 240
    assert str(where) == (
        "path        tensors  shape  dtype    placement                         bytes a rank\n"
        "layers.*.w  2        5x4    float32  P('tp', pp=0)                     96 B\n"
        "layers.2.w  1        5x4    float32  [Replicate(), Stage(1, chunk=2)]  80 B\n"
        "head        1        ()     float32  P()                               4 B\n"
        "4 tensors on (tp=2, pp=2): 244 B, at most 100 B a rank"
    )


def test_two_axes_on_one_dim_share_it() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        for spec in (P(("dp", "tp")), P(("tp", "dp")), P(("dp*2", "tp"))):
            where = sf.placements({"w": ShapeDtype((8,))}, {"w": spec}, mesh=mesh)
            assert str(where).endswith("32 B, 8 B a rank")


def test_without_a_mesh_it_shows_global_bytes() -> None:
    lines = str(sf.placements(PARAMS, PLAN)).splitlines()
    assert lines[0].split()[-1] == "bytes"
    assert lines[1].split()[-2:] == ["160", "B"]
    assert lines[-1] == "4 tensors, 244 B"


def test_its_repr_is_that_of_a_dict() -> None:
    where = sf.placements({"w": ShapeDtype((2,))}, {"w": P("tp")})
    assert repr(where) == "{'w': P('tp')}"


def test_copies_pickles_and_maps_are_the_same_placements() -> None:
    where = sf.placements(PARAMS, PLAN)
    for twin in (copy.deepcopy(where), pickle.loads(pickle.dumps(where))):
        assert twin == where and str(twin) == str(where)
    mapped = sf.tree_map(lambda spec: spec, where)
    assert type(mapped) is dict and mapped == where


def test_placements_in_place_of_others_keep_the_table() -> None:
    where = sf.placements(PARAMS, PLAN) | {"head": None, "other": P("dp")}
    assert where["head"] is None and where["layers.0.w"] == P("dp", "tp")
    row = str(where).splitlines()[3]
    assert row.split() == ["head", "1", "()", "float32", "None", "4", "B"]
    assert "other" in str(where)


def test_a_tree_prints_by_path() -> None:
    tree = {"a": {"w": ShapeDtype((2,))}, "b": [ShapeDtype((3,))]}
    text = str(sf.placements(tree, {"**": P("tp")}))
    assert "\na.w " in text and "\nb.0 " in text


@pytest.mark.parametrize("plan", ["layers.*.w", "layers.0.w"])
def test_entries_that_give_no_placement_stand_under_the_table(plan: str) -> None:
    styles = {"mlp": "moe_tp_experts", plan: "rowwise", "gate": "colwise"}
    text = str(sf.placements(PARAMS, styles, axis="tp"))
    assert text.endswith(
        "styles for activations only, which sharding propagation places: 'mlp'\n"
        "entries that match no parameter: 'gate'"
    )


def double(tree, n, x):
    return sf.tree_map(lambda y: y * n, tree), x


TREE = {"a": [torch.ones(4, 3), torch.ones(4)], "b": torch.ones(2, 6)}
X = torch.ones(8)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        (({"a": P("dp"), "b": P()}, None, P("dp")), "({'a': P('dp'), 'b': P()}, None, P('dp'))"),
        ((P("dp"), None, P()), "(P('dp'), None, P())"),
        (
            ({"a": [P("dp"), P()], "b": P(None, "dp")}, None, None),
            "({'a': [P('dp'), P()], 'b': P(None, 'dp')}, None, P())",
        ),
    ],
)
def test_the_text_is_the_placements(places, text: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        found = sf.shard(double, mesh, places).lower(TREE, 3, X).placements
        assert found.text() == text
        again = sf.shard(double, mesh, eval(text))
        assert again.lower(TREE, 3, X).placements.in_placements == found.in_placements


def test_the_table_has_a_row_for_each_argument() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        low = sf.shard(double, mesh, (P("dp"), None, P())).lower(TREE, 3, X)
        lines = str(low.placements).splitlines()
    assert lines[0] == "in_placements = (P('dp'), None, P())"
    assert [line.split()[0] for line in lines[2:6]] == [
        "tree['a'][0]",
        "tree['a'][1]",
        "tree['b']",
        "x",
    ]
    assert lines[-1] == "4 tensors on (dp=2): 144 B, 88 B a rank"


def with_keywords(x, *more, tree=None, k, **rest):
    return x + k + sum(more) + sum(rest.values()) + (0 if tree is None else tree["a"][0])


CALLS = {
    "a keyword": ((X,), {"k": X}, "{'x': P('dp'), 'k': P()}"),
    "others": (
        (X, X, X),
        {"k": X, "z": X},
        "{'x': P('dp'), 'more': (P('dp'), P()), 'k': P(), 'z': P()}",
    ),
    "a tree": (
        (X,),
        {"tree": {"a": [X, 3]}, "k": X},
        "{'x': P('dp'), 'k': P(), 'tree': {'a': [P('dp'), None]}}",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_text_of_a_call_with_keywords_names_each_argument(call: str) -> None:
    args, kwargs, text = CALLS[call]
    given = {"x": P("dp"), "more": (P("dp"), P())[: len(args) - 1], "tree": P("dp")}
    given = {name: part for name, part in given.items() if name in text}
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        found = sf.shard(with_keywords, mesh, given).lower(*args, **kwargs).placements
        assert eval(found.text()) == eval(text)
        again = sf.shard(with_keywords, mesh, eval(found.text())).lower(*args, **kwargs)
        assert str(again.placements) == str(found)
