"""A notebook shows the tables that `print` gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import shardfn as sf
from shardfn import P
from shardfn.inspect.memory import Memory
from shardfn.inspect.step_time import StepTime
from shardfn.placement_table import ArgumentPlacements, Placements
from shardfn.sweeps.table import Sweep
from shardfn.training.plans.strategies import Strategy


def shown(x: Any) -> str:
    """What IPython's printer writes of an object."""
    texts: list[str] = []
    x._repr_pretty_(SimpleNamespace(text=texts.append), False)
    return "".join(texts)


def test_s28_placements_are_shown_as_printed() -> None:
    params = {"w": sf.ShapeDtype((4, 8)), "b": sf.ShapeDtype((8,))}
    found = sf.placements(params, {"w": P("dp"), "b": P()})
    assert shown(found) == str(found)


@pytest.mark.parametrize("cls", [Memory, StepTime, Placements, Strategy, Sweep, ArgumentPlacements])
def test_s28_every_table_is_shown_as_printed(cls: type) -> None:
    named = type("named", (cls,), {"__str__": lambda self: "a table"})
    assert shown(named.__new__(named)) == "a table"
