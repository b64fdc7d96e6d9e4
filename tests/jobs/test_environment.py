"""The place of a process in its job, by the variables of the launcher."""

from __future__ import annotations

import re

import pytest

import shardfn as sf
from shardfn.jobs import environment

RIGHT = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
WRONG = {
    "WORLD_SIZE is '0'": {"WORLD_SIZE": "0"},
    "RANK is '2'": {"RANK": "2"},
    "RANK is 'one'": {"RANK": "one"},
    "MASTER_PORT is '70000'": {"MASTER_PORT": "70000"},
    "MASTER_ADDR, RANK missing": {"MASTER_ADDR": "", "RANK": "", "TORCHELASTIC_RUN_ID": "7"},
}


@pytest.mark.parametrize("got", WRONG)
def test_variables_that_say_no_place(got: str) -> None:
    with pytest.raises(sf.RendezvousError, match=re.escape(got)):
        environment.launch({**RIGHT, **WRONG[got]})


def test_variables_that_say_a_place() -> None:
    assert environment.launch({}) is None
    assert environment.launch({"RANK": "0"}) is None
    got = environment.launch(RIGHT)
    assert got == environment.Launch("h", 1, 1, 2, is_server=False, attempt="0")
    first = {**RIGHT, "RANK": "0"}
    for agent, serves in (("", True), ("True", False)):
        got = environment.launch({**first, "TORCHELASTIC_USE_AGENT_STORE": agent})
        assert got is not None and got.is_server is serves


def test_a_restart_has_its_number_and_a_place_its_address() -> None:
    got = environment.launch({**RIGHT, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert got is not None and got.attempt == "3" and got.address == "h:1"


def test_an_error_says_the_range_and_who_sets_the_variables() -> None:
    with pytest.raises(sf.RendezvousError) as caught:
        environment.launch({**RIGHT, "RANK": "-1"})
    text = str(caught.value)
    assert text.startswith("make_mesh, environment: RANK is '-1'")
    assert "an int, 0 to 1" in text and "torchrun --nproc-per-node=2" in text
    with pytest.raises(sf.RendezvousError, match="an int, 1 or more"):
        environment.launch({**RIGHT, "WORLD_SIZE": "x"})
