"""A call runs what was compiled for it before, and nothing that was compiled for another."""

from __future__ import annotations

from typing import Any

import torch
from stagings import counts, forget

import shardfn as sf
from shardfn import P
from shardfn.runtime.stages.reuse import KEPT

X = torch.arange(6.0)


def partitions(call: Any) -> tuple[Any, int]:
    before = counts["partitions"]
    return call(), counts["partitions"] - before


def test_shapes_global_tensors_and_dtensors_of_one_placement_share_a_program() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        step = sf.shard(lambda x: x * 2, mesh, P("dp"), backend="aten")
        step.compile(sf.ShapeDtype((6,)))
        placed = sf.distribute(X, mesh, P("dp"))
        for x in (X, placed):
            out, count = partitions(lambda x=x: step(x))
            assert count == 0 and torch.equal(sf.full(out), X * 2)


def test_a_program_that_was_lowered_is_not_lowered_again_while_it_is_in_use() -> None:
    step = sf.jit(lambda x: x * 2, backend="aten")
    lowered = step.lower(sf.ShapeDtype((6,)))
    out, count = partitions(lambda: step(X))
    assert count == 0 and torch.equal(out, X * 2)
    assert partitions(lambda: step(X[:5]))[1] == 1
    forget()
    assert partitions(lambda: step(X))[1] == 1 and lowered.traced is not None
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        sharded = sf.shard(lambda x: (x * 2).sum(), mesh, P("dp"), backend="aten")
        first = sharded.lower(X)
        assert partitions(lambda: sharded(sf.distribute(X, mesh, P("dp"))))[1] == 0
        assert first.collectives and sf.full(sharded(X)) == 30


def test_another_world_and_another_setting_have_programs_of_their_own() -> None:
    step = sf.shard(lambda x: x * 2, in_placements=P("dp"), backend="aten")
    for size in (2, 3):
        with sf.fake_world(size):
            mesh = sf.make_mesh((size,), ("dp",), device_type="cpu")
            with sf.use_mesh(mesh):
                step.compile(X)
                _, same = partitions(lambda: step(X))
                torch.use_deterministic_algorithms(True)
                try:
                    _, other = partitions(lambda: step(X))
                finally:
                    torch.use_deterministic_algorithms(False)
        assert (same, other) == (0, 1)


def test_a_call_that_autograd_follows_shares_no_program_with_one_that_it_does_not() -> None:
    step = sf.jit(lambda x: (x * x).sum(), backend="aten")
    w = X.clone().requires_grad_()
    step.compile(X)
    loss, count = partitions(lambda: step(w))
    loss.backward()
    assert count == 1 and torch.equal(w.grad, 2 * X)  # type: ignore[arg-type]
    assert not step(X).requires_grad


def test_a_bounded_number_of_programs_is_kept_and_clear_drops_them() -> None:
    step = sf.jit(lambda x: x * 2, backend="aten")
    for n in range(1, KEPT + 3):
        step.compile(torch.ones(n))
    store = step.request.store
    assert len(store.compiled) == KEPT
    sf.clear_cache()
    assert not store.compiled
    assert torch.equal(step(X), X * 2)
