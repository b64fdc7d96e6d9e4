"""An optimizer made for one step: its groups by patterns, and its options."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.optimizers.recipe import Recipe, set_present

PATHS = ["layers.0.weight", "layers.0.bias", "head.bias"]
VALUES = [torch.ones(3, 2), torch.ones(3), torch.ones(1)]


def recipe(**options: object) -> Recipe:
    groups = (("**.bias", {"weight_decay": 0.0}), ("head.*", {"lr": 1.0}))
    return Recipe("optim(SGD)", torch.optim.SGD, {"lr": 0.1, **options}, groups)


def test_the_first_pattern_that_fits_counts() -> None:
    assert [recipe().group_of(path) for path in PATHS] == [0, 1, 1]
    grouped = recipe().grouped(PATHS, VALUES)
    assert [len(group) for group in grouped] == [1, 2, 0]


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    recipe().check_patterns(PATHS)
    with pytest.raises(sf.TreeError) as caught:
        recipe().check_patterns(PATHS[:1])
    text = str(caught.value)
    assert "'**.bias' fits no parameter" in text and "'head.*' fits no parameter" in text


def test_the_optimizer_has_the_parameters_and_no_state() -> None:
    made = recipe(momentum=0.9).over(PATHS, VALUES)
    assert [group["params"] for group in made.param_groups] == [VALUES[:1], VALUES[1:], []]
    assert [group["weight_decay"] for group in made.param_groups] == [0, 0.0, 0]
    assert made.state == {} and recipe().is_torchs


def test_arguments_that_the_class_refuses_are_an_error_of_ours() -> None:
    with pytest.raises(sf.TreeError, match="SGD refuses its arguments: Invalid learning rate"):
        recipe(lr=-1.0).over(PATHS, VALUES)


def test_options_are_set_for_groups_without_one_of_their_own() -> None:
    made = recipe().over(PATHS, VALUES)
    recipe().set_options(made, {"lr": 0.5})
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5, 1.0]
    recipe().set_options(made, {"lr": [1, 2, 3]})
    assert [group["lr"] for group in made.param_groups] == [1, 2, 3]
    set_present(made, {"foreach": False, "no_such": 1})
    assert all(not g["foreach"] and "no_such" not in g for g in made.param_groups)


def test_the_names_of_options_are_those_of_a_group() -> None:
    names = recipe().option_names()
    assert {"lr", "momentum", "weight_decay"} <= set(names) and "params" not in names
