"""shard, constrain, grad and compose: forms, nesting, round trips, donation, caching."""

from __future__ import annotations

import functools
import gc
from typing import Any

import models
import pytest
import schemes
import torch
from stagings import counts, forget
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.runtime.stages import traced as stages


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def mesh() -> Any:
    with simulated(dp=2, tp=4) as mesh:
        yield mesh


def aten(fn: Any, mesh: Any, *args: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh, *args, backend="aten", **options)


def test_function_form_and_both_decorator_forms(mesh: Any) -> None:
    x = torch.arange(6.0)
    decorated = sf.shard(mesh=mesh, in_placements=P("dp"), backend="aten")(double)
    partial = functools.partial(sf.shard, mesh=mesh, in_placements=P("dp"), backend="aten")(double)
    for fn in (aten(double, mesh, P("dp")), decorated, partial):
        out = fn(x)
        assert isinstance(out, DTensor)
        assert out.placements == (Shard(0), Replicate())
        assert torch.equal(sf.full(out), x * 2)
        assert (repr(fn), fn.__wrapped__) == ("shard(double)", double)


def test_keywords_defaults_methods_and_constants(mesh: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.w = torch.arange(4.0)

        def apply(self, x: Any, *, power: int = 1, name: str = "a") -> Any:
            return {name: (x * self.w) ** power, "power": power}

    model = Model()
    fn = aten(model.apply, mesh, P("dp"))
    x = torch.ones(6, 4)
    assert torch.equal(sf.full(fn(x))["a"], x * model.w)
    out = sf.full(fn(x, power=2, name="b"))
    assert torch.equal(out["b"], (x * model.w) ** 2) and out["power"] == 2
    model.w.add_(1)  # closed-over tensors are read anew at each call
    assert torch.equal(sf.full(fn(x))["a"], x * model.w)


def test_constants_written_out_in_the_function(mesh: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:3] = 0
        y[:, 0] += 1
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0])

    x = torch.randn(6, 4)
    assert torch.equal(sf.full(aten(f, mesh, P("dp", "tp"))(x)), f(x))


def test_every_kind_of_placement_leaf(mesh: Any) -> None:
    x = torch.randn(8, 8)
    for leaf, placed in (
        (P("dp", "tp"), (Shard(0), Shard(1))),
        ([Shard(-1), Replicate()], (Shard(1), Replicate())),
        (P(("dp", "tp")), (Shard(0), Shard(0))),
        (None, (Replicate(), Replicate())),
    ):
        out = aten(double, mesh, (leaf,))(x)
        assert out.placements == placed
        assert torch.equal(sf.full(out), x * 2)
    one = sf.make_mesh((8,), ("dp",))
    assert aten(double, one, (Shard(1),))(x).placements == (Shard(1),)


def test_out_placements_and_pending_results(mesh: Any) -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    pending = [sf.Partial(), Replicate()]
    fn = aten(lambda x: (x.sum(0), x.sum(0)), mesh, P("dp"), (pending, P("tp")))
    a, b = fn(x)
    assert a.placements == (sf.Partial(), Replicate()) and b.placements == (Replicate(), Shard(0))
    for got in (a, b):
        assert_close(sf.full(got), x.sum(0))


def test_a_steps_outputs_feed_the_next_call_without_reshard_or_recompilation(mesh: Any) -> None:
    params, (x, y) = models.gpt_params(), models.tokens()
    step = aten(models.STEPS["gpt"], mesh, (schemes.mixed(params), P("dp"), P("dp")))
    params = sf.distribute(params, mesh, schemes.mixed(params))
    first, _, _ = step(params, x, y)
    before = dict(counts)
    second, grads, _ = step(first, x, y)
    third, _, _ = step(second, x, y)
    assert dict(counts) == before
    for a, b, g in zip(tree_leaves(params), tree_leaves(third), tree_leaves(grads), strict=True):
        assert a.placements == b.placements == g.placements and a.stride() == b.stride()


def test_s2_4_metadata_is_constant_over_calls(
    mesh: Any, caplog: pytest.LogCaptureFixture | None = None
) -> None:
    x = torch.randn(8, 8)
    fn = aten(double, mesh)
    forget()
    fn(sf.distribute(x, mesh, P("dp")))
    fn(
        sf.distribute(x, sf.make_mesh((2, 4), ("dp", "tp")), [Shard(0), Replicate()])
    )  # equal, not the same objects
    assert (counts["captures"], counts["partitions"]) == (1, 1)
    fn(sf.distribute(x, mesh, P("tp")))
    assert (counts["captures"], counts["partitions"]) == (1, 2)


def test_transforms_written_out_anew_share_what_was_captured(mesh: Any) -> None:
    forget()
    for _ in range(3):
        aten(double, mesh, P("dp"))(torch.ones(4))
        sf.grad(models.mlp_loss)(
            models.mlp_params(),
            torch.ones(3, 6, dtype=torch.float64),
            torch.ones(3, 3, dtype=torch.float64),
        )
    assert counts["captures"] == 2


def test_shard_inside_grad_and_grad_inside_shard(mesh: Any) -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    inner = aten(lambda x: (x.sin() * x).sum(), mesh, P("dp", "tp"))
    wanted = sf.grad(inner.fn)(x)
    for fn in (
        aten(sf.grad(inner), mesh),
        sf.compose(functools.partial(aten, mesh=mesh), sf.grad)(inner.fn),
    ):
        assert_close(sf.full(fn(x)), wanted)
    with sf.use_mesh(mesh):
        assert_close(sf.full(sf.grad(inner)(x)), wanted)
        placed = sf.distribute(x, mesh, P("dp"))
        out = sf.grad(inner)(placed)
        assert out.placements == placed.placements


def test_donated_arguments_are_gone_and_say_which_call_took_them(mesh: Any) -> None:
    fn = aten(double, mesh, P("dp"), donate_argnums=0)
    for x in (sf.distribute(torch.ones(8), mesh, P("dp")), torch.ones(8)):
        assert torch.equal(sf.full(fn(x)), torch.full((8,), 2.0))
        for use in (lambda x: x + 1, fn, sf.full if isinstance(x, DTensor) else fn):
            with pytest.raises(sf.ShardError) as error:
                use(x)
            assert str(error.value) == (
                "shard(double): the tensor was donated to this call, so its memory is gone\n"
                "  try: use the call's results, or leave the argument out of donate_argnums"
            )
        assert "DonatedTensor" in repr(x)


def test_compiled_donation_reuses_the_memory_and_the_second_call_compiles_nothing() -> None:
    mesh = sf.make_mesh((1,), ("dp",))
    try:
        x = torch.arange(64.0)
        address = x.data_ptr()
        fn = sf.shard(double, mesh, P("dp"), donate_argnums=0, backend="inductor")
        out = fn(x)
        assert out.to_local().data_ptr() == address
        before = dict(counts)
        gone, out = out, fn(fn(out))
        with pytest.raises(sf.ShardError, match="was donated to this call"):
            fn(gone)  # its spec is that of a ready signature, its memory is not there
        assert counts["compilations"] == before["compilations"], (
            "the program of the DTensor argument is that of the tensor"
        )
        assert torch.equal(sf.full(out), torch.arange(64.0) * 8)
    finally:
        torch.distributed.destroy_process_group()


def test_a_compiled_program_runs_its_own_signature_and_refuses_another(mesh: Any) -> None:
    compiled = aten(double, mesh, P("dp")).compile(sf.ShapeDtype((6, 2)))
    x = torch.randn(6, 2)
    assert torch.equal(sf.full(compiled(x)), x * 2)
    assert torch.equal(sf.full(compiled(sf.distribute(x, mesh, P("dp")))), x * 2)
    with pytest.raises(sf.TreeError) as error:
        compiled(torch.ones(5, 2))
    text = str(error.value).split("\n")
    assert text[:2] == [
        "compiled shard(double): the arguments differ from those that the program was compiled for",
        "  x: (5, 2) torch.float32, the program is for (6, 2) torch.float32",
    ]
    fix = "  try: call the transformed function itself, which compiles a program for each signature"
    assert text[3] == f"{fix}; a saved program has only the signature with which it was saved"
    with pytest.raises(sf.TreeError, match="args\\[1\\]: the program has no such leaf"):
        compiled(x, x)
    with pytest.raises(sf.TreeError, match="x: placed"):
        compiled(sf.distribute(x, mesh, P("tp")))


def test_no_garbage_is_looked_for_while_a_program_is_placed(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    cached_plan = stages.cached_plan
    monkeypatch.setattr(
        stages,
        "cached_plan",
        lambda *args, **options: (seen.append(gc.isenabled()), cached_plan(*args, **options))[1],
    )
    fn = aten(lambda x: x * 2, mesh, (P("dp"),))
    traced = fn.trace(sf.ShapeDtype((8, 16)))
    traced.lower()
    assert seen == [False] and gc.isenabled()
    with pytest.raises(sf.PlacementError, match="dim 2 of a tensor with 2 dims") as caught:
        aten(lambda x: x * 2, mesh, (P("dp"),), P(None, None, "dp")).trace(
            sf.ShapeDtype((8, 16))
        ).lower()
    assert caught.value.source.startswith(__file__) and gc.isenabled()
    gc.disable()
    try:
        traced.lower()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_stages_print_as_short_programs(mesh: Any) -> None:
    fn = aten(lambda x, w: torch.relu(x @ w), mesh, (P("dp", "tp"), P("tp")))
    x, w = sf.ShapeDtype((8, 16)), sf.ShapeDtype((16, 4))
    traced = fn.trace(x, w)
    assert "%mm = mm(%x, %w): f32[8, 4]" in str(traced)
    low = traced.lower()
    text = str(low)
    assert (
        text.splitlines()[0]
        == "shard(<lambda>) on mesh (dp=2, tp=4): 4 ops of one rank; 1 all_reduce over tp, 64 B"
    )
    assert "in    %x: f32[8@dp, 16@tp]" in text
    assert "in    %w: f32[16@tp, 4]" in text
    assert "%all_reduce = all_reduce[sum, tp](%mm): f32[4, 4]" in text
    assert "64 B" in text
    assert "# test_shard.py:" in text
    assert "return result = %relu: f32[8@dp, 4]" in text
    assert str(low.compile()).startswith("compiled with aten\nshard(<lambda>) on mesh")
