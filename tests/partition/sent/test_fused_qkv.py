"""A fused projection of queries, keys and values, sharded as three blocks: what is sent is what
three projections send, and a plain shard is told the placement that mends it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks
from torch.distributed.tensor import DTensor

import shardfn as sf
from shardfn import P, _compat

B, T, SIZE = 2, 3, 2
PACKED = P(None, "tp*3")


def _attended(parts: tuple[torch.Tensor, ...], out: torch.Tensor, size: int) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in parts)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return heads.transpose(1, 2).flatten(2) @ out


def by_split(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _attended((x @ w + b).split(w.shape[1] // 3, dim=-1), out, SIZE)


def by_chunk(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return _attended(F.linear(x, w.t(), b).chunk(3, -1), out, SIZE)


def by_conv1d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As GPT-2 of transformers computes it."""
    y = torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.shape[:2], -1)
    return _attended(y.split(w.shape[1] // 3, dim=2), out, SIZE)


def step(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The loss, the gradients, and new weights by SGD."""

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return fn(*args).sin().square().sum()

    def step(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        value, grads = sf.value_and_grad(loss, argnums=(1, 2, 3))(x, *weights)
        return value, [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    return step


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def arguments(heads: int) -> tuple[torch.Tensor, ...]:
    n = heads * SIZE
    return drawn(B, T, n), drawn(n, 3 * n), drawn(3 * n), drawn(n, n)


ARGS = arguments(4)
UNEVEN = arguments(3)  # 3 heads over 2 ranks: a head is on both


def over(fn: Callable[..., Any], mesh: Any, weight: P = PACKED) -> Any:
    bias = P(weight.parts[1])
    first = P("dp") if "dp" in mesh.mesh_dim_names else P()
    places = (first, weight, bias, P("tp"))
    return sf.shard(fn, mesh, places, backend="aten", implicit_comm="allow")


@pytest.mark.parametrize("fn", [by_split, by_chunk, by_conv1d])
def test_three_blocks_send_one_sum_of_the_result(fn: Callable[..., Any]) -> None:
    """The input has no gradient, so backward sends nothing."""
    wanted = step(fn)(*ARGS)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        sharded = over(step(fn), mesh)
        got = sharded(*ARGS)
        equal(sf.full(got), wanted)
        (sent,) = sharded.lower(*ARGS).collectives
        assert (sent.kind, sent.nbytes) == ("all_reduce", ARGS[0].nbytes)
        # new weights lie as the old ones, so they are arguments of the next step
        weights = got[1]
        again = sharded(ARGS[0], *weights)
        equal(sf.full(again), step(fn)(ARGS[0], *wanted[1]))
        assert weights[0].placements == (_compat.strided_shard(1, 3),)


@pytest.mark.parametrize("weight", [PACKED, P(None, ("tp*3", "dp"))], ids=str)
def test_on_two_axes_and_with_uneven_shards_it_equals_one_device(weight: P) -> None:
    """The second weight: what a rank of tp has of each block is sharded over dp."""
    is_plain = weight == PACKED
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        sharded = over(step(by_split), mesh, weight)
        for args in (ARGS, UNEVEN) if is_plain else (ARGS,):
            equal(sf.full(sharded(*args)), step(by_split)(*args))
        kinds = {c.kind for c in sharded.lower(*ARGS).collectives}
        assert is_plain == (kinds == {"all_reduce"})


def test_values_enter_leave_and_are_constrained_in_blocks() -> None:
    x = drawn(4, 15)  # blocks of 5 over 2 ranks
    fn = lambda x: sf.constrain(x * 2, P(None, "a*3")).sin()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        placed = sf.distribute(x, mesh, P(None, "a*3"))
        assert torch.equal(sf.full(placed), x)
        first, _ = _compat.local_tensor(placed).shards
        assert torch.equal(first, torch.cat([x[:, k : k + 3] for k in (0, 5, 10)], 1))
        for into in (P("a"), P(None, "a"), P(None, "a*3"), P(None, "a*5")):
            for out in (P("a"), P(None, "a"), P(None, "a*5"), None):
                sharded = sf.shard(fn, mesh, into, out, backend="aten")
                equal(sf.full(sharded(x)), (x * 2).sin())
        moved = sf.shard(fn, mesh, [_compat.strided_shard(1, 3)], backend="aten")
        equal(sf.full(moved(placed)), (x * 2).sin())


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (P("a*4"), "'a*4' views dim 0 of size 6 as 4 equal blocks, so 4 must divide it"),
        (P(("a", "b*3")), "only the first axis may do so: ('b*3', 'a')"),
        (P("a*"), "names 'a*' for dim 0, which is not an axis name"),
        (P("a*0"), "names 'a*0' for dim 0, which is not an axis name"),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit_are_refused_by_name(spec: P, said: str) -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        with pytest.raises(sf.PlacementError) as caught:
            sf.distribute(drawn(6, 2), mesh, spec)
    assert said in str(caught.value)


def test_a_plain_shard_is_told_the_blocks() -> None:
    width = 4096
    of = lambda *shape: sf.ShapeDtype(shape, torch.float32)
    args = (of(16, 256, width), of(width, 3 * width), of(width, width))
    fn = lambda x, w, out: _attended((x @ w).chunk(3, -1), out, 64)
    texts = []
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("tp",))
        for weight in (P(None, "tp"), PACKED):
            places = (P(), weight, P("tp"))
            sharded = sf.shard(fn, mesh, places, backend="aten")
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                sharded.lower(*args)
            texts.append([str(warning.message) for warning in seen])
    told, untold = texts
    assert "at P(None, 'tp*3') in place of P(None, 'tp')" in "".join(told)
    assert not untold


@pytest.mark.parametrize(
    ("bias", "said"),
    [
        (P("tp"), "b at P('tp*3') in place of P('tp') and w at P(None, 'tp*3')"),
        (P(), "try: w at P(None, 'tp*3') in place of P(None, 'tp')"),
        (P("tp*3"), "try: w at P(None, 'tp*3') in place of P(None, 'tp')"),
    ],
    ids=str,
)
def test_blocks_are_said_with_a_bias_beside_the_weight(bias: P, said: str) -> None:
    width = 4096
    of = lambda *shape: sf.ShapeDtype(shape, torch.float32)
    x, out = of(16, 256, width), of(width, width)
    args = x, of(width, 3 * width), of(3 * width), out
    fn = lambda x, w, b, out: _attended((x @ w + b).chunk(3, -1), out, 64)
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("tp",))
        places = (P(), P(None, "tp"), bias, P("tp"))
        sharded = sf.shard(fn, mesh, places, backend="aten")
        with pytest.warns(UserWarning) as seen:
            sharded.lower(*args)
    assert said in "".join(str(warning.message) for warning in seen)


def _on_two_ranks() -> Any:
    sharded = over(step(by_conv1d), sf.make_mesh((2,), ("tp",)))
    loss, weights = sharded(*UNEVEN)
    assert all(isinstance(w, DTensor) for w in weights)
    return sf.full((loss, weights))


def test_two_processes_compute_what_the_simulator_does() -> None:
    with sf.fake_world(2):
        simulated = _on_two_ranks()
    for real in run_ranks(2, _on_two_ranks):
        torch.testing.assert_close(real, simulated, rtol=0, atol=0)
