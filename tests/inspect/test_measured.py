"""The measured figures of a machine: each is what was counted over what was timed."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.inspect import measured


@pytest.fixture(autouse=True)
def _half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs once and is said to take half a second."""

    def seconds(call, device) -> float:
        call()
        return 0.5

    monkeypatch.setattr(measured, "_median_seconds", seconds)
    monkeypatch.setattr(measured, "SIDE", 8)
    monkeypatch.setattr(measured, "COPIED", 64)
    monkeypatch.setattr(measured, "LENGTH", 1)
    monkeypatch.setattr(measured, "WIDTH", 7)


def test_figures_are_counts_over_seconds() -> None:
    link = sf.Link(latency=1e-5, bandwidth=1e9)
    found = sf.measure_hardware(link)
    assert found.flops == found.flops32 == 2 * 8**3 / 0.5
    assert found.memory == 2 * 64 / 0.5
    assert (found.link, found.latency) == (1e9, 1e-5)
    assert found.name == "this machine's cpu"
    assert found.launch == 0.5 / measured.STARTS


def test_attention_is_measured_next_to_products() -> None:
    flops = 4 * measured.HEADS * measured.LENGTH**2 * measured.WIDTH
    assert sf.measure_hardware().efficiency.attention == min(1.0, flops / (2 * 8**3))
    one = sf.Efficiency(attention=sf.measure_hardware().efficiency.attention)
    assert sf.measure_hardware().efficiency == one


def test_where_there_are_no_other_ranks_sending_takes_no_time() -> None:
    found = sf.measure_hardware()
    assert found.send("all_reduce", 1e9, 8) == 0.0
    with sf.fake_world(4):
        assert sf.measure_hardware().link == float("inf")


def test_the_time_of_a_call_is_the_median_without_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    times = iter([0, 100, 0, 1, 0, 2, 0, 3, 0, 9, 0, 9, 0, 9, 0, 1])
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(times))
    assert measured._median_seconds(lambda: None, torch.device("cpu")) == 3
