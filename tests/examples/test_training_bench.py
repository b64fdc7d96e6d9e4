"""What the benches of training compute from their measurements: `make bench-train`,
`make bench-checkpoints`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.training import checkpoints, rivals, steps


def row(ms: float, peak: int, planned: int | None = None) -> steps.Row:
    return steps.Row(ms=ms, held=peak // 2, growth=peak - peak // 2, planned=planned)


def rows(**changed: steps.Row) -> dict[str, steps.Row]:
    found = {
        "ddp": row(9.0, 100, 120),
        "zero3": row(18.0, 55),
        rivals.DDP: row(11.0, 120),
        rivals.DDP_COMPILED: row(10.0, 101),
        rivals.FSDP: row(20.0, 50),
    }
    return {**found, **changed}


def test_a_step_takes_as_long_as_its_slower_rank() -> None:
    assert steps.slower_median([[1.0, 5.0, 3.0], [2.0, 1.0, 9.0]]) == 5.0


def test_a_strategy_is_judged_next_to_its_kind_and_to_the_best() -> None:
    found = steps.verdicts(rows())
    assert all(is_met for is_met, _ in found)
    texts = [text for _, text in found]
    assert texts[0].startswith("Met: ddp takes 0.90 of a step of DDP compiled")
    assert texts[3].startswith("Met: zero3 takes 1.10 of the peak of FSDP2 eager")
    assert texts[4] == "Met: ddp takes 0.90 of the best step, DDP compiled."


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"ddp": row(10.1, 100)}, [0, 4]),
        ({"ddp": row(9.0, 102)}, [1]),
        ({"zero3": row(20.1, 55)}, [2]),
        ({"zero3": row(18.0, 56)}, [3]),
    ],
)
def test_a_target_is_missed_by_a_little(changed: Any, missed: list[int]) -> None:
    found = steps.verdicts(rows(**changed))
    assert [i for i, (is_met, _) in enumerate(found) if not is_met] == missed


def test_the_table_has_the_peak_between_and_in_steps() -> None:
    last = steps.table({"ddp": row(9.0, 3_000_000, 4_000_000)}).splitlines()[-1]
    assert last == "| ddp | 9.0 | 1.5 | 3.0 | 4.0 |"


def test_a_distance_is_a_share_of_the_way() -> None:
    start = {"a": torch.zeros(2), "b": torch.zeros(1)}
    wanted = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    found = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}
    assert math.isclose(steps.distance(found, wanted, start), 0.1)


def test_growth_is_the_peak_since_the_call_began(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, held = 70, 50  # the peak of an earlier call
    calls: list[str] = []

    def resident(field: str) -> int:
        calls.append(field)
        return {"VmRSS": held, "VmHWM": peak}[field]

    def reset() -> None:
        nonlocal peak
        calls.append("reset")
        peak = held

    def step() -> None:
        nonlocal peak
        calls.append("step")
        peak = held + 8

    monkeypatch.setattr(steps, "resident", resident)
    monkeypatch.setattr(steps, "reset_peak", reset)
    assert steps.growth(step) == 8
    assert calls == ["reset", "VmRSS", "step", "VmHWM"]


def test_a_process_states_its_memory() -> None:
    steps.reset_peak()
    assert steps.resident("VmRSS") > 2**20
    assert steps.resident("VmHWM") > 2**20


def test_memory_that_two_tensors_share_is_held_once() -> None:
    x = torch.zeros(7, 3)
    assert rivals.local_bytes([x, x[2:], torch.zeros(5)]) == x.nbytes + 20


def test_a_bucket_holds_the_largest_layer() -> None:
    weights = {
        "model.layers.0.w": torch.zeros(3),
        "model.layers.1.w": torch.zeros(5),
        "model.layers.1.b": torch.zeros(2),
        "lm_head": torch.zeros(99),
    }
    assert rivals.layer_bytes(weights) == 28


@pytest.mark.parametrize("nbytes", [10_000_000, 256_000_000])
def test_the_tensors_of_a_checkpoint_have_the_size_asked_for(nbytes: int) -> None:
    shapes = checkpoints.shapes(nbytes)
    size = 4 * checkpoints.RANKS * sum(map(math.prod, shapes.values()))
    assert 0.9 * nbytes < size <= nbytes


def test_a_checkpoint_loaded_with_another_value_is_an_error() -> None:
    x = torch.zeros(3)
    held = lambda value: {"w": SimpleNamespace(to_local=lambda: value)}
    checkpoints.check("DCP", held(x.clone()), held(x))
    with pytest.raises(RuntimeError, match="DCP: w was loaded with other values"):
        checkpoints.check("DCP", held(x + 1), held(x))


def test_a_load_is_judged_next_to_that_of_dcp() -> None:
    medians = {"shardfn save": 0.110, "DCP save": 0.100, "shardfn load": 0.111, "DCP load": 0.100}
    (saved, text), (loaded, _) = checkpoints.verdicts(medians)
    assert saved and not loaded
    assert text.startswith("Met: save takes 110 ms, 1.10 of DCP's 100 ms")
