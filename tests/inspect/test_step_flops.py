"""The operations of a step, against counts by hand and the formulas of papers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

CARD = sf.Hardware("a card", flops=2e9, flops32=1e9, memory=1e15, link=1e9, latency=0.0)
B, T, D, HEADS, LAYERS = 2, 6, 8, 2, 3


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention, whose four weights are one matrix."""
    heads = lambda x: x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    q, k, v = map(heads, (x @ w).chunk(3, -1))
    return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = F.embedding(tokens, params["emb"])
    x, _ = sf.scan(lambda x, w: (sf.checkpoint(layer)(x, w), None), x, params["layers"])
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), tokens.flatten())


def time_of(n: int = 1, hardware: sf.Hardware = CARD) -> Any:
    params = {"emb": (16, D), "layers": (LAYERS, D, 3 * D), "head": (D, 16)}
    args = {k: sf.ShapeDtype(shape) for k, shape in params.items()}
    tokens = sf.ShapeDtype((B * n, T), torch.int64)
    with sf.fake_world(n, numerics=False):
        mesh = sf.make_mesh((n,), ("dp",))
        run = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")), backend="aten")
        return run.lower(args, tokens).time(hardware)


def test_model_flops_are_6_n_and_12_l_d_s_for_each_token() -> None:
    parameters = LAYERS * D * 3 * D + D * 16
    wanted = B * T * (6 * parameters + 12 * LAYERS * D * T)
    for n in (1, 2):
        assert time_of(n).model_flops == wanted, "of one rank, whose batch is the same"


def test_a_program_runs_recomputation_and_half_of_causal_attention() -> None:
    tokens, weights = B * T, LAYERS * D * 3 * D
    products = tokens * (8 * weights + 6 * D * 16)
    pairs = tokens * LAYERS * D * T
    # of seven products of pairs, all but their sum with values are computed again
    assert time_of().flops == products + (2 + 2 + 5) * 2 * pairs / 2


def test_mfu_and_hfu_are_shares_of_the_peak_of_the_dtypes() -> None:
    time = time_of()
    assert time.hfu == pytest.approx(time.flops / CARD.flops32 / time.total)
    assert time.mfu == pytest.approx(time.model_flops / CARD.flops32 / time.total)
    assert time.mfu_of(time.model_flops / 2) == pytest.approx(time.mfu / 2)
    assert f"MFU {time.mfu:.1%}, HFU {time.hfu:.1%}" in str(time)
    slow = attrs.evolve(CARD, efficiency=sf.Efficiency(product32=0.5, attention=0.5))
    assert time_of(hardware=slow).hfu == pytest.approx(0.5, rel=0.01)


def test_products_of_16_bits_count_at_their_peak() -> None:
    step = sf.jit(lambda x: x @ x, backend="aten")
    time = step.lower(sf.ShapeDtype((64, 64), torch.bfloat16)).time(CARD)
    assert time.hfu == time.mfu == pytest.approx(2 * 64**3 / CARD.flops / time.total)


def test_a_convolution_of_data_has_a_gradient_of_its_weight_alone() -> None:
    """Its backward computes no gradient of the data, which is the first of its results."""
    fn = sf.grad(lambda w, x: F.conv2d(x, w).sum())
    lowered = sf.jit(fn, backend="aten").lower(torch.ones(4, 3, 3, 3), torch.ones(2, 3, 8, 8))
    products = 2 * 4 * 3 * 9 * 2 * 36  # of the gradient; the sum reads no value
    assert lowered.time(CARD).flops == products


def test_a_program_without_products_has_none() -> None:
    time = sf.jit(torch.sin, backend="aten").lower(sf.ShapeDtype((3,))).time(CARD)
    assert (time.flops, time.hfu, time.mfu, time.mfu_of(3.0)) == (0.0, 0.0, 0.0, 0.0)
    assert "MFU" not in str(time)


def test_a_branch_counts_as_the_one_that_runs_more() -> None:
    branches = lambda x: sf.cond(x.sum() > 0, lambda: x @ x, lambda: x @ (x @ x))
    time = sf.jit(branches, backend="aten").lower(sf.ShapeDtype((7, 7))).time(CARD)
    assert time.flops == 2 * 2 * 7**3


def test_bad_operations_are_refused() -> None:
    with pytest.raises(sf.ShardError, match="StepTime.mfu_of, flops"):
        time_of().mfu_of("many")


def test_what_ranks_compute_alike_is_needed_once() -> None:
    x, w = sf.ShapeDtype((64, 64)), sf.ShapeDtype((64, 64))
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        run = sf.shard(lambda x, w: x @ w, mesh, (P("dp"), P()), backend="aten")
        time = run.lower(x, w).time(CARD)
    assert time.flops == 2 * 64**3 / 2
    assert time.model_flops == 2 * 64**3 / 4
    assert time.mfu == pytest.approx(time.hfu / 2)


def pipeline(mesh: Any, first: P, second: P, rows: P) -> Any:
    """Lower two layers on two stages."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    step = sf.shard(sf.pipelined_grad(loss, 3), mesh, ([first, second], rows), backend="aten")
    weights = [sf.ShapeDtype((6, 6)), sf.ShapeDtype((6, 6))]
    return step.lower(weights, sf.ShapeDtype((12, 6)))


def test_what_the_ranks_of_a_stage_compute_alike_is_needed_once() -> None:
    product = 2 * 12 * 6 * 6
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("pp", "other"))
        split = pipeline(mesh, P(pp=0), P(pp=1), P("other"))
        alike = pipeline(mesh, P(pp=0), P(pp=1), P())
    for lowered, times in ((split, 1), (alike, 2)):
        time = lowered.time(CARD)
        # the first stage needs no gradient of its input
        assert time.flops == times * 2 * product / 2
        assert time.model_flops == pytest.approx(2 * product / 2)
        assert lowered.stage(1) is lowered.stage(1), "the other stages are lowered once"


@pytest.mark.parametrize("layers", [1, 3])
def test_a_forward_that_only_the_backward_reads_is_needed(layers: int) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return x.square().mean()

    params, x = [sf.ShapeDtype((6, 6))] * layers, sf.ShapeDtype((12, 6))
    product = 2 * 12 * 6 * 6
    for whole in (True, False):
        fn = sf.checkpoint(loss) if whole else lambda p, x: sf.checkpoint(loss)(p, x) + x.sum()
        for grad in (sf.grad, sf.value_and_grad):
            time = sf.jit(grad(fn), backend="aten").lower(params, x).time(CARD)
            assert time.model_flops == (3 * layers - 1) * product
            is_dropped = grad is sf.grad
            assert time.flops == ((3 if is_dropped else 4) * layers - 1) * product


def test_transfers_of_a_pipeline_are_those_within_its_stages() -> None:
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("pp", "tp"))
        lowered = pipeline(mesh, P(None, "tp", pp=0), P("tp", pp=1), P())
    found = {(x.kind, x.axis, x.implicit) for x in lowered.transfers}
    assert ("all_reduce", "tp", True) in found
    assert {x.kind for x in lowered.implicit} == {"all_reduce"}
