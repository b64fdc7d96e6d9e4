"""Folders of safetensors: those of Hugging Face in, and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import shardfn as sf
from shardfn.training.checkpoints.files import Files

CONFIG: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}


def test_a_model_of_hugging_face_is_read_in_shards_and_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BertModel(BertConfig(**CONFIG))
    model.save_pretrained(tmp_path / "in", max_shard_size="5KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    read: list[int] = []
    block = Files.block
    monkeypatch.setattr(
        Files, "block", lambda *args: read.append((out := block(*args)).nbytes) or out
    )
    with torch.device("meta"):
        _, params, _ = sf.functionalize(BertModel(BertConfig(**CONFIG)))
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        where = sf.fsdp(params, mesh)
        like = sf.tree_map(lambda x: sf.ShapeDtype(x.shape, x.dtype), params)
        loaded = sf.load_safetensors(tmp_path / "in", like, mesh, where)
        for name, x in model.named_parameters():
            assert torch.equal(sf.full(loaded[name]), x)
        # each byte once in all
        assert sum(read) == sum(x.nbytes for x in model.parameters())
        sf.save_safetensors(tmp_path / "out", loaded, max_bytes="5KB")
    model.config.save_pretrained(tmp_path / "out")
    again = BertModel.from_pretrained(tmp_path / "out")
    for x, y in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y)


def _refused(path: Path, like: Any) -> str:
    with pytest.raises(sf.CheckpointError) as error:
        sf.load_safetensors(path, like)
    return str(error.value)


def test_what_does_not_match_is_listed(tmp_path: Path) -> None:
    sf.save_safetensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    assert _refused(tmp_path, {"a": torch.ones(3), "c": torch.ones(1), "d": 1}) == (
        f"load_safetensors: {tmp_path} holds other tensors\n  d: the tree has a int in place "
        "of a tensor\n  c: in the given tree, but not in the files\n  d: in the given tree, "
        "but not in the files\n  b: in the files, but not in the given tree\n  a: (2,) in the "
        "files, (3,) in the tree\n  try: pass a tree with the names in the files; "
        "strict=False ignores other names in the files"
    )
    loaded = sf.load_safetensors(tmp_path, {"a": torch.zeros(2)}, strict=False)
    assert torch.equal(loaded["a"], torch.ones(2))


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    like = {"a": torch.ones(2)}
    name = "load_safetensors"
    assert _refused(tmp_path, like).startswith(f"{name}: {tmp_path} has no .safetensors files")
    missing = tmp_path / "missing"
    assert _refused(missing, like).startswith(f"{name}: {missing} cannot be read")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    assert "model.safetensors cannot be read" in _refused(tmp_path, like)
    index = tmp_path / "model.safetensors.index.json"
    for weights in ({"a": "../model.safetensors"}, None):
        index.write_text(json.dumps({"weight_map": weights}))
        assert _refused(tmp_path, like).startswith(f"{name}: {index} cannot be")


def test_what_is_written_is_tensors(tmp_path: Path) -> None:
    with pytest.raises(sf.CheckpointError, match="save_safetensors: a is a int"):
        sf.save_safetensors(tmp_path, {"a": 1})


def test_a_model_takes_the_place_of_one_of_other_files(tmp_path: Path) -> None:
    old = {name: torch.zeros(5) for name in "abc"}
    new = {name: torch.ones(5) for name in "abc"}
    for before, after in ((20, 1000), (1000, 20), (20, 40)):
        sf.save_safetensors(tmp_path, old, max_bytes=before)
        (tmp_path / "adapter.safetensors.txt").write_text("mine")
        sf.save_safetensors(tmp_path, new, max_bytes=after)
        loaded = sf.load_safetensors(tmp_path, old)
        for name, x in new.items():
            assert torch.equal(loaded[name], x)
        files = sorted(path.name for path in tmp_path.iterdir())
        assert files[0] == "adapter.safetensors.txt"
        assert len(files) - 1 == {1000: 1, 20: 4, 40: 3}[after]


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    sf.save_safetensors(tmp_path / "one", {"w": torch.ones(3)})
    sf.save_safetensors(tmp_path, {"w": torch.zeros(3)})
    one = tmp_path / "one" / "model.safetensors"
    one.rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(
        sf.CheckpointError, match="w: in consolidated.safetensors and in model.safetensors"
    ):
        sf.load_safetensors(tmp_path, {"w": torch.ones(3)})


def test_complex_numbers_are_read_from_real_ones_and_not_written(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(3, 2)
    sf.save_safetensors(tmp_path, {"w": x})
    like = {"w": sf.ShapeDtype((3, 2), torch.complex64)}
    (w,) = sf.load_safetensors(tmp_path, like).values()
    assert torch.equal(w, x.to(torch.complex64))
    with pytest.raises(sf.CheckpointError, match="no complex numbers"):
        sf.save_safetensors(tmp_path, {"w": w})
