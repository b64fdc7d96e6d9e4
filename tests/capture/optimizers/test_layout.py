"""The state of an optimizer: entries, first values, and a first step unlike the others."""

from __future__ import annotations

import torch

from shardfn.capture.optimizers import layout
from shardfn.capture.optimizers.layout import First


def test_the_first_value_of_each_entry_is_kept() -> None:
    own = First()
    own["moment"] = torch.zeros(2)
    own["moment"].add_(1)
    own["moment"] = torch.ones(2) * 5
    own.update(step=1)
    own.update({"step": 2})
    assert own["moment"].tolist() == [5, 5] and own["step"] == 2
    assert own.first["moment"].tolist() == [0, 0] and own.first["step"] == 1


def test_a_default_is_set_once() -> None:
    own = First({"step": 0})
    assert own.setdefault("step", 7) == 0 and own.setdefault("other", 3) == 3
    assert own.first == {"step": 0, "other": 3}


def test_a_value_of_the_state_lives_where_its_parameter_does() -> None:
    count = torch.tensor(1.0)
    there = layout._as_tensor(count, torch.empty(2, device="meta"))
    assert there.device.type == "meta"
    assert layout._as_tensor(count, torch.ones(2)) is count
