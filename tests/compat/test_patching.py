"""One change of torch: entered and left, under the name that this version of torch has."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest

from shardfn._compat import patching
from shardfn._compat.patching import DEGRADE, OR, Patch, enter, is_due, methods, takes_calls
from shardfn.errors import TorchVersionError


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


def row_of(**fields: Any) -> Patch:
    return Patch(what="a change", why="why", lost="all", **{"is_mine": lambda: True, **fields})


def entered(row: Patch, *given: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    enter(row, given, stack)
    return stack


def test_a_method_is_replaced_for_the_time_of_a_context(place: str) -> None:
    twice = lambda old, owner, x: 2 * old(owner, x)
    with entered(row_of(calls={f"{place}.f": twice})):
        assert Owner().f(3) == 6
    assert Owner().f(3) == 3


def test_other_threads_and_calls_get_torchs_own(place: str) -> None:
    row = row_of(calls={f"{place}.f": lambda *_: 0}, is_mine=lambda: False)
    with entered(row):
        assert Owner().f(3) == 3


def test_an_argument_of_the_patch_comes_first_and_a_static_method_stays_one(place: str) -> None:
    new = lambda extra, old, x: old(x) + extra
    with entered(row_of(calls={f"{place}.s": new}, takes="extra"), 10):
        assert Owner.s(3) == Owner().s(3) == 13
    assert Owner.s(3) == 3


def test_a_place_that_is_gone_is_missing_and_left_out(place: str) -> None:
    calls = {f"{place}.gone": lambda *_: 0, f"{place}.f": lambda *_: 1}
    row = row_of(calls=calls, on_missing=DEGRADE)
    assert row.missing() == (f"{place}.gone",)
    with entered(row):
        assert Owner().f(3) == 1
    assert row_of(calls={"no_such_module:A.b": lambda *_: 0}).missing() == ("no_such_module:A.b",)


def test_a_place_that_is_gone_and_keeps_programs_right_is_refused(place: str) -> None:
    with pytest.raises(TorchVersionError, match=f"lacks {place}.gone: all"):
        entered(row_of(calls={f"{place}.gone": lambda *_: 0}))


def test_a_place_is_found_under_its_later_name(place: str) -> None:
    old = f"{place}.old_name{OR}{place}.f"
    with entered(row_of(calls={old: lambda *_: 7})):
        assert Owner().f(3) == 7
    assert row_of(calls={old: lambda *_: 7}).missing() == ()


def test_a_place_of_a_later_version_is_not_missed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(patching.SINCE, f"{place}.gone", (99, 0))
    assert not is_due(f"{place}.gone") and is_due(f"{place}.f")
    assert row_of(calls={f"{place}.gone": lambda *_: 0}).missing() == ()


def two(a: int, b: int = 0, *, c: int = 0) -> None: ...


FITTING: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "the same": (lambda old, a, b=0, *, c=0: None, 1, True),
    "anything": (lambda old, *args, **kwargs: None, 1, True),
    "anything, given": (lambda *_, **__: None, 2, True),
    "the patch's own first": (lambda own, old, a, b=0, **kwargs: None, 2, True),
    "one too few": (lambda old, a, **kwargs: None, 1, False),
    "one too many": (lambda old, a, b, c, d: None, 1, False),
    "no keyword": (lambda old, a, b: None, 1, False),
    "a default that is needed": (lambda old, a, b, *, c: None, 1, False),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_replacement_must_take_what_torch_gives(name: str) -> None:
    new, given, fits = FITTING[name]
    assert takes_calls(new, given, two) is fits


def test_a_place_with_other_arguments_is_missing(place: str) -> None:
    row = row_of(calls={f"{place}.f": lambda old, owner: None})
    assert row.missing() == (f"{place}.f",)


def test_a_context_of_ones_own_is_entered_with_the_argument(place: str) -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def around(x: int):
        seen.append(x)
        yield
        seen.append("left")

    with entered(row_of(enter=around, places=methods(place, "f")), 5):
        assert seen == [5]
    assert seen == [5, "left"]
    with entered(row_of(enter=around, places=methods(place, "gone"), on_missing=DEGRADE), 6):
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
    row = row_of(calls={f"{place}.f": twice, f"{heir}.f": twice})
    with entered(row):
        assert Heir().f(3) == 14  # patched twice
    monkeypatch.setitem(patching.INHERITED, f"{heir}.f", place)
    with entered(row):
        assert Heir().f(3) == 7
