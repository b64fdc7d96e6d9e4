"""Globs over dotted paths, and names that are near."""

from __future__ import annotations

import re

import pytest

from shardfn.plans.patterns import compiled, general, near, parent

PATHS = ["w", "0.w", "layers.0.w", "layers.10.w", "layers.0.mlp.w", "layers.0.mlp.w2"]

# pattern -> the paths that it matches, by number
GLOBS: dict[str, list[int]] = {
    "w": [0],
    "*.w": [1],
    "**.w": [0, 1, 2, 3, 4],
    "**": [0, 1, 2, 3, 4, 5],
    "layers.*.w": [2, 3],
    "layers.**.w": [2, 3, 4],
    "layers.0.**": [2, 4, 5],
    "layers.**": [2, 3, 4, 5],
    "layers.?.w": [2],
    "layers.[01].w": [2],
    "layers.[!0]*.w": [3],
    "**.mlp.*": [4, 5],
    "layers.0.mlp.w?": [5],
    "layers.0.mlp.w*": [4, 5],
    "layers.0.w**": [2],
    "layersX0.w": [],
}


@pytest.mark.parametrize("glob", GLOBS)
def test_a_star_stays_within_one_name_and_two_stars_do_not(glob: str) -> None:
    matched = [i for i, path in enumerate(PATHS) if compiled(glob).fullmatch(path)]
    assert matched == GLOBS[glob]


def test_a_regular_expression_is_taken_as_it_is() -> None:
    pattern = re.compile(r"layers\.(\d)\.w")
    assert compiled(pattern) is pattern


def test_a_layers_number_is_general_and_a_names_is_not() -> None:
    assert general("layers.0.1.w2") == "layers.*.*.w2"
    assert general("0.w") == "*.w"
    assert (parent("a.b.w"), parent("w")) == ("a.b", "")


def test_near_names_are_alike_or_the_first() -> None:
    assert near("mlp.wieght", ["a.b", "mlp.weight"]) == ["mlp.weight"]
    assert near("?", list("abcdef")) == list("abcd")
