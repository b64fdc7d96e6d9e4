"""A recorded program: replays equal runs, whatever moves, and results are the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardfn.errors import ShardError
from shardfn.runtime import recorded
from shardfn.runtime.recorded import Recorded

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class FakeGraph:
    """A graph without CUDA: it runs the function again, on the memory that it was recorded on."""

    made = 0

    def __init__(self, run: Run, inputs: Sequence[torch.Tensor]) -> None:
        FakeGraph.made += 1
        self.run, self.places = run, [_place(x) for x in inputs]
        before = [x.clone() for x in inputs]
        self.results = run(list(inputs))
        for x, was in zip(inputs, before, strict=True):  # recording computes nothing
            x.copy_(was)
        own = {x.data_ptr() for x in inputs}
        self.own = [x for x in self.results if x.data_ptr() not in own]
        for x in self.own:
            x.fill_(torch.nan)

    def begin(self) -> None:
        pass

    def replay(self) -> None:
        inputs = [KNOWN[place] for place in self.places]
        found = self.run(list(inputs))
        own = {x.data_ptr() for x in inputs}
        new = [x for x in found if x.data_ptr() not in own]
        for x, value in zip(self.own, new, strict=True):
            x.copy_(value)

    def end(self) -> None:
        for x in self.own:
            assert not x.isnan().any()


KNOWN: dict[int, torch.Tensor] = {}  # what lies at an address


def _place(x: torch.Tensor) -> int:
    KNOWN[x.data_ptr()] = x
    return x.data_ptr()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded.runner.cuda, "CudaGraph", FakeGraph)
    FakeGraph.made = 0
    KNOWN.clear()


def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A step that writes its result into its first input, and has a fresh one."""
    w, x = inputs
    inputs.clear()
    loss = (w * x).sum()
    w.copy_(w - x)
    return [w, loss]


def fresh(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    w, x = inputs
    inputs.clear()
    return [w - x, (w * x).sum(), (w * 2).t()]


def called(run: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    given = [*inputs]
    out = run(given)
    assert given == []  # the caller holds nothing that it has given away
    return out


def test_donated_memory_stays_where_it_is() -> None:
    run = Recorded("step", step)
    w, plain = torch.ones(3), torch.ones(3)
    batches = [torch.full((3,), float(k + 1)) for k in range(6)]
    for x in batches:
        wanted = called(step, plain, x)
        got = called(run, w, x)
        assert got[0] is w
        torch.testing.assert_close(got, wanted)
    assert FakeGraph.made == 1
    assert run.recording is not None and run.recording.places == [0]


def test_results_are_left_as_they_are_by_later_calls() -> None:
    run = Recorded("step", fresh)
    w = torch.arange(6.0).reshape(2, 3)
    kept = []
    for k in range(5):
        x = torch.full((2, 3), float(k))
        kept.append((called(run, w, x), called(fresh, w.clone(), x.clone())))
    for got, wanted in kept:
        torch.testing.assert_close(got, wanted)
        assert [x.stride() for x in got] == [x.stride() for x in wanted]


def test_donated_memory_that_moves_is_copied_into_the_graph_and_back() -> None:
    run = Recorded("step", step)
    x = torch.ones(3)
    for k in range(6):
        w = torch.full((3,), float(k))
        wanted = called(step, w.clone(), x)
        got = called(run, w, x)
        assert got[0] is w
        torch.testing.assert_close(got, wanted)
    assert FakeGraph.made <= 2


def test_inputs_in_turn_are_right_and_recorded_at_most_once_for_each_input() -> None:
    run = Recorded("step", fresh)
    pairs = [(torch.full((2, 2), float(k)), torch.eye(2) * k) for k in range(3)]
    for k in (0, 0, 1, 0, 2, 1, 1, 0):
        torch.testing.assert_close(called(run, *pairs[k]), fresh([*pairs[k]]))
    assert FakeGraph.made <= 3


def test_a_result_that_is_a_view_of_a_donated_input() -> None:
    def turned(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        (w,) = inputs
        inputs.clear()
        w.mul_(2)
        return [w.t()]

    run = Recorded("turned", turned)
    w = torch.arange(6.0).reshape(2, 3)
    plain = w.clone()
    for _ in range(4):
        (wanted,) = called(turned, plain)
        (got,) = called(run, w)
        torch.testing.assert_close(got, wanted)
        assert got.stride() == wanted.stride()


def test_what_has_moved_once_is_copied_from_then_on() -> None:
    run = Recorded("step", fresh)
    ws = [torch.full((2, 2), float(k)) for k in range(2)]
    xs = [torch.eye(2) * k for k in range(2)]
    for i, j in ((0, 0), (0, 0), (1, 0), (1, 1), (0, 1), (1, 0), (0, 0), (1, 1)):
        torch.testing.assert_close(called(run, ws[i], xs[j]), fresh([ws[i], xs[j]]))
    assert FakeGraph.made == 3


def test_the_first_call_records_nothing() -> None:
    run = Recorded("step", fresh)
    called(run, torch.ones(2, 2), torch.ones(2, 2))
    assert FakeGraph.made == 0


def test_a_program_without_inputs() -> None:
    run = Recorded("ones", lambda _: [torch.ones(2)])
    assert [run([])[0].tolist() for _ in range(3)] == [[1.0, 1.0]] * 3


def test_empty_inputs_and_results() -> None:
    run = Recorded("step", lambda inputs: [inputs[0] * 2, inputs[1] + 1])
    for _ in range(3):
        given = [torch.ones(0, 3), torch.ones(2)]
        out = run(given)
        assert out[0].shape == (0, 3) and out[1].tolist() == [2.0, 2.0]


def test_threads_take_turns() -> None:
    run = Recorded("step", fresh)
    wrong = []

    def work(k: int) -> None:
        for _ in range(20):
            w, x = torch.full((4, 4), float(k)), torch.eye(4)
            got = called(run, w, x)
            if not torch.equal(got[0], w - x):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nat ...")

    monkeypatch.setattr(recorded.runner.cuda, "CudaGraph", refuses)
    run = Recorded("step", fresh)
    called(run, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(
        ShardError,
        match="step: cuda_graphs=True, but the program cannot be recorded in a CUDA graph: op",
    ):
        run([torch.ones(2, 2), torch.ones(2, 2)])
