"""Zigzags at each door of the library: right, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from worlds import simulated

import shardfn as sf
from shardfn import P

# Sums of it are exact in any order.
X = torch.arange(192.0, dtype=torch.float64).reshape(4, 8, 6).sin().bfloat16().double()
SPEC = P("dp", sf.zigzag("cp"))


def program(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).cumsum(1) + x


def test_a_zigzag_argument_is_a_signature_of_its_own() -> None:
    with simulated(dp=2, cp=2) as mesh:
        f = sf.jit(program, backend="aten")
        for spec in (SPEC, P("dp", "cp"), P("dp"), SPEC):
            assert torch.equal(sf.full(f(sf.distribute(X, mesh, spec))), program(X))
        assert "already" in f.explain_retrace(sf.distribute(X, mesh, SPEC))
        g = sf.shard(program, mesh, SPEC, backend="aten")
        with pytest.raises(sf.PlacementError) as error:
            g(sf.distribute(X, mesh, P("dp", "cp")))
        assert (
            "the argument is placed Shard(dim=0) on dp, Shard(dim=1) on cp, but in_placements says"
            in str(error.value)
        )
        assert (
            "Shard(dim=0) on dp, Zigzag(1) on cp; redistribute the argument before the call"
            in str(error.value)
        )


def test_results_are_placed_as_out_placements_say() -> None:
    with simulated(dp=2, cp=2) as mesh:
        turned = sf.shard(program, mesh, P("dp", "cp"), SPEC, backend="aten")(X)
        assert turned.placements == (Shard(0), sf.Zigzag(1))
        assert torch.equal(sf.full(turned), program(X))
        plain = sf.shard(program, mesh, SPEC, P(None, "cp"), backend="aten")(X)
        assert plain.placements == (Replicate(), Shard(1))
        assert torch.equal(sf.full(plain), program(X))


def test_from_local_takes_what_to_local_gives() -> None:
    with simulated(dp=2, cp=2) as mesh:
        x = sf.distribute(X, mesh, SPEC)
        locals_ = [x.to_local(rank=rank) for rank in range(4)]
        assert torch.equal(locals_[2], X[2:, [0, 1, 6, 7]])
        again = sf.from_local(locals_, mesh, [Shard(0), sf.Zigzag(1)])
        assert again.placements == x.placements and torch.equal(sf.full(again), X)
        spec = P(None, (sf.zigzag("cp"), "dp"))
        x = sf.distribute(X, mesh, spec)
        locals_ = [x.to_local(rank=rank) for rank in range(4)]
        assert torch.equal(locals_[2], X[:, [1, 7]])  # dp 1, cp 0
        again = sf.from_local(locals_, mesh, spec)
        assert again.placements == x.placements and torch.equal(sf.full(again), X)
        locals_ = [sf.distribute(X, mesh, SPEC).to_local(rank=rank) for rank in range(4)]
        with pytest.raises(
            sf.PlacementError, match=r"after zigzag\('cp'\).*\(zigzag\('dp'\), 'cp'"
        ):
            sf.distribute(X, mesh, P(None, (sf.zigzag("cp"), sf.zigzag("dp"))))
        with pytest.raises(sf.PlacementError, match="views dim 1 of size 6 as 4 equal chunks"):
            sf.from_local([x[:, :3] for x in locals_], mesh, SPEC)
    with simulated(cp=3) as mesh:
        x = sf.distribute(X.reshape(12, 16), mesh, P(sf.zigzag("cp")))
        shards = [x.to_local(rank=rank) for rank in range(3)]  # (4, 16)
        assert torch.equal(sf.full(sf.from_local(shards, mesh, sf.Zigzag(0))), X.reshape(12, 16))
        same = sf.from_local(shards[0], mesh, P(sf.zigzag("cp")))
        assert same.shape == (12, 16) and torch.equal(same.to_local(rank=2), shards[0])


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_an_artefact_takes_and_returns_zigzags(backend: str, tmp_path: Path) -> None:
    with simulated(dp=2, cp=2) as mesh:
        sf.shard(program, mesh, SPEC, backend=backend).compile(X).save(tmp_path / "it")
        loaded = sf.load_compiled(tmp_path / "it")
        got = loaded(sf.distribute(X, mesh, SPEC))
        assert got.placements == (Shard(0), sf.Zigzag(1))
        torch.testing.assert_close(sf.full(got), program(X), rtol=1e-14, atol=1e-14)
        with pytest.raises(sf.TreeError) as error:
            loaded(sf.distribute(X, mesh, P("dp", "cp")))
        assert "the program is for Shard(dim=0) on dp, Zigzag(1) on cp" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "rows"), [(SPEC, None), (P(sf.zigzag("cp")), True), (P((sf.zigzag("cp"), "dp")), True)]
)
def test_a_loader_places_batches_as_zigzags(spec: P, rows: bool | None) -> None:
    with simulated(dp=2, cp=2) as mesh:
        data = torch.utils.data.DataLoader([*X.reshape(24, 8)], batch_size=8)
        batches = [*sf.loader(data, mesh, spec, rows=rows)]
        assert torch.equal(torch.cat(sf.full(batches)), X.reshape(24, 8))
        assert any(isinstance(p, sf.Zigzag) for p in batches[0].placements)


def test_check_tries_zigzags() -> None:
    x = torch.ones(4, 24).cumsum(1)
    spec = P(None, sf.zigzag("cp"))
    found = sf.check(program, x, worlds=[{"cp": 2}, {"cp": 3}], placements=spec)
    assert set(found.values()) == {0.0}


def test_a_pinned_layer_returns_a_zigzag() -> None:
    layer = torch.nn.Linear(6, 6, dtype=torch.float64)
    with simulated(dp=2, cp=2) as mesh, sf.pin(layer, {"": SPEC}):
        f = sf.shard(lambda x: layer(x).sin(), mesh, P("dp"), backend="aten")
        assert f(X).placements == (Shard(0), sf.Zigzag(1))
        torch.testing.assert_close(sf.full(f(X)), layer(X).sin().detach())


def test_a_program_prints_its_zigzags() -> None:
    with simulated(dp=2, cp=2) as mesh:
        low = sf.shard(lambda x: (x.flatten(0, 1) @ x.flatten(0, 1).mT, x), mesh, SPEC).lower(X)
        text = str(low)
        assert "f64[4@dp, 8@cp*zigzag, 6]" in text
        assert "@axis*zigzag: rank r of n holds chunks r and 2n - 1 - r of 2n" in text
        assert "f64[32@dp@cp*4*zigzag, 6]" in low.verbose(
            0
        ) or "32@dp:8@cp*4*zigzag" in low.verbose(0)
        with pytest.raises(sf.PlacementError, match=r"self is f64\[4@dp, 8@cp\*zigzag, 6\]"):
            sf.shard(program, mesh, SPEC, implicit_comm="error")(X)


def _in_shard_map(mesh: Any, ins: Any, outs: Any) -> Any:
    return sf.shard(sf.shard_map(lambda x: x * 2, mesh, ins, outs), mesh, backend="aten")(X)


def test_per_rank_code_takes_chunks() -> None:
    with simulated(dp=2, cp=2) as mesh:
        f = sf.shard_map(lambda x: x.cumsum(1), mesh, P("dp", "cp"), P("dp", "cp"))
        got = sf.shard(f, mesh, backend="aten")(sf.distribute(X, mesh, SPEC))
        wanted = torch.cat([half.cumsum(1) for half in X.chunk(2, 1)], 1)
        assert torch.equal(sf.full(got), wanted)
        why = (
            r"P\('dp', zigzag\('cp'\)\) shards dim 1 as a zigzag, but in shard_map each rank has "
            "one chunk; write the axis alone, or use the zigzag outside of shard_map"
        )
        with pytest.raises(sf.PlacementError, match=f"in_placements: x: {why}"):
            _in_shard_map(mesh, SPEC, P("dp"))
        with pytest.raises(sf.PlacementError, match=f"out_placements: result: {why}"):
            _in_shard_map(mesh, P("dp"), SPEC)
        with pytest.raises(sf.PlacementError, match="Zigzag is not a placement that shard_map"):
            _in_shard_map(mesh, [Replicate(), sf.Zigzag(1)], P("dp"))


def test_methods_of_a_dtensor_inside_of_a_function() -> None:
    with simulated(cp=2) as mesh:
        x = sf.distribute(X, mesh, P(None, sf.zigzag("cp")))
        back = sf.jit(lambda x: x.redistribute(mesh, [Shard(0)]) * 2, backend="aten")(x)
        assert back.placements == (Shard(0),) and torch.equal(sf.full(back), X * 2)
        with pytest.raises(
            sf.PlacementError, match="torch gave the DTensor the unsupported placement Zigzag"
        ):
            sf.jit(lambda x: x.to_local() * 2)(x)
        with pytest.raises(
            sf.CaptureError, match="torch gave the DTensor the unsupported placement Zigzag over cp"
        ):
            sf.jit(lambda x: x.sin().to_local())(x)
        strided = sf.distribute(X, mesh, P(None, "cp*2"))
        with pytest.raises(
            sf.CaptureError, match="the DTensor the unsupported placement _StridedShard over"
        ):
            sf.jit(lambda x: x.sin().to_local())(strided)
        with pytest.raises(sf.PlacementError, match="redistribute: Zigzag is not a placement"):
            sf.jit(lambda x: x.redistribute(mesh, [sf.Zigzag(0)]))(x)
        with pytest.raises(sf.PlacementError, match="from_local: Zigzag is not a placement"):
            sf.jit(lambda x: DTensor.from_local(x, mesh, [sf.Zigzag(0)]))(X)
