"""The line where a module stores an attribute."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from shardfn.capture.modules.stores import stored_at


class Stores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x  # here
        return x


def test_it_is_the_first_outside_of_the_constructor() -> None:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith("# here"))
    module = nn.Sequential(nn.ReLU(), Stores())
    found = stored_at(module, "1.last")
    assert found is not None and re.fullmatch(rf".*test_stores.py:{number}", found)


def test_without_a_line_there_is_none() -> None:
    made = type("Made", (nn.Module,), {"forward": lambda self, x: x})()
    for module, path in ((made, "last"), (Stores(), "other"), (Stores(), "a.b")):
        assert stored_at(module, path) is None
    assert stored_at(torch.nn.Linear(1, 1), "none") is None
