"""One change of torch: entered and left, under the name that this version of torch has."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest

from shardfn._compat import patching
from shardfn._compat.patching import NEVER, Patch, enter, methods


class Owner:
    def f(self, x: int) -> int:
        return x

    @staticmethod
    def s(x: int) -> int:
        return x


@pytest.fixture(name="place")
def _place(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("made_for_patching")
    module.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "made_for_patching", module)
    return "made_for_patching:Owner"


def entered(row: Patch, *given: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    enter(row, given, stack)
    return stack


def test_a_method_is_replaced_for_the_time_of_a_context(place: str) -> None:
    twice = lambda old, owner, x: 2 * old(owner, x)
    row = Patch(methods(place, "f"), "why", NEVER, new=twice, is_mine=lambda: True)
    with entered(row):
        assert Owner().f(3) == 6
    assert Owner().f(3) == 3


def test_other_threads_and_calls_get_torchs_own(place: str) -> None:
    row = Patch(methods(place, "f"), "why", NEVER, new=lambda *_: 0, is_mine=lambda: False)
    with entered(row):
        assert Owner().f(3) == 3


def test_an_argument_of_the_patch_comes_first_and_a_static_method_stays_one(place: str) -> None:
    new = lambda extra, old, x: old(x) + extra
    row = Patch(methods(place, "s"), "why", NEVER, new=new, is_mine=lambda: True)
    with entered(row, 10):
        assert Owner.s(3) == Owner().s(3) == 13
    assert Owner.s(3) == 3


def test_a_place_that_is_gone_is_an_error_unless_it_is_optional(place: str) -> None:
    missing = Patch(methods(place, "gone"), "why", NEVER, new=lambda *_: 0)
    with pytest.raises(AttributeError):
        entered(missing)
    optional = Patch(missing.what, "why", NEVER, new=missing.new, optional=True)
    entered(optional).close()
    nowhere = Patch(("no_such_module:A.b",), "why", NEVER, new=missing.new, optional=True)
    entered(nowhere).close()


def test_a_place_is_found_under_its_later_name(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patching.RENAMED, f"{place}.old_name", f"{place}.f")
    row = Patch((f"{place}.old_name",), "why", NEVER, new=lambda *_: 7, is_mine=lambda: True)
    with entered(row):
        assert Owner().f(3) == 7


def test_a_context_of_ones_own_is_entered_with_the_argument() -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def around(x: int):
        seen.append(x)
        yield
        seen.append("left")

    with entered(Patch(("in words",), "why", NEVER, enter=around), 5):
        assert seen == [5]
    assert seen == [5, "left"]


def test_a_method_that_ends_in_a_patched_one_is_left_as_it_is(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Heir(Owner):
        def f(self, x: int) -> int:
            return super().f(x) + 1

    module = __import__("made_for_patching")
    module.Heir = Heir
    heir = "made_for_patching:Heir"
    twice = lambda old, owner, x: 2 * old(owner, x)
    places = (*methods(place, "f"), *methods(heir, "f"))
    row = Patch(places, "why", NEVER, new=twice, is_mine=lambda: True)
    with entered(row):
        assert Heir().f(3) == 14  # patched twice
    monkeypatch.setitem(patching.INHERITED, f"{heir}.f", place)
    with entered(row):
        assert Heir().f(3) == 7
