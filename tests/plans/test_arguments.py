"""The placements of arguments as text that can be pasted."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P


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
