"""Digests of values: those of real ranks are those of simulated ones, and two runs are told apart
by the first value that differs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import compared_steps as steps
import pytest
import torch
from compared_steps import BATCH, COLUMNS, ROWS, TRAINED, Case
from ranks import run_ranks

import shardfn as sf
from shardfn import P
from shardfn.mesh import all_coordinates
from shardfn.proof.comparisons.compare_digests import DigestComparison
from shardfn.proof.comparisons.digests import hash_of, norm_of, projection_of
from shardfn.proof.comparisons.read_digests import read_digests
from shardfn.runtime.layouts import cut
from shardfn.types import MeshAxes
from shardfn.world import current_world


def compared(*paths: Any, **options: Any) -> DigestComparison:
    result = sf.compare(*map(str, paths), **options)
    assert isinstance(result, DigestComparison)
    return result


def train(sizes: dict[str, int] | None, placements: Any, times: int = 2, **plant: Any) -> list[Any]:
    """Some steps on a mesh of the current world, or on one device."""
    case = Case(steps.planted(**plant), TRAINED, {})
    w, v, x, y = case.arguments(torch.float32)
    step = sf.jit(case.step)
    if sizes is not None:
        mesh = sf.make_mesh(tuple(sizes.values()), tuple(sizes), device_type="cpu")
        step = sf.shard(case.step, mesh, placements, (*placements[:2], None))
    for _ in range(times):
        w, v, loss = step(w, v, x, y)
    return [sf.full(t) for t in (w, v, loss)]


TENSOR_PARALLEL = {"dp": 1, "tp": 2}, (COLUMNS, ROWS, BATCH, BATCH)
DATA_PARALLEL = {"dp": 2}, (None, None, BATCH, BATCH)


def record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: Any = TENSOR_PARALLEL, **plant: Any
) -> list[Any]:
    """Digests of a simulated run."""
    monkeypatch.setenv("SHARDFN_DIGESTS", str(folder))
    with sf.fake_world(2):
        results = train(*layout, **plant)
    monkeypatch.delenv("SHARDFN_DIGESTS")
    return results


def on_real_ranks(layout: Any, folder: str) -> list[Any]:
    assert current_world().kind == "real"
    os.environ["SHARDFN_DIGESTS"] = folder
    return train(*layout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Digests of one training run: simulated, real, on another mesh, with a fault."""
    root = tmp_path_factory.mktemp("digests")
    with pytest.MonkeyPatch.context() as patch:
        results = record(root / "simulated", patch)
        record(root / "data parallel", patch, DATA_PARALLEL)
        record(root / "fault", patch, power=0.45)
        for real in run_ranks(2, on_real_ranks, TENSOR_PARALLEL, str(root / "real")):
            assert all(map(torch.equal, real, results))
        patch.setenv("SHARDFN_DIGESTS", str(root / "one device"))
        train(None, None)
    return {path.name: path for path in root.iterdir()}


def test_real_ranks_write_the_digests_of_simulated_ones(folders: dict[str, Path]) -> None:
    result = compared(folders["simulated"], folders["real"])
    assert result and result.first is None and result.first_bytes is None
    assert result.same == result.values > 100
    assert "every difference is explained" in str(result)
    names = [sorted(x.name for x in folders[name].iterdir()) for name in ("simulated", "real")]
    assert names[0] == names[1] == ["rank0.jsonl", "rank1.jsonl"]


@pytest.mark.parametrize("other", ["data parallel", "one device"])
def test_runs_of_other_layouts_differ_nowhere(folders: dict[str, Path], other: str) -> None:
    result = compared(folders["real"], folders[other])
    assert result, result
    assert result.values > 100
    assert result.same < result.values


@pytest.mark.parametrize("name", ["simulated", "real", "data parallel", "one device"])
def test_the_first_value_that_differs_is_named(folders: dict[str, Path], name: str) -> None:
    result = compared(folders[name], folders["fault"])
    first = result.first
    assert first is not None and not result
    # the first op of a and b whose values differ though its inputs agree
    assert (first.op, first.call, first.phase) == ("pow", 0, "forward")
    assert str(first.line).endswith(f":{_line_of('power')}")
    assert first.difference is not None and first.difference > 1e-3
    assert first.inputs < 1e-5
    if name in ("simulated", "real"):
        assert first.ranks == (0, 1)
        assert result.first_bytes == f"pow at compared_steps.py:{_line_of('power')}"


def _line_of(mark: str) -> int:
    text = Path(steps.__file__).read_text().splitlines()
    (number,) = (i for i, row in enumerate(text, 1) if row.endswith(f"# {mark}"))
    return number


def test_it_raises_where_it_is_asked_to(folders: dict[str, Path]) -> None:
    with pytest.raises(sf.DivergenceError, match="first: pow at"):
        compared(folders["simulated"], folders["fault"], raises=True)
    assert compared(folders["simulated"], folders["real"], raises=True)


def test_one_rank_alone_can_be_compared(folders: dict[str, Path]) -> None:
    result = compared(folders["real"] / "rank1.jsonl", folders["simulated"] / "rank1.jsonl")
    assert result and result.same == result.values > 100


def test_a_line_has_op_line_placements_hash_and_norm(folders: dict[str, Path]) -> None:
    head, *rows = (folders["real"] / "rank1.jsonl").read_text().splitlines()
    assert json.loads(head) == {
        "call": "shard(step)",
        "axes": ["dp", "tp"],
        "sizes": [1, 2],
        "coordinates": [0, 1],
    }
    first = json.loads(rows[0])
    (w, *_) = Case(steps.train, TRAINED, {}).arguments(torch.float32)
    mine = w[:, 4:]
    assert first["op"] == "argument w" and first["placements"] == ["R", 1]
    assert first["shape"] == [7, 8] and first["dtype"] == "float32"
    assert first["hash"] == hash_of(mine)
    assert first["norm"] == pytest.approx(float(mine.double().norm()), rel=1e-12)


def test_nothing_is_compiled_where_digests_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDFN_DIGESTS", str(tmp_path / "d"))
    step = sf.jit(lambda x: (x * 2).sum())
    assert step(torch.ones(3)) == 6.0
    assert step(torch.ones(3)) == 6.0
    (call, again) = read_digests(tmp_path / "d")
    assert [v.op for v in call.values.values()] == ["argument x", "mul", "sum"]
    assert call.name == again.name == "jit(<lambda>)"
    monkeypatch.delenv("SHARDFN_DIGESTS")
    other = sf.jit(lambda x: (x * 3).sum(), backend="aten")
    assert other(torch.ones(3)) == 9.0
    assert len(read_digests(tmp_path / "d")) == 2


@pytest.mark.parametrize(
    ("marks", "sizes"),
    [
        ((0, "R"), (2, 3)),
        ((0, 1), (2, 3)),
        ((1, 1), (2, 2)),
        (((0, 1, 3), "R"), (2, 2)),
        (((0, 1, -4), 1), (2, 2)),
    ],
)
def test_projections_of_shards_add_up(marks: Any, sizes: Any) -> None:
    axes = MeshAxes(("a", "b"), sizes)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    none = MeshAxes((), ())
    total = 0.0
    squares = 0.0
    for c in all_coordinates(axes):
        if all(m != "R" or not k for m, k in zip(marks, c, strict=True)):
            mine = cut(x, marks, axes, c)
            total += projection_of(mine, (12, 5), marks, axes, c)
            squares += norm_of(mine) ** 2
    assert total == pytest.approx(projection_of(x, (12, 5), (), none, ()), rel=1e-12)
    assert math.sqrt(squares) == pytest.approx(norm_of(x), rel=1e-12)
    flipped = projection_of(x.flip(0), (12, 5), (), none, ())
    assert abs(flipped - total) > 1e-3  # it sees the order of elements


def test_each_bad_folder_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    good = folders["simulated"]

    def changed(name: str, change: Any) -> Path:
        shutil.copytree(good, tmp_path / name)
        change(tmp_path / name)
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    text = (good / "rank1.jsonl").read_text()
    half = text.splitlines()[: text.splitlines().index(text.splitlines()[0], 1)]
    bad = [
        (tmp_path / "none", "the folder does not exist"),
        (tmp_path / "empty", r"the folder has no files rank\*.jsonl"),
        (
            changed("cut", lambda d: (d / "rank1.jsonl").write_text(text[:-9])),
            "line .* of rank1.jsonl is no digest",
        ),
        (
            changed("list", lambda d: (d / "rank0.jsonl").write_text("[1]\n")),
            "line 1 of rank0.jsonl is no digest",
        ),
        (
            changed("half", lambda d: (d / "rank1.jsonl").write_text("\n".join(half))),
            "ranks have recorded different calls",
        ),
        (
            changed(
                "other",
                lambda d: (d / "rank1.jsonl").write_text(text.replace("shard(step)", "jit(f)")),
            ),
            "ranks have recorded different calls",
        ),
    ]
    for path, message in bad:
        with pytest.raises(sf.ShardError, match=message):
            compared(good, path)


def test_runs_of_other_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, fn: Any, times: int) -> Path:
        monkeypatch.setenv("SHARDFN_DIGESTS", str(tmp_path / name))
        step = sf.jit(fn)
        for _ in range(times):
            step(torch.ones(3))
        return tmp_path / name

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    one, two = run("one", double, 1), run("two", double, 2)
    other = run("other", lambda x: x * 2, 1)
    with pytest.raises(sf.ShardError, match="has 1 calls, .* has 2"):
        compared(one, two)
    with pytest.raises(sf.ShardError, match=r"call 0 is jit\(double\) in a, jit\(<lambda>\) in b"):
        compared(one, other)
    with pytest.raises(sf.ShardError, match="the paths of two folders"):
        sf.compare(str(one), str(two), str(other))


def test_a_nan_on_one_side_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, x: torch.Tensor) -> Path:
        monkeypatch.setenv("SHARDFN_DIGESTS", str(tmp_path / name))
        sf.jit(lambda x: x.log().exp())(x)
        return tmp_path / name

    fine, nan = run("fine", torch.tensor([1.0])), run("nan", torch.tensor([-1.0]))
    again = run("again", torch.tensor([-1.0]))
    result = compared(fine, nan)
    assert result.first is not None and result.first.op == "argument x"
    assert compared(nan, again)


def test_values_of_per_rank_code_are_compared_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, factor: float) -> Path:
        monkeypatch.setenv("SHARDFN_DIGESTS", str(tmp_path / name))
        with sf.fake_world(2):
            mesh = sf.make_mesh((2,), ("dp",))
            body = lambda x: sf.psum(x * factor, "dp")
            mapped = sf.shard_map(body, mesh, P("dp"), P())
            sf.shard(mapped, mesh, P("dp"))(torch.ones(4))
        return tmp_path / name

    one, same, other = run("one", 2.0), run("same", 2.0), run("other", 3.0)
    assert compared(one, same).same == compared(one, same).values
    assert compared(one, other).first_bytes is not None
    assert str(compared(one, other).first_bytes).startswith("mul at test_digests.py")
