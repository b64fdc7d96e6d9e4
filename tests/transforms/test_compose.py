"""compose: the first transform is the outermost, as with decorators."""

from __future__ import annotations

import pickle

import torch

import shardfn as sf


def outer(fn):
    return lambda x: ("outer", fn(x))


def inner(fn):
    return lambda x: ("inner", fn(x))


def test_transforms_apply_from_the_inside() -> None:
    both = sf.compose(outer, inner)
    assert both(lambda x: x)(3) == ("outer", ("inner", 3))
    assert sf.compose()(abs) is abs


def test_a_pipeline_of_pipelines_is_one() -> None:
    nested = sf.compose(sf.compose(outer), inner)
    assert nested(abs)(-3) == ("outer", ("inner", 3))
    assert repr(nested) == "compose(compose(outer), inner)"


def test_it_compares_hashes_and_pickles_by_its_transforms() -> None:
    both = sf.compose(outer, inner)
    assert both == sf.compose(outer, inner) != sf.compose(inner, outer)
    assert hash(both) == hash(sf.compose(outer, inner))
    assert pickle.loads(pickle.dumps(both)) == both


def test_derivatives_compose() -> None:
    third = sf.compose(sf.grad, sf.grad, sf.grad)(lambda x: x**4)
    assert float(third(torch.tensor(2.0))) == 48.0
