"""Calls that read or seed a generator of random numbers are refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from shardfn._compat.dynamo.generators import READS_GENERATOR, is_given, refused_random, seeds


def variable(value: object, is_constant: bool = True) -> SimpleNamespace:
    made = SimpleNamespace(is_python_constant=lambda: is_constant, as_python_constant=lambda: value)
    made.realize = lambda: made
    return made


@pytest.mark.parametrize(
    "called", [torch.manual_seed, torch.get_rng_state, random.seed, random.random]
)
def test_a_call_of_a_generator_is_known(called: object) -> None:
    assert seeds(called, {}) == READS_GENERATOR


def test_another_call_is_refused_only_if_it_is_given_a_generator() -> None:
    assert (
        seeds(torch.rand, {}) is None and seeds(torch.rand, {"generator": variable(None)}) is None
    )
    assert seeds(torch.rand, {"generator": variable(object())}) == READS_GENERATOR
    assert is_given("generator", {"generator": variable(None, False)})
    assert not is_given("generator", {})


def test_pythons_random_stops_dynamo_with_the_text() -> None:
    with pytest.raises(Exception, match=READS_GENERATOR):
        refused_random()
