"""Trees: leaves in order, paths as Python writes them, prefixes and their mismatches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import attrs
import optree
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from shardfn import _tree, tree_pairs


class Point(NamedTuple):
    x: Any
    y: Any


@attrs.frozen
class Box:
    inside: Any
    label: str = "box"


optree.register_pytree_node(
    Box,
    lambda box: ((box.inside,), box.label, ("inside",)),
    lambda label, children: Box(children[0], label),
    path_entry_type=optree.GetAttrEntry,
    namespace=_tree.NAMESPACE,
)

LEAVES = st.none() | st.integers(0, 9) | st.sampled_from(("a", 1.5))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, keys = (
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("wbxk"), inner, max_size=3),
    )
    return st.one_of(
        lists,
        lists.map(tuple),
        keys,
        keys.map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Box, inner),
    )


TREES = st.recursive(LEAVES, _containers, max_leaves=8)


@given(TREES)
@examples(80)
def test_unflatten_undoes_flatten(tree: Any) -> None:
    leaves, treedef = _tree.flatten(tree)
    assert _tree.unflatten(treedef, leaves) == tree
    assert _tree.leaves(tree) == leaves
    assert len(_tree.paths(tree)) == len(leaves) == treedef.num_leaves


@given(TREES)
@examples(80)
def test_a_path_reaches_its_leaf(tree: Any) -> None:
    for path, leaf in zip(_tree.paths(tree), _tree.leaves(tree), strict=True):
        assert eval(f"tree{path}", {"tree": tree}) == leaf


def test_none_is_a_leaf_and_an_empty_container_is_none() -> None:
    assert _tree.leaves({"a": None, "b": (), "c": [None, {}]}) == [None, None]
    assert _tree.flatten(None)[0] == [None]
    assert _tree.paths(()) == []


def test_paths_are_written_as_python_writes_them() -> None:
    tree = {"w": [1, Point(2, {"k": 3})], "b": (4,), "box": Box(5)}
    assert _tree.paths(tree) == [
        "['w'][0]",
        "['w'][1].x",
        "['w'][1].y['k']",
        "['b'][0]",
        "['box'].inside",
    ]
    assert _tree.paths(7) == [""]


def params_and(params: Any, *batch: Any, k: int = 1, **rest: Any) -> None:
    """A signature with every kind of parameter."""


CALLS = {
    "positional": ((({"w": 1},), {}), ["params['w']"]),
    "variable": ((([1], 2, (3, 4)), {}), ["params[0]", "batch[0]", "batch[1][0]", "batch[1][1]"]),
    "keywords": (((1,), {"k": 2}), ["params", "k"]),
    "other keywords, as given": (((1,), {"z": {"a": 2}, "b": 3}), ["params", "z['a']", "b"]),
    "by keyword": (((), {"params": [1]}), ["params[0]"]),
}


@pytest.mark.parametrize("case", list(CALLS))
def test_argument_paths_use_the_names_of_parameters(case: str) -> None:
    (args, kwargs), wanted = CALLS[case]
    assert _tree.argument_paths(params_and, args, kwargs) == wanted
    assert len(wanted) == len(_tree.leaves((args, kwargs)))


def test_argument_paths_of_defaults_methods_and_functions_without_a_signature() -> None:
    def with_default(a: Any, b: Any = 2, /, c: Any = 3) -> None:
        """Defaults that are not passed have no path."""

    class Model:
        def apply(self, x: Any) -> None:
            """self is bound."""

    assert _tree.argument_paths(with_default, ([1],), {}) == ["a[0]"]
    assert _tree.argument_paths(with_default, (1, 2), {"c": 3}) == ["a", "b", "c"]
    assert _tree.argument_paths(Model().apply, (1,), {}) == ["x"]
    assert _tree.argument_paths(dict, ([1], 2), {}) == ["args[0][0]", "args[1]"]
    assert _tree.argument_paths(with_default, (1, 2, 3, 4), {}) == [
        "args[0]",
        "args[1]",
        "args[2]",
        "args[3]",
    ], "a call that does not fit"


@given(TREES)
@examples(60)
def test_argument_paths_are_as_many_as_leaves(tree: Any) -> None:
    args, kwargs = (tree, [tree]), {"k": tree, "z": 1}
    assert len(_tree.argument_paths(params_and, args, kwargs)) == len(_tree.leaves((args, kwargs)))


def is_spec(x: Any) -> bool:
    return x is None or isinstance(x, str)


@given(TREES)
@examples(60)
def test_one_leaf_is_a_prefix_of_any_tree_and_a_tree_is_a_prefix_of_itself(tree: Any) -> None:
    n = len(_tree.leaves(tree))
    assert tree_pairs.broadcast_prefix("s", tree, is_spec) == ["s"] * n
    assert tree_pairs.broadcast_prefix(None, tree, is_spec) == [None] * n
    numbered = _tree.unflatten(_tree.flatten(tree)[1], [str(i) for i in range(n)])
    assert tree_pairs.broadcast_prefix(numbered, tree, is_spec) == [str(i) for i in range(n)]


def test_a_prefix_ends_where_it_likes() -> None:
    tree = {"layers": [{"w": 1, "b": 2}, {"w": 3, "b": 4}], "head": Point(5, 6)}
    prefix = {"layers": ["first", {"w": "w", "b": None}], "head": "head"}
    assert tree_pairs.broadcast_prefix(prefix, tree, is_spec) == [
        "first",
        "first",
        "w",
        None,
        "head",
        "head",
    ]


class Spec:
    """A tensor, as trees see it."""

    shape = (2,)


MISMATCHES = {
    "a key too many": (({"w": "s", "v": "s"},), ({"w": 1},), ["[0]: placements have also ['v']"]),
    "a key too few": (({"w": "s"},), ({"w": 1, "v": 2},), ["[0]: placements lack ['v']"]),
    "other keys": (
        {"a": "s"},
        {"b": 1},
        ["the whole tree: placements lack ['b']; placements have also ['a']"],
    ),
    "another length": (["s"], [1, 2], ["the whole tree: placements lack [1]"]),
    "a list for a tuple": (
        ["s"],
        (1,),
        ["the whole tree: placements have a list, the arguments have a tuple"],
    ),
    "a dict for a leaf": (
        {"a": {"x": "s"}},
        {"a": 7},
        ["['a']: placements have a dict, the arguments have a leaf 7"],
    ),
    "a list for a tensor": (
        ["s"],
        Spec(),
        ["the whole tree: placements have a list, the arguments have a tensor"],
    ),
    "fields": (
        Point("s", ["s"]),
        Point(1, 2),
        [".y: placements have a list, the arguments have a leaf 2"],
    ),
    "several at once": (
        ({"a": "s"}, ["s"]),
        ({"b": 1}, (2,)),
        [
            "[0]: placements lack ['b']; placements have also ['a']",
            "[1]: placements have a list, the arguments have a tuple",
        ],
    ),
}


@pytest.mark.parametrize("case", list(MISMATCHES))
def test_a_prefix_that_does_not_match_says_where_all_at_once(case: str) -> None:
    prefix, tree, wanted = MISMATCHES[case]
    with pytest.raises(ValueError) as error:
        tree_pairs.broadcast_prefix(prefix, tree, is_spec)
    assert list(error.value.args) == wanted


def reordered(tree: Any) -> Any:
    """The same tree with the keys of every dict in the opposite order."""
    if isinstance(tree, (dict, OrderedDict)):
        return type(tree)((key, reordered(child)) for key, child in reversed(list(tree.items())))
    if isinstance(tree, Point):
        return Point(*map(reordered, tree))
    return type(tree)(map(reordered, tree)) if type(tree) in (list, tuple) else tree


@given(TREES)
@examples(80)
def test_two_trees_are_paired_by_key_whatever_the_order_of_insertion(tree: Any) -> None:
    leaves, wrong = tree_pairs.pair(reordered(tree), tree, ("a", "b"))
    assert not wrong and leaves == _tree.quick_leaves((tree,))


@given(TREES, TREES)
@examples(80)
def test_pairing_other_trees_lists_a_mismatch_and_no_leaf_is_lost(tree: Any, like: Any) -> None:
    leaves, wrong = tree_pairs.pair(tree, like, ("the tangents", "the primals"), "x")
    assert len(leaves) == len(_tree.quick_leaves((like,)))
    same = _tree.flatten(tree)[1] == _tree.flatten(reordered(like))[1]
    assert (
        wrong
        or same
        or sorted(_tree.quick_paths(tree, "x")) == sorted(_tree.quick_paths(like, "x"))
    )
    assert all(line.startswith("x") for line in wrong)


def test_the_order_of_keys_is_part_of_a_structure() -> None:
    first, second = (_tree.flatten({"a": 1, "b": 2}), _tree.flatten({"b": 2, "a": 1}))
    assert first[0] == [1, 2] and second[0] == [2, 1] and first[1] != second[1]


def tensors(tree: Any) -> Any:
    """The tree with a tensor for every leaf."""
    return _tree.tree_map(lambda leaf: torch.tensor(len(str(leaf))), tree)


@given(st.lists(TREES, max_size=3).map(tuple))
@examples(80)
def test_refill_undoes_quick_leaves(tree: Any) -> None:
    leaves = _tree.quick_leaves(tree)
    assert sorted(map(str, leaves)) == sorted(map(str, _tree.leaves(tree)))
    assert _tree.refill(tree, leaves) == tree
    assert _tree.quick_leaves(_tree.refill(tree, iter(["x"] * len(leaves)))) == ["x"] * len(leaves)


@given(st.lists(TREES, max_size=3))
@examples(80)
def test_quick_leaves_pass_tensors_through_every_container(tree: Any) -> None:
    placed = tensors(tree)
    leaves = _tree.quick_leaves(placed)
    assert all(isinstance(x, torch.Tensor) for x in leaves)
    doubled = _tree.refill(placed, iter([x * 2 for x in leaves]))
    wanted = _tree.tree_map(lambda x: x * 2, placed)
    assert _tree.flatten(doubled)[1] == _tree.flatten(wanted)[1]
    assert all(
        torch.equal(a, b) for a, b in zip(_tree.leaves(doubled), _tree.leaves(wanted), strict=True)
    )


def test_refill_keeps_the_kind_of_every_container_and_the_order_of_keys() -> None:
    tree = ({"w": 1, "b": [2, None]}, Point(3, ()), OrderedDict(z=4, a=5), Box((6, {})))
    out = _tree.refill(tree, iter(_tree.quick_leaves(tree)))
    assert out == tree
    assert [type(x) for x in out] == [dict, Point, OrderedDict, Box]
    assert list(out[0]) == ["w", "b"] and list(out[2]) == ["z", "a"]


def test_tree_map_applies_to_every_leaf_of_several_trees() -> None:
    assert _tree.tree_map(lambda a, b: (a, b), {"w": 1, "n": None}, {"w": 2, "n": 3}) == {
        "w": (1, 2),
        "n": (None, 3),
    }
    assert _tree.tree_map(str, Point(1, [2])) == Point("1", ["2"])
    with pytest.raises(ValueError):
        _tree.tree_map(lambda a, b: a, {"w": 1}, {"v": 2})


def test_named_leaves_have_the_paths_of_modules():
    tree = {"layers": [{"w": 1}, (2, None)], "head": 3}
    assert _tree.named_leaves(tree) == [
        ("layers.0.w", 1),
        ("layers.1.0", 2),
        ("layers.1.1", None),
        ("head", 3),
    ]
