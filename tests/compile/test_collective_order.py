"""What survives Inductor, read from the code that it made: the order of collectives, and the
kernels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn import P
from shardfn.compile.collective_order import collective_events, refuse_other_order
from shardfn_demo import adamw

WIDTH, ROWS = 64, 32


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    for layer in params:
        x = torch.relu(x @ layer["w"] + layer["b"])
    return ((x - y) ** 2).mean()


def shapes(depth: int, width: int = WIDTH) -> tuple[Any, Any]:
    layer = {"w": sf.ShapeDtype((width, width)), "b": sf.ShapeDtype((width,))}
    return [layer] * depth, (sf.ShapeDtype((ROWS, width)),) * 2


@pytest.fixture
def world() -> Iterator[Any]:
    with sf.fake_world(2, numerics=False):
        yield sf.make_mesh((2,), ("dp",), device_type="cpu")


def sgd(cap: Any, first_cap: Any) -> Any:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = sf.bucketed_grad(loss_fn, cap, first_cap)(params, batch)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def calls(code: str) -> list[str]:
    """The kernels and collectives that generated code calls, in order."""
    names = (
        r"extern_kernels\.(\w+)\(|(cpp_fused\w*)\("
        r"|_c10d_functional\.(all_reduce_|wait_tensor)\.default\((\w+)"
    )
    body = code[code.index("def call(") :]
    return [" ".join(filter(None, found)) for found in re.findall(names, body)]


def test_s9_4_a_bucket_starts_before_the_backward_goes_on_and_is_waited_for_after_it(
    world: Any,
) -> None:
    params, batch = shapes(6)
    train = sf.shard(sgd(2 * WIDTH * WIDTH * 4, 1000), world, (P(), P("dp")))
    assert len(train.lower(params, batch).plan.buckets) == 4
    order = calls(train.compile(params, batch).code)
    starts = [i for i, call in enumerate(order) if call.startswith("all_reduce_")]
    waits = [i for i, call in enumerate(order) if call.startswith("wait_tensor")]
    products = [i for i, call in enumerate(order) if call == "mm"]
    for before, after in itertools.pairwise(starts):
        assert any(before < i < after for i in products), (
            "the backward goes on while a bucket is on its way"
        )
    assert max(products) < min(waits), "no wait stands in the way of the backward"


def test_s9_4_the_update_of_a_bucket_runs_while_the_next_is_on_its_way(world: Any) -> None:
    params, batch = shapes(6)
    order = calls(
        sf.shard(sgd(2 * WIDTH * WIDTH * 4, 1000), world, (P(), P("dp")))
        .compile(params, batch)
        .code
    )
    tail = [
        call.split()[0]
        for call in order[next(i for i, c in enumerate(order) if c.startswith("wait_tensor")) :]
    ]
    assert re.fullmatch(r"(wait_tensor (cpp_fused\w* ?)+)+", " ".join(tail)), tail
    buffers = [call.split()[1] for call in order if call.startswith("all_reduce_")]
    assert [call.split()[1] for call in order if call.startswith("wait_tensor")] == buffers


def test_s9_4_an_optimizer_that_shares_a_step_count_waits_bucket_by_bucket_too(world: Any) -> None:
    params, batch = shapes(4)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = sf.bucketed_grad(loss_fn, 2 * WIDTH * WIDTH * 4, 1000)(params, batch)
        return *adamw.update(params, grads, state), loss

    state = {"step": sf.ShapeDtype(()), "m": params, "v": params}
    order = calls(sf.shard(step, world, (P(), P(), P("dp"))).compile(params, state, batch).code)
    tail = " ".join(
        call.split()[0]
        for call in order[next(i for i, c in enumerate(order) if c.startswith("wait_tensor")) :]
    )
    assert len(re.findall(r"wait_tensor cpp_fused", tail)) == tail.count("wait_tensor") == 3


def test_s9_9_four_layers_of_2000_start_three_all_reduces_and_then_wait_for_three_in_the_code(
    world: Any,
) -> None:
    params, batch = shapes(4, 2000)
    compiled = sf.shard(sf.bucketed_grad(loss_fn, "25MB"), world, (P(), P("dp"))).compile(
        params, batch
    )
    assert [what for what, _ in collective_events(compiled.code)] == ["start"] * 3 + [
        "wait"
    ] * 3  # the loss rides in the first


def test_s9_5_caps_of_1_and_of_100_mb_capture_once_and_compile_the_same_compute_kernels(
    world: Any,
) -> None:
    params, batch = shapes(8, 300)
    train = sf.shard(sf.bucketed_grad(loss_fn), world, (P(), P("dp")))
    counts.clear()
    traced = train.trace(params, batch)
    small, large = traced.lower(cap="1MB"), traced.lower(cap="100MB")
    assert len(small.plan.buckets) == 3 and len(large.plan.buckets) == 2
    assert kernels(small.compile().code) == kernels(large.compile().code)
    assert counts["captures"] == 1


def kernels(code: str) -> list[str]:
    """The bodies of the fused kernels, and the calls of library kernels, in order."""
    fused = re.findall(r"async_compile\.cpp_pybinding\(.*?'''(.*?)'''", code, re.DOTALL)
    assert fused
    return [
        *fused,
        *(call for call in calls(code) if not call.startswith(("all_reduce_", "wait_tensor"))),
    ]


def test_gradients_are_written_where_they_are_sent_from_without_a_copy(world: Any) -> None:
    params, batch = shapes(5)
    code = (
        sf.shard(sf.bucketed_grad(loss_fn, "1MB"), world, (P(), P("dp")))
        .compile(params, batch)
        .code
    )
    (whole,) = re.findall(
        rf"(buf\d+) = empty_strided_cpu\(\({5 * (WIDTH * WIDTH + WIDTH) + 1}, \)", code
    )
    into = dict(re.findall(rf"(buf\d+) = reinterpret_tensor\({whole}, .*?, (\d+)\)  # alias", code))
    products = re.findall(r"extern_kernels\.mm\(.*out=(buf\d+)\)", code)
    assert sum(name in into for name in products) == 5, (
        "each weight's gradient is computed in its place"
    )


def test_a_compiler_that_changes_the_order_is_refused() -> None:
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        params, batch = shapes(2)
        lowered = sf.shard(sf.bucketed_grad(loss_fn, 1), mesh, (P("dp"), P("dp"))).lower(
            params, batch
        )
    with pytest.raises(sf.DivergenceError) as error:
        refuse_other_order(
            "f",
            lowered.program.graph,
            "torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', 'dp')",
        )
    first = lowered.collectives[0].kind
    assert str(error.value) == "\n".join([
        "f: Inductor changed the order of the program's collectives",
        f"  collective 0 is all_reduce in the code, {first} in the schedule",
        '  try: backend="aten", which keeps the order of the schedule',
    ])  # fmt: skip
