"""Copies of a module: modules and containers are copied, all else is shared."""

from __future__ import annotations

import functools
import weakref

import torch

from shardfn.capture.modules.copies import copied, snapshot


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2)
        self.b = self.a
        self.config = {"sizes": [1, 2]}
        self.hook = self.forward
        self.part = functools.partial(print, self.config)
        self.ref = weakref.ref(self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def test_values_are_shared_and_structure_is_not() -> None:
    module = Tied()
    made = copied(module, {})
    assert type(made) is Tied and made is not module and made.a is not module.a
    assert made.a.weight is module.a.weight
    made.config["sizes"].append(3)
    assert module.config == {"sizes": [1, 2]}


def test_what_is_shared_stays_shared_among_the_copies() -> None:
    made = copied(Tied(), {})
    assert made.a is made.b
    assert made.hook.__self__ is made
    assert made.part.args[0] is made.config
    assert made.ref() is made.a


def test_an_object_is_replaced_where_the_memo_says_so() -> None:
    module = Tied()
    other = torch.zeros(2, 2)
    made = copied(module, {id(module.a.weight): other})
    assert made.a._parameters["weight"] is other


def test_a_snapshot_tells_changes_of_attributes_but_not_of_values() -> None:
    module = Tied()
    before = snapshot(module)
    with torch.no_grad():
        module.a.weight.add_(1)
    assert snapshot(module) == before
    module.config["sizes"].append(3)
    after = snapshot(module)
    assert {k for k in after if after[k] != before.get(k)} == {"config"}
    module.a.bias = None
    assert snapshot(module)["a.bias"] != before["a.bias"]
