"""The time of a program under a model of the hardware, against figures by hand."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from ranks import run_ranks
from toy import TOY

import shardfn as sf
from shardfn import P

M, K, N = 64, 96, 32


def lowered(fn: Any, shapes: Any, where: Any = (), mesh: Any = (1,)) -> Any:
    names = ("dp", "tp")[: len(mesh)]
    with sf.fake_world(math.prod(mesh), numerics=False):
        made = sf.make_mesh(mesh, names)
        placed = where or (P(),) * len(shapes)
        args = [sf.ShapeDtype(shape) for shape in shapes]
        return sf.shard(fn, made, placed, backend="aten").lower(*args)


def test_an_op_takes_its_arithmetic_or_its_memory_traffic() -> None:
    product = 2 * M * K * N / TOY.flops32
    traffic = 4 * (M * N + M * N) / TOY.memory
    found = lowered(lambda x, w: (x @ w).relu(), [(M, K), (K, N)]).time(TOY)
    rows = {row.name: row.seconds for row in found.ops}
    assert rows == pytest.approx({"mm": product, "relu": traffic})
    assert found.compute == found.total == pytest.approx(product + traffic)
    assert found.communication == found.exposed == 0
    half = [torch.bfloat16] * 2
    args = [sf.ShapeDtype(*x) for x in zip([(M, K), (K, N)], half, strict=True)]
    fast = sf.jit(lambda x, w: x @ w, backend="aten").lower(*args).time(TOY)
    assert fast.compute == pytest.approx(product / 2)


def test_a_collective_takes_its_latency_and_its_bytes() -> None:
    low = lowered(lambda x: x.sum(0), [(8, K)], P("dp"), (4,))
    found = low.time(TOY)
    (reduced,) = [row for row in found.ops if row.axis]
    wanted = TOY.latency + 2 * 3 / 4 * 4 * K / TOY.link
    assert (reduced.name, reduced.axis, reduced.count) == ("all_reduce", "dp", 1)
    assert reduced.seconds == found.exposed == pytest.approx(wanted)
    slow = sf.Link(latency=1.0, bandwidth=1e30)
    assert low.time(TOY, links={"dp": slow}).exposed == pytest.approx(1.0)


def test_a_peak_that_does_not_fit_in_a_device_is_said() -> None:
    low = lowered(lambda x, w: x @ w, [(M, K), (K, N)])
    small = attrs.evolve(TOY, capacity=low.memory.peak - 8)
    assert low.time(small).excess == 8
    assert "does not fit" in str(low.time(small))
    for model in (TOY, attrs.evolve(small, capacity=low.memory.peak)):
        assert low.time(model).excess == 0
        assert "does not fit" not in str(low.time(model))


def test_an_axis_that_leaves_the_node_uses_the_network() -> None:
    low = lowered(lambda x: x.sum(), [(8, 8)], P("dp", "tp"), (4, 2))
    links = TOY.links(low.program.axes)
    assert links["tp"] == sf.Link(TOY.latency, TOY.link)
    together = 2  # ranks of a node that belong to different groups of dp
    assert links["dp"] == sf.Link(TOY.network_latency, together * TOY.network)


def test_a_scan_takes_as_long_as_its_steps() -> None:
    def scanned(w: Any, x: Any) -> Any:
        return sf.scan(lambda h, w: (torch.tanh(h @ w), None), x, w)[0]

    def unrolled(w: Any, x: Any) -> Any:
        for i in range(5):
            x = torch.tanh(x @ w[i])
        return x

    shapes = [(5, K, K), (M, K)]
    where = (P(None, "dp"), P("dp"))
    for mesh in ((1,), (3,)):
        loop, written = (lowered(fn, shapes, where, mesh).time(TOY) for fn in (scanned, unrolled))
        for name in ("mm", "tanh", *(("all_gather",) if mesh == (3,) else ())):
            assert _of(loop, name) == pytest.approx(_of(written, name))
        assert loop.total >= sum(_of(loop, name)[1] for name in ("mm", "tanh"))


def _of(found: Any, name: str) -> tuple[int, float]:
    rows = [row for row in found.ops if row.name == name]
    return sum(row.count for row in rows), sum(row.seconds for row in rows)


def test_a_cond_takes_its_longer_branch_and_a_while_loop_one_step() -> None:
    def branched(x: Any, w: Any) -> Any:
        return sf.cond(x.sum() > 0, lambda: x @ w, lambda: x @ (w @ w))

    def repeated(x: Any, w: Any) -> Any:
        return sf.while_loop(lambda h: h.sum() < 9, lambda h: h @ w, x)

    shapes = [(M, K), (K, K)]
    assert _of(lowered(branched, shapes).time(TOY), "mm")[0] == 2
    loop = lowered(repeated, shapes).time(TOY)
    assert loop.endless == 1 and _of(loop, "mm")[0] == 1
    assert str(loop).endswith("\n1 while loops count as one iteration each")


def test_the_text_names_lines_and_the_total() -> None:
    text = str(lowered(lambda x: x.sum(), [(8, 8)], P("dp"), (4,)).time(TOY))
    first, *_ = text.splitlines()
    assert first.startswith("shard(<lambda>): ")
    assert first.endswith(" us a step on a toy")
    assert "all_reduce over dp" in text and "test_step_time.py:" in text


def test_names_stand_for_real_machines_and_others_are_refused() -> None:
    low = lowered(lambda x: x @ x, [(512, 512)])
    times = [low.time(name).total for name in ("A100", "H100", "B200")]
    assert times == sorted(times, reverse=True) and len(set(times)) == 3
    assert low.time() == low.time("H100")
    with pytest.raises(sf.ShardError) as error:
        low.time("H900")
    assert str(error.value) == (
        "Lowered.time: hardware is 'H900'\n  needed: the name of a known device (A100, H100, "
        "H100-96GB, H200, B200, GB200), or an sf.Hardware\n  try: sf.Hardware(name, flops, "
        "...) with the figures of the device, or sf.measure_hardware() for this machine"
    )
    with pytest.raises(sf.ShardError) as error:
        low.time("A100", links={"pp": 3})
    assert str(error.value) == (
        "Lowered.time: links['pp'] is 3\n"
        "  needed: an sf.Link for one of the axes dp\n"
        "  try: sf.Link(latency=10e-6, bandwidth=50e9)"
    )


def _measured() -> tuple[float, ...]:
    found = sf.measure_hardware()
    return found.flops32, found.memory, found.link, found.latency


def test_this_machine_is_measured_and_all_ranks_have_the_same_figures() -> None:
    flops, memory, link, latency = _measured()
    assert 1e8 < flops < 1e15 and 1e8 < memory < 1e14
    assert link == math.inf and latency == 0
    first, second = run_ranks(2, _measured)
    assert first == second
    assert 1e6 < first[2] < 1e13 and 0 < first[3] < 1
