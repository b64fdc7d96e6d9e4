"""load: what it reads, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.checkpoints.files import Files

TREE = {"w": torch.arange(6.0).reshape(2, 3), "epoch": 3, "b": torch.ones(4)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return sf.save(tmp_path, TREE, step=5)


def _refused(path: Any, like: Any = TREE, *args: Any, **options: Any) -> str:
    with pytest.raises(sf.CheckpointError) as error:
        sf.load(path, like, *args, **options)
    return str(error.value)


def test_all_mismatches_are_listed_at_once(folder: str) -> None:
    like = {"w": torch.zeros(3, 2), "epoch": torch.ones(1), "new": 1}
    assert _refused(folder, like) == (
        f"load: {folder} holds another tree\n"
        "  new: in the tree, not in the checkpoint\n"
        "  b: in the checkpoint, not in the tree\n"
        "  w: torch.float32 (2, 3) in the checkpoint, torch.float32 (3, 2) in the tree\n"
        "  epoch: a constant in the checkpoint, a tensor in the tree\n"
        "  try: the tree that was saved; strict=False leaves out what it does not have"
    )


def test_another_dtype_is_refused(folder: str) -> None:
    text = _refused(folder, {**TREE, "b": torch.ones(4, dtype=torch.float64)})
    assert "b: torch.float32 (4,) in the checkpoint, torch.float64 (4,)" in text


def test_a_long_list_of_mismatches_is_cut(folder: str) -> None:
    text = _refused(folder, {**TREE, **{f"x{i}": 1 for i in range(50)}})
    assert text.count("\n") == 22
    assert "\n  and 30 more\n" in text


def test_a_part_of_a_checkpoint(folder: str) -> None:
    loaded = sf.load(folder, {"w": torch.zeros(2, 3)}, strict=False)
    assert torch.equal(loaded["w"], TREE["w"])


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    fix = "\n  try: the folder that sf.save wrote to"
    assert _refused(tmp_path) == f"load: {tmp_path} holds no checkpoint{fix}"
    assert _refused(tmp_path / "none").startswith("load: ")
    sf.save(tmp_path, TREE, step=5)
    assert _refused(tmp_path, step=4) == (
        f"load: {tmp_path} holds no complete step 4\n  complete steps: 5{fix}"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("garbage", "Expecting value"),
        ("[1, 2]", "TypeError"),
        ("{}", "KeyError"),
        ('{"format": 1, "step": 0, "tensors": {}, "constants": 3}', "format and"),
        (
            '{"format": 1, "step": 0, "constants": {}, "tensors": {"x": {"shape": '
            '[1], "dtype": "save", "chunks": []}}}',
            "x has dtype 'save'",
        ),
        (
            '{"format": 1, "step": 0, "constants": {}, "tensors": {"x": {"shape": '
            '[-1], "dtype": "float32", "chunks": []}}}',
            "in place of sizes",
        ),
    ],
)
def test_a_damaged_manifest(folder: str, text: str, why: str) -> None:
    Path(folder, "shardfn.json").write_text(text)
    said = _refused(folder)
    assert said.startswith(f"load: {folder}/shardfn.json cannot be read\n")
    assert why in said


def test_a_newer_format(folder: str) -> None:
    path = Path(folder, "shardfn.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert _refused(folder) == (
        f"load: {path} has format 99; this version of shardfn reads up to 1\n"
        "  try: a newer version of shardfn"
    )


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_that_is_cut_short(folder: str, keep: int) -> None:
    path = Path(folder, "part-00000.safetensors")
    os.truncate(path, path.stat().st_size - 1 if keep < 0 else keep)
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")


def test_a_file_that_is_missing_or_another_ones(folder: str) -> None:
    path = Path(folder, "part-00000.safetensors")
    path.unlink()
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")
    sf.save_safetensors(folder, {"other": torch.ones(3)})
    Path(folder, "model.safetensors").rename(path)
    assert _refused(folder).startswith(f"load: {path} cannot be read\n")


def test_each_rank_reads_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all, each byte once for each rank that holds it."""
    read: list[int] = []
    block = Files.block

    def counted(*args: Any) -> torch.Tensor:
        out = block(*args)
        read.append(out.nbytes)
        return out

    monkeypatch.setattr(Files, "block", counted)
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        x = sf.distribute(torch.randn(10, 3), mesh, P("dp"))
        sf.save(tmp_path, {"x": x})
        other = sf.make_mesh((2, 2), ("dp", "tp"))
        like = {"x": sf.ShapeDtype((10, 3))}
        for spec, times in ((P("dp", "tp"), 1), (P("dp"), 2), (P(), 4)):
            read.clear()
            loaded = sf.load(tmp_path, like, other, spec)
            assert torch.equal(sf.full(loaded)["x"], sf.full(x))
            assert sum(read) == times * 10 * 3 * 4


def test_placements_that_do_not_fit(folder: str) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.PlacementError, match=r"load: b: "):
            sf.load(folder, TREE, mesh, P(None, "dp"))
        with pytest.raises(sf.TreeError, match="does not match the tree"):
            sf.load(folder, TREE, mesh, {"w": P()})
        with pytest.raises(sf.PlacementError, match="and no mesh"):
            sf.load(folder, TREE, None, P())
    with (
        sf.fake_world(2, numerics=False),
        pytest.raises(sf.FakeValueError, match="no values"),
    ):
        sf.load(folder, TREE)


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        parts = [1, (2.5, None)]
        return {"count": self.count, 7: torch.ones(2) * self.count, "p": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["p"] == [1, (2.5, None)]
        assert torch.equal(state[7], torch.ones(2) * state["count"])
        self.count = state["count"]


def test_an_object_takes_its_state_only_when_all_was_read(tmp_path: Path) -> None:
    saved, other = _Counter(), _Counter()
    saved.count = 4
    folder = sf.save(tmp_path, {"c": saved, "x": torch.ones(2)})
    with pytest.raises(sf.CheckpointError):
        sf.load(folder, {"c": other, "x": torch.ones(3)})
    assert other.count == 0
    loaded = sf.load(folder, {"c": other, "x": torch.ones(2)})
    assert loaded["c"] is other and other.count == 4
    text = _refused(folder, {"c": 3, "x": torch.ones(2)})
    assert "c: an object's state, and the tree has 3" in text


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    class Strange(_Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [object()]}

    with pytest.raises(
        sf.CheckpointError, match=r"c\.deep\.0, in an object's state, is a object"
    ):
        sf.save(tmp_path, {"c": Strange()})
