"""Options that name arguments by position: what they name, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.argnums import (
    check_argnums,
    is_number,
    of_call,
    of_signature,
    positions,
    refuse_static,
    signature_of,
)

X = torch.ones(2)


def test_a_bool_is_no_position() -> None:
    assert is_number(3) and not is_number(True) and not is_number(3.0)


@pytest.mark.parametrize(("given", "wanted"), [(1, (1,)), ((0, -1), (0, -1)), ([2], (2,))])
def test_positions_as_they_are_written(given: Any, wanted: Any) -> None:
    assert check_argnums("f", "argnums", given) == wanted


def test_negative_positions_count_from_the_end() -> None:
    assert positions("f", "argnums", (0, -1), 3) == (0, 2)
    assert positions("f", "argnums", -3, 3) == (0,)


REFUSED = [
    ("0", 2, "f, argnums: argnums is '0'"),
    (True, 2, "f, argnums: argnums is True"),
    ((0, 0), 2, "f, argnums: argnums is (0, 0), which names an argument twice"),
    ((0, -2), 2, "f, argnums: argnums is (0, -2), which names an argument twice"),
    (2, 2, "f, argnums: argnums is 2, and the call has 2 positional arguments"),
    (0, 0, "f, argnums: argnums is 0, and the call has 0 positional arguments"),
]


@pytest.mark.parametrize(("given", "count", "text"), REFUSED)
def test_other_positions_are_refused(given: Any, count: int, text: str) -> None:
    with pytest.raises(sf.TreeError) as caught:
        positions("f", "argnums", given, count)
    assert str(caught.value).startswith(text)


def test_positions_are_checked_against_the_signature_where_it_is_known() -> None:
    two = lambda x, y=1: x
    assert of_signature("f", two, 1, ()) == {"static_argnums": (1,), "donate_argnums": ()}
    assert of_signature("f", lambda *xs: xs, 7, ())["static_argnums"] == (7,)
    with pytest.raises(sf.TreeError, match="the function takes 2 positional arguments"):
        of_signature("f", two, 2, ())
    with pytest.raises(sf.TreeError, match="argument 0 is static and donated"):
        of_signature("f", two, (0, 1), 0)


def named(written: tuple[int, ...], *args: Any, **kwargs: Any) -> list[int]:
    signature = inspect.signature(lambda x, y, z=3: x)
    return of_call("f", "static_argnums", written, args, kwargs, signature)


def test_the_arguments_of_a_call() -> None:
    assert named((1, 0), X, X) == [1, 0]
    assert named((-1,), X, X, X) == [2]
    assert named((2,), X, X) == [], "it keeps its default"
    assert named((), X) == []
    with pytest.raises(sf.TreeError, match="y is passed by keyword"):
        named((1,), X, y=X)


def test_builtins_may_have_no_signature() -> None:
    assert signature_of(dict) is None
    assert list(signature_of(lambda a, *, b: a).parameters) == ["a", "b"]


def test_static_arguments_are_constants_with_a_hash() -> None:
    refuse_static("f", [1], [0], (X, "mode"))
    for args, text in (
        (({"w": X},), "static argument 0 holds a tensor"),
        (([1, 2],), "static argument 0 is a list, which has no hash"),
    ):
        with pytest.raises(sf.TreeError) as caught:
            refuse_static("f", [0], [], args)
        assert text in str(caught.value)
    with pytest.raises(sf.TreeError, match="argument 1 is static and donated"):
        refuse_static("f", [1], [1], (X, "mode"))
