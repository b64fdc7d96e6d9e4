"""A request: options that must be one of a few words."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import shardfn as sf
from shardfn.runtime.options import Request


def request(**options: Any) -> Request:
    return Request("f", print, print, **options)


WORDS = {
    "implicit_comm": "allow, warn, error",
    "planner": "greedy, global",
    "backend": "aten, inductor",
    "seed": "state, required",
}


@pytest.mark.parametrize("option", WORDS)
def test_a_word_that_is_unknown_is_refused_with_those_that_exist(option: str) -> None:
    for word in WORDS[option].split(", "):
        assert getattr(request(**{option: word}), option) == word
    with pytest.raises(sf.ShardError) as caught:
        request(**{option: "other"})
    assert str(caught.value).startswith(f"f: {option} is 'other'\n")
    assert f"needed: one of {WORDS[option]}" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuda_graphs": 1, "backend": "inductor"}, "needed: True or False"),
        ({"cuda_graphs": True, "backend": "aten"}, "backend='inductor'"),
    ],
    ids=["not a flag", "op by op"],
)
def test_only_compiled_code_is_recorded(options: Any, said: str) -> None:
    with pytest.raises(sf.ShardError) as caught:
        request(**options)
    text = str(caught.value)
    assert text.startswith("f: cuda_graphs") and said in text


def test_a_request_is_frozen_and_has_a_store_of_its_own() -> None:
    first, second = request(), request()
    assert first != second and first.store is not second.store
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        first.name = "g"  # type: ignore[misc]
