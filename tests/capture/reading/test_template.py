"""A function that was read for any sizes: which calls its reading serves."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.reading.template import Template
from shardfn.types import Aval


def aval(*shape: int, dtype: torch.dtype = torch.float32) -> Aval:
    return Aval(shape, torch.empty(shape).stride(), dtype, "cpu")


class Even:
    """Sizes of which the first must be even."""

    def misfit(self, given: Any, names: Any) -> str | None:
        wrong = [names[k] for k, (shape, _) in given.items() if shape[0] % 2]
        return f"{wrong[0]} is odd" if wrong else None


def template() -> Template:
    unused: Any = None
    return Template(
        python=unused, sizes=Even(), dynamic={0: {0: False}}, names={0: "x", 2: "y"},
        reads=unused, scope=unused, fns=unused,
    )  # fmt: skip


def test_calls_that_differ_in_dynamic_dims_are_alike() -> None:
    one, two = [aval(4, 3), "k", aval(2)], [aval(6, 3), "k", aval(2)]
    assert template().is_alike(one, two)
    assert not template().is_alike(one, [aval(4, 5), "k", aval(2)])
    assert not template().is_alike(one, [aval(6, 3), "other", aval(2)])
    assert not template().is_alike(one, [aval(6, 3), "k", aval(4)]), "y is not dynamic"
    assert not template().is_alike(one, [aval(6, 3, dtype=torch.float64), "k", aval(2)])


def test_a_condition_that_sizes_break_is_named() -> None:
    assert template().misfit([aval(4, 3), "k", aval(2)]) is None
    assert template().misfit([aval(4, 3), "k", aval(3)]) == "y is odd"


def test_tensors_must_stand_where_they_stood() -> None:
    assert template().takes([aval(4, 3), "k", aval(2)])
    assert not template().takes([aval(4, 3), aval(1), aval(2)])
