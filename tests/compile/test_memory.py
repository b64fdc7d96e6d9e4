"""The memory that is stated for a compiled step is about that of the code that Inductor writes for
it: at most 15% more, and 3% less, so that a step that is said to fit does; two Llamas fall below.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import shardfn as sf
from bench.remat import peak
from shardfn import P
from shardfn_demo import adamw, gpt, runs, train
from tests.support.stages import parallel
from tests.support.stages.allocations import allocated

LOW, HIGH = 0.97, 1.15
WIDTH, INNER = 256, 1024
R = torch.randn


def demo(*shape: int) -> Any:
    """The lowered step of `make demo`."""
    job = runs.Job(steps=1)
    mesh = sf.make_mesh(shape, ("dp", "tp"))
    params = gpt.init(job.config)
    where = gpt.placements(params)
    state = {"step": P(), "m": where, "v": where}
    places = (where, state, P("dp"), P("dp")), (where, state, P())
    step = sf.shard(train.step(job.config, job.lr), mesh, *places)
    return step.lower(params, adamw.init(params), *next(runs.batches(job)))


BEYOND = {  # how much is stated too little
    ("llama of words", "zero2 on 4"): 0.033,
    ("llama of words", "ddp x tensor"): 0.096,
}
MODELS = ("llama of words", "gpt")
STEPS = [
    *((model, where, "adamw") for model in MODELS for where in parallel.STRATEGIES),
    ("llama", "ddp on 2", "gradient"),
    ("llama", "tensor on 2", "gradient"),
    ("gelu mlp", "zero3 on 4", "adamw"),
    ("gelu mlp", "tensor on 2", "adamw"),
    ("scanned gpt", "zero3 on 4", "adamw"),
]


@pytest.mark.parametrize("case", STEPS, ids=", ".join)
def test_the_stated_peak_of_a_training_step_is_that_of_inductors_code(
    case: tuple[str, str, str],
) -> None:
    with sf.fake_world(parallel.size(case[1])):
        lowered = parallel.lowered(*case)
        stated = lowered.memory
        low = 1 - BEYOND.get(case[:2], 1 - LOW)
        assert low <= stated.peak / allocated(lowered) <= HIGH
        assert sum(tensor.nbytes for tensor in stated.alive) == stated.peak


@pytest.mark.parametrize("shape", [(2, 4), (2, 1)], ids=str)
def test_the_stated_peak_of_the_demo_is_that_of_inductors_code(shape: tuple[int, ...]) -> None:
    with sf.fake_world(shape[0] * shape[1]):
        lowered = demo(*shape)
        assert LOW <= lowered.memory.peak / allocated(lowered) <= HIGH


def gated_layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        h = F.rms_norm(x, (WIDTH,), w["norm"])
        x = x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    return x.square().mean()


@pytest.mark.parametrize("layers", [3, 6])
def test_the_weight_of_a_norm_does_not_keep_the_bucket_that_it_is_gathered_in(layers: int) -> None:
    shapes = {"norm": (WIDTH,), "gate": (WIDTH, INNER), "up": (WIDTH, INNER)}
    layer = {name: R(*shape) for name, shape in (shapes | {"down": (INNER, WIDTH)}).items()}
    params = {f"layer {k}": layer for k in range(layers)}
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        where = sf.strategy("zero3", params, mesh, min_bytes=0).params
        step = sf.bucketed_grad(gated_layers, cap="3.1MB", first_cap="3.1MB")
        lowered = sf.shard(step, mesh, (where, P("dp"))).lower(params, R(4, 1024, WIDTH))
        stated = lowered.memory
        assert LOW <= stated.peak / allocated(lowered) <= HIGH
        gathered = [x for x in stated.alive if x.name.startswith("all_gather")]
        assert 1 <= len(gathered) <= 2


def attention(*qkv: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    return out.square().sum()


def tensors(rows: int) -> list[sf.ShapeDtype]:
    return [sf.ShapeDtype((1, heads, rows, 64), torch.float32) for heads in (16, 4, 4)]


@pytest.mark.parametrize("axis", ["cp", sf.zigzag("cp")], ids=str)
def test_a_ring_holds_no_more_for_more_ranks(axis: Any) -> None:
    rows, step = 1024, sf.grad(attention, argnums=(0, 1, 2))
    one = sf.jit(step).lower(*tensors(rows)).memory.peak
    for n in (6, 16):
        with sf.fake_world(n):
            mesh = sf.make_mesh((n,), ("cp",))
            places = (P(None, None, axis),) * 3
            ring = sf.shard(step, mesh, places, attention={"cp": "ring"})
            lowered = ring.lower(*tensors(n * rows))
            held = allocated(lowered)
            assert LOW <= lowered.memory.peak / held <= HIGH
            assert held <= 1.75 * one


def mlp(w: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in w.values():
        x = torch.relu(x @ layer)
    return x.square().mean()


def scanned(w: Any, x: torch.Tensor) -> torch.Tensor:
    step = lambda c, layer: (c + torch.relu(c @ layer["up"]) @ layer["down"], c.sum())
    c, sums = sf.scan(step, x, w)
    return c.square().mean() + sums.mean()


RUN = {
    "mlp": (mlp, {str(k): R(256, 256) for k in range(3)}, R(1024, 256)),
    "scan": (scanned, dict(up=R(5, 128, 512), down=R(5, 512, 128)), R(512, 128)),
}


@pytest.mark.parametrize("name", RUN)
def test_the_stated_peak_is_what_the_compiled_program_is_seen_to_allocate(name: str) -> None:
    loss, w, x = RUN[name]
    step = sf.jit(sf.value_and_grad(loss))
    step(w, x)
    lowered = step.lower(w, x)
    given = [*tree_leaves((w, x)), *lowered.traced.captured.closed_over]
    seen = peak(lambda: step(w, x)) + sum(y.nbytes for y in given)
    assert LOW <= lowered.memory.peak / seen <= HIGH


def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((a @ b) * s).sum(1), ((a.sin() @ b) * s).sum(1)


def joined(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = torch.cat([a @ b, a @ c], 1)
    return both, both.softmax(1)


@pytest.mark.parametrize(
    ("fn", "last"), [(scaled, ()), (joined, (16, 256))], ids=["a scalar of two loops", "a cat"]
)
def test_the_stated_peak_is_that_of_inductors_code(fn: Any, last: tuple[int, ...]) -> None:
    lowered = sf.jit(fn, backend="inductor").lower(R(512, 16), R(16, 256), R(last))
    assert LOW <= lowered.memory.peak / allocated(lowered) <= HIGH


def test_a_chain_of_elementwise_ops_stores_its_end_alone() -> None:
    x = R(7, 5, dtype=torch.float64)
    compiled = sf.jit(lambda x: (x.sin() + 1).square().sum(1)).lower(x)
    assert compiled.memory.peak == x.nbytes + 7 * x.itemsize
