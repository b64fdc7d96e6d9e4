"""Traces of torch.profiler, written by hand: on a CPU with Gloo, and on a GPU with NCCL."""

from __future__ import annotations

from typing import Any

import pytest

import shardfn as sf
from shardfn.inspect.timeline.profile import calls_in

REDUCE = "shardfn: all_reduce over dp, model.py:3"
LINE = "shardfn: model.py:2"


def row(name: str, start: float, took: float, cat: str = "cpu_op", tid: int = 1, i: int = 0) -> Any:
    args = {"External id": i}
    return {
        "ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": start, "dur": took,
        "args": args,
    }  # fmt: skip


def host(*more: Any) -> list[Any]:
    """One call: a product, an all-reduce and the wait for it, as the host starts them."""
    return [
        row("shardfn: call of f", 0.0, 100.0, "user_annotation"),
        row(LINE, 5.0, 20.0, "user_annotation"),
        row("aten::matmul", 6.0, 15.0, i=1),
        row("aten::mm", 7.0, 10.0, i=2),
        row(REDUCE, 30.0, 6.0, "user_annotation"),
        row("_c10d_functional::all_reduce", 31.0, 4.0, i=3),
        row("shardfn: wait for all_reduce over dp, model.py:3", 40.0, 25.0, "user_annotation"),
        row("_c10d_functional::wait_tensor", 41.0, 23.0, i=4),
        *more,
    ]


def test_on_a_cpu_a_collective_takes_what_gloo_recorded() -> None:
    rows = host(
        row("gloo:send", 32.0, 3.0, "user_annotation", tid=2),
        row("gloo:all_reduce", 33.0, 28.0, "user_annotation", tid=2),
    )
    (call,) = calls_in("overlay", "f", rows)
    assert (call.seconds, call.waits) == pytest.approx((100e-6, 25e-6))
    (sent,) = call.collectives
    assert (sent.kind, sent.range) == ("all_reduce", REDUCE)
    assert sent.seconds == pytest.approx(28e-6)
    assert call.ops == pytest.approx({("matmul", LINE): 15e-6})


def test_without_a_record_a_collective_takes_until_its_wait_ends() -> None:
    (call,) = calls_in("overlay", "f", host())
    assert call.collectives[0].seconds == pytest.approx(65e-6 - 31e-6)


def test_on_a_gpu_ops_and_collectives_take_what_their_kernels_take() -> None:
    rows = host(
        row("gemm", 200.0, 50.0, "kernel", tid=7, i=2),
        row("gemm", 240.0, 20.0, "kernel", tid=8, i=2),
        row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 255.0, 40.0, "kernel", tid=9, i=3),
    )
    (call,) = calls_in("overlay", "f", rows)
    assert call.seconds == pytest.approx(95e-6)
    assert call.seconds - call.waits == pytest.approx(60e-6)  # two kernels beside each other
    assert call.collectives[0].seconds == pytest.approx(40e-6)
    assert call.ops == pytest.approx({("matmul", LINE): 70e-6})


def test_an_op_that_a_dispatch_mode_has_seen_counts_once() -> None:
    rows = host(row("_c10d_functional::all_reduce", 29.0, 8.0))
    (call,) = calls_in("overlay", "f", rows)
    assert [x.range for x in call.collectives] == [REDUCE]


def test_calls_of_other_functions_are_named() -> None:
    with pytest.raises(sf.ShardError) as error:
        calls_in("overlay", "g", host())
    assert "the profile is a trace of another program: it has calls of f" in str(error.value)
