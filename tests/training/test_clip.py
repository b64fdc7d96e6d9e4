"""clip_by_global_norm equals torch's, alone, captured and sharded."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P
from tests.training.optim import table

GRADS = table.tree(0)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_clipping_equals_clip_grad_norm_(max_norm: float) -> None:
    own = [torch.zeros_like(x) for x in table.flat(GRADS)]
    for p, g in zip(own, table.flat(GRADS), strict=True):
        p.grad = g.clone()
    wanted = torch.nn.utils.clip_grad_norm_(own, max_norm)
    limit = torch.tensor(max_norm, dtype=torch.float64)
    captured = sf.jit(sf.clip_by_global_norm, backend="aten")
    for grads, norm in (sf.clip_by_global_norm(GRADS, max_norm), captured(GRADS, limit)):
        assert table.largest(grads, [p.grad for p in own]) < 1e-12
        assert abs(float(norm - wanted)) < 1e-12


def test_the_norm_of_nothing_is_zero() -> None:
    grads, norm = sf.clip_by_global_norm({"w": None}, 1.0)
    assert grads == {"w": None} and float(norm) == 0.0


def test_the_norm_of_shards_is_that_of_all() -> None:
    wanted, norm = sf.clip_by_global_norm(GRADS, 1.0)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = {"in": P("a"), "out": [P(None, "a"), P()]}
        fn = sf.shard(lambda g: sf.clip_by_global_norm(g, 1.0), mesh, (placed,), backend="aten")
        grads, of_all = sf.full(fn(GRADS))
        assert table.largest(grads, wanted) < 1e-12
        assert abs(float(of_all - norm)) < 1e-12


@pytest.mark.parametrize("replicated", [(), ("b",), ("b", "v"), ("w", "b", "v")])
def test_the_norms_of_shards_are_one_all_reduce(replicated: tuple[str, ...]) -> None:
    grads = {**GRADS["in"], "v": GRADS["out"][0]}
    wanted, norm = sf.clip_by_global_norm(grads, 1.0)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = {"w": P("a"), "b": P("a"), "v": P(None, "a")}
        placed |= dict.fromkeys(replicated, P())
        clip = lambda g: sf.clip_by_global_norm(g, 1.0)
        fn = sf.shard(clip, mesh, (placed,), (placed, P()), backend="aten")
        sent = fn.lower(grads).collectives
        clipped, of_all = sf.full(fn(grads))
    nbytes = 8 * (3 - len(replicated))
    assert [(c.kind, c.nbytes) for c in sent] == [("all_reduce", nbytes)] * (nbytes > 0)
    assert table.largest(clipped, wanted) < 1e-12
    assert abs(float(of_all - norm)) < 1e-12


def test_on_two_axes_it_is_one_all_reduce_over_each() -> None:
    grads = {**GRADS["in"], "v": GRADS["out"][0]}
    _, norm = sf.clip_by_global_norm(grads, 1.0)
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("a", "b"))
        placed = {"w": P("a", "b"), "b": P("a"), "v": P(None, "b")}
        clip = lambda g: sf.clip_by_global_norm(g, 1.0)
        fn = sf.shard(clip, mesh, (placed,), (placed, P()), backend="aten")
        sent = fn.lower(grads).collectives
        of_all = sf.full(fn(grads)[1])
    assert [(c.axis, c.nbytes) for c in sent] == [("a", 16), ("b", 16)]
    assert abs(float(of_all - norm)) < 1e-12


def test_the_derivative_at_a_gradient_of_zeros_is_that_of_torch() -> None:
    w = torch.tensor([3.0, 4.0], dtype=torch.float64)
    grads = [torch.zeros(3, dtype=torch.float64), w]
    found = sf.grad(lambda g: sf.clip_by_global_norm(g, 1.0)[1])(grads)
    assert torch.equal(found[0], grads[0])
    assert torch.allclose(found[1], w / 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float32])
def test_the_norm_has_the_dtype_and_the_range_of_torch(dtype: torch.dtype) -> None:
    x = torch.full((7,), 300.0, dtype=dtype)  # the square is no float16
    y = torch.full((2, 3), 200.0, dtype=dtype)
    wanted = torch.nn.utils.get_total_norm([x, y])
    _, norm = sf.clip_by_global_norm([x, y], 1.0)
    assert norm.dtype == wanted.dtype
    torch.testing.assert_close(norm, wanted)


def test_a_norm_that_is_not_a_number_stays_so() -> None:
    (x,), norm = sf.clip_by_global_norm([torch.tensor([1.0, float("nan")])], 1.0)
    assert x.isnan().all() and norm.isnan()
