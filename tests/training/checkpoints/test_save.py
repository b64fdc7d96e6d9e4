"""save: what is written, by whom, and what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter

import shardfn as sf
from shardfn import P
from shardfn.training.checkpoints import folders
from tests.support.checkpoint_trees import MESHES, TREE, assert_equal, mesh_of, shapes


def _world(shape: tuple[int, ...]) -> sf.fake_world:
    return sf.fake_world(torch.Size(shape).numel())


@pytest.mark.parametrize("loads", MESHES, ids=str)
@pytest.mark.parametrize("saves", MESHES, ids=str)
def test_a_checkpoint_is_loaded_on_another_mesh_bit_for_bit(
    tmp_path: Path, saves: tuple[int, ...], loads: tuple[int, ...]
) -> None:
    with _world(saves):
        x = sf.distribute(TREE, mesh_of(saves), MESHES[saves])
        sf.save(tmp_path, x)
    with _world(loads):
        y = sf.load(tmp_path, shapes(), mesh_of(loads), MESHES[loads])
        assert y["rows"].placements == tuple(
            torch.distributed.tensor.Shard(i) for i in range(len(loads))
        )
        assert_equal(y, TREE)
    assert_equal(sf.load(tmp_path, TREE), TREE)


def _on_a_rank(folder: str) -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    x = sf.distribute({"w": torch.arange(7.0), "b": torch.ones(3)}, mesh, P("dp"))
    saving = sf.save(folder, x, background=True)
    torch.distributed.all_reduce(torch.ones(3))  # the job goes on meanwhile
    first = saving.wait()
    second = sf.save(folder, sf.tree_map(lambda a: a * 2, x))
    loaded = sf.load(folder, x, step=1)
    sf.save_safetensors(f"{folder}/plain", x)
    torch.distributed.barrier()
    like = {"w": sf.ShapeDtype((7,), torch.bfloat16), "b": sf.ShapeDtype((3,))}
    plain = sf.load_safetensors(f"{folder}/plain", like, mesh, P("dp"))
    return first, second, sf.full(loaded)["w"], sf.full(plain)["w"]


def test_ranks_write_their_own_parts_and_agree_on_the_step(tmp_path: Path) -> None:
    for first, second, whole, plain in run_ranks(2, _on_a_rank, str(tmp_path)):
        assert (first, second) == tuple(folders.folder_of(str(tmp_path), i) for i in (0, 1))
        assert torch.equal(whole, torch.arange(7.0) * 2)
        assert torch.equal(plain, torch.arange(7.0).bfloat16())
    parts = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert sorted(os.listdir(first)) == parts
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert sorted(plain) == ["b", "w"]
    with sf.fake_world(3):
        like = {"w": sf.ShapeDtype((7,)), "b": sf.ShapeDtype((3,))}
        loaded = sf.load(tmp_path, like, sf.make_mesh((3,), ("dp",)), P("dp"))
        assert torch.equal(sf.full(loaded)["w"], torch.arange(7.0) * 2)


def _over_axes_in_another_order(folder: str) -> Any:
    mesh = sf.make_mesh((2, 2), ("dp", "tp"))
    x = sf.distribute({"w": torch.arange(7.0)}, mesh, P(("tp", "dp")))
    sf.save(folder, x)
    return x["w"].to_local(), sf.full(sf.load(folder, x))["w"]


def test_shards_over_axes_in_another_order(tmp_path: Path) -> None:
    ranks = run_ranks(4, _over_axes_in_another_order, str(tmp_path))
    assert [len(local) for local, _ in ranks] == [2, 2, 2, 1]
    assert all(torch.equal(whole, torch.arange(7.0)) for _, whole in ranks)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        packed = {"w": sf.distribute(torch.ones(6), mesh, P("dp*3"))}
        with pytest.raises(sf.CheckpointError, match=r"w is placed as _S\(0, 3\)"):
            sf.save(tmp_path, packed)


def test_steps_follow_each_other_and_old_ones_go(tmp_path: Path) -> None:
    for i in range(4):
        sf.save(tmp_path, {"i": i}, keep=2)
    assert folders.steps(str(tmp_path)) == [2, 3]
    sf.save(tmp_path, {"i": 30}, step=3)  # in the place of the other
    assert sf.load(tmp_path, {"i": 0}) == {"i": 30}
    assert sf.load(tmp_path, {"i": 0}, step=2) == {"i": 2}
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_a_tree_without_tensors_and_a_tensor_alone(tmp_path: Path) -> None:
    sf.save(tmp_path / "a", {})
    assert sf.load(tmp_path / "a", {}) == {}
    sf.save(tmp_path / "b", torch.ones(2))
    assert torch.equal(sf.load(tmp_path / "b", torch.zeros(2)), torch.ones(2))


def test_a_background_save_holds_the_values_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = FileSystemWriter.write_data

    def later(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", later)
    x = {"w": torch.ones(3)}
    saving = sf.save(tmp_path, x, background=True)
    x["w"].zero_()
    assert not saving.is_done()
    may_write.set()
    saving.wait()
    assert saving.is_done()
    assert torch.equal(sf.load(tmp_path, x)["w"], torch.ones(3))


@pytest.mark.parametrize("last_in_background", [True, False])
def test_saves_to_one_folder_are_written_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_in_background: bool
) -> None:
    written: list[float] = []
    write = FileSystemWriter.write_data

    def noted(writer: Any, plan: Any, planner: Any) -> Any:
        written.append(max(planner.resolve_data(item).sum().item() for item in plan.items))
        return write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", noted)
    begun = [
        sf.save(tmp_path, {"x": torch.full((5,), float(k))}, background=True) for k in range(4)
    ]
    last = sf.save(tmp_path, {"x": torch.zeros(5)}, background=last_in_background)
    folders = [saving.wait() for saving in begun]
    folders.append(last.wait() if last_in_background else last)
    assert [Path(folder).name for folder in folders] == [f"step-{k:08d}" for k in range(5)]
    assert written == [0, 5, 10, 15, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"background": 1},
            "save, background: background is 1, a int, and must be True or False\n"
            "  needed: True or False\n  try: the default",
        ),
        (
            {"step": -1},
            "save, step: step is -1, a int, and must be an int of 0 or more, or None\n  "
            "needed: an int of 0 or more, or None\n  try: step=0",
        ),
        (
            {"step": 1.5},
            "save, step: step is 1.5, a float, and must be an int of 0 or more, or None\n  "
            "needed: an int of 0 or more, or None\n  try: step=0",
        ),
        (
            {"keep": 0},
            "save, keep: keep is 0, a int, and must be an int of 1 or more, or None\n  "
            "needed: an int of 1 or more, or None\n  try: keep=3",
        ),
    ],
)
def test_bad_options(tmp_path: Path, options: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.save(tmp_path, {}, **options)
    assert without_line(error.value) == text
    with pytest.raises(sf.ShardError, match="save, path: path is 3, a int"):
        sf.save(3, {})
    with pytest.raises(sf.ShardError, match="save_safetensors, max_bytes"):
        sf.save_safetensors(tmp_path, {}, max_bytes=-1)


def test_a_world_without_values_has_nothing_to_save(tmp_path: Path) -> None:
    with sf.fake_world(2, numerics=False), pytest.raises(sf.FakeValueError):
        sf.save(tmp_path, {"x": 1})


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_said_and_the_step_before_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    sf.save(tmp_path, {"x": torch.ones(2)}, step=0)
    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(sf.CheckpointError) as error:
        made = sf.save(tmp_path, {"x": torch.zeros(2)}, step=1, background=background)
        made.wait()
    assert str(error.value) == (
        f"save: {tmp_path} cannot be written\n  [Errno 28] No space left on device\n  try: "
        "free disk space, or use another folder; earlier checkpoints are unchanged"
    )
    assert torch.equal(sf.load(tmp_path, {"x": torch.zeros(2)})["x"], torch.ones(2))
    assert os.listdir(tmp_path) == ["step-00000000"]
