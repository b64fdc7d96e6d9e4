"""What errors add for code that asked for the number of its rank."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.refusals import rank_numbers
from shardfn.capture.shard_map.axis_names import Bound, Scope, scope


def raised(here: Scope, error: Exception) -> list[str]:
    with pytest.raises(type(error)) as caught, rank_numbers.noted(here):
        raise error
    return rank_numbers.of(caught.value)


def test_an_error_of_torch_is_noted_once_for_each_call() -> None:
    with scope(None, "cpu") as here:
        assert raised(here, ValueError("x")) == []
        rank_numbers.note_call("get_rank")
        rank_numbers.note_call("get_rank")
        note = "the number of a rank is a tensor here, since ranks share one program: get_rank"
        assert raised(here, ValueError("x")) == [note]
        assert raised(here, sf.CaptureError("x")) == []


def test_the_number_of_a_sample_is_not_that_of_a_rank() -> None:
    with scope(None, "cpu") as here:
        here.names.append(Bound("i", 3, 1))
        rank_numbers.note_call("axis_index", "i")
        assert here.rank_calls == []
        here.names.append(Bound("dp", 2, -1))
        rank_numbers.note_call("axis_index", "dp")
        assert here.rank_calls == ["axis_index"]


def test_a_branch_on_a_sample_says_nothing_of_ranks() -> None:
    fn = lambda x: x if sf.axis_index("i") > 1 else -x
    with pytest.raises(sf.CaptureError) as caught:
        sf.vmap(fn, axis_name="i")(torch.ones(3))
    assert "rank" not in str(caught.value).split("at:")[0]
