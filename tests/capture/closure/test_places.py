"""Places that a function reads: the steps to a value, and the user's name of it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from shardfn import _compat
from shardfn.capture.closure import places
from shardfn.capture.closure.places import (
    home_of,
    is_closed,
    is_fixed,
    is_library,
    name_of,
    own_names,
    step_to,
    value_at,
)


class Config:
    k = 1

    def __init__(self) -> None:
        self.k = 2


def scope(x: Any) -> tuple[str, Any]:
    return "scope", _compat.Itself(x)


def test_steps_lead_to_a_value() -> None:
    tree = {"a": [10, (20, Config())]}
    path = (scope(tree), ("item", "a"), ("item", 1), ("item", 1), ("attr", "k"))
    assert value_at(path) == 2, "the instance's, not the class's"
    assert step_to(tree, "key", 0) == "a" and step_to(tree, "value", 0) == tree["a"]
    assert step_to(Config(), "type", None) is Config


def test_a_missing_place_is_no_constant() -> None:
    for step in (("item", "z"), ("attr", "nothing"), ("item", 3)):
        assert value_at((scope({"a": 1}), step)) == []


def test_closures_and_cells() -> None:
    scale = 3
    fn = lambda: scale
    assert value_at((scope(fn), ("closure", None), ("item", 0), ("cell", "scale"))) == 3


NAMES = [
    ((("fn", None), ("closure", None), ("item", 0), ("cell", "scale")), "scale"),
    ((scope({}), ("item", "cfg"), ("attr", "k")), "cfg.k"),
    ((scope({}), ("item", "xs"), ("item", 2)), "xs[2]"),
    ((("fn", None), ("attr", "__self__"), ("attr", "rate")), "rate"),
    ((("fn", None),), "something that it closes over"),
]


@pytest.mark.parametrize(("path", "wanted"), NAMES)
def test_the_name_is_what_the_user_wrote(path: Any, wanted: str) -> None:
    assert name_of(path) == wanted


def test_libraries_are_constant_and_scripts_of_the_same_name_are_not() -> None:
    assert all(map(is_library, (torch, torch.add, types, max, len, torch.nn.Linear)))
    assert not is_library(Config) and not is_library(Config())
    assert not is_library(test_closures_and_cells)
    assert is_closed(torch) and not is_closed(torch.nn.functional)


def test_which_steps_always_lead_to_the_same_object() -> None:
    fixed = ((1, 2), "item", 0, 1), (Config, "type", None, type)
    assert all(is_fixed(*step) for step in fixed)
    loose = (([1], "item", 0, 1), (Config(), "attr", "k", 2), (Config(), "training", 0, 0))
    assert not any(is_fixed(*step) for step in loose)


def test_an_attribute_is_an_item_of_the_attribute_dict() -> None:
    config = Config()
    assert home_of(config, "attr", "k") == (own_names(config), "item", "k")
    assert home_of(Config, "attr", "missing") == (Config, "attr", "missing")
    assert own_names(3) == {}


def test_functions_of_the_world_are_known() -> None:
    from shardfn.mesh import current_mesh

    assert places.asks_world(torch.distributed.get_rank)
    assert places.asks_world(current_mesh)
    assert not places.asks_world(torch.add) and not places.asks_world(torch.distributed)
