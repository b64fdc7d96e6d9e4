"""The leaves of a checkpoint: tensors, constants, and objects with a state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf


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
    with pytest.raises(sf.CheckpointError, match="c: an object's state, and the tree"):
        sf.load(folder, {"c": 3, "x": torch.ones(2)})


@pytest.mark.parametrize("state", [3, "text", None, 2.5])
def test_an_object_whose_state_is_no_dict_is_refused_before_anything_is_written(
    tmp_path: Path, state: Any
) -> None:
    saved = _Counter()
    saved.state_dict = lambda: state  # type: ignore[method-assign]
    with pytest.raises(sf.CheckpointError) as error:
        sf.save(tmp_path, {"c": saved})
    assert f"the state_dict of c must be a dict; got {state!r}" in str(error.value)
    assert not os.listdir(tmp_path)


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    class Strange(_Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [object()]}

    with pytest.raises(sf.CheckpointError, match=r"c\.deep\.0, in an object's state, is a object"):
        sf.save(tmp_path, {"c": Strange()})


def test_the_state_of_an_optimizer_and_of_a_scheduler(tmp_path: Path) -> None:
    def run(w: torch.Tensor, steps: int, optimizer: Any, scheduler: Any) -> None:
        for _ in range(steps):
            (w**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def fresh() -> Any:
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([w], lr=0.1)
        return w, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    w, optimizer, scheduler = fresh()
    run(w, 3, optimizer, scheduler)
    sf.save(tmp_path, {"w": w, "optimizer": optimizer, "scheduler": scheduler})
    other, *its = fresh()
    loaded = sf.load(tmp_path, {"w": other, "optimizer": its[0], "scheduler": its[1]})
    other.data.copy_(loaded["w"])
    for pair in ((w, optimizer, scheduler), (other, *its)):
        run(pair[0], 3, *pair[1:])
    assert torch.equal(w, other)


def test_the_state_of_random_calls_is_a_tree(tmp_path: Path) -> None:
    before = sf.random.state.get()
    try:
        sf.random.state.seed(11)
        saved = sf.random.state.get()
        sf.save(tmp_path, saved)
        sf.random.state.seed(12)
        sf.random.state.set(sf.load(tmp_path, sf.random.state.get()))
        assert torch.equal(sf.random.state.get()["default"], saved["default"])
    finally:
        sf.random.state.set(before)


def test_leaves_that_cannot_be_saved_are_named_at_once(tmp_path: Path) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        tree = {"a": object(), "b": sf.from_local(torch.ones(2), mesh, [sf.Partial()]), "c": {1}}
        with pytest.raises(sf.CheckpointError) as error:
            sf.save(tmp_path, tree)
    assert str(error.value) == (
        "save: a is a object\n  b is placed as P(sum)\n  c is a set\n  needed: tensors "
        "(sharded, replicated or on a pipeline stage), numbers, text, None, or objects with "
        "state_dict and load_state_dict"
    )
    assert not os.listdir(tmp_path)


def test_two_leaves_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sf.CheckpointError, match=r"two leaves are called a\.b"):
        sf.save(tmp_path, {"a": {"b": 1}, "a.b": 2})


UNSAVED = {
    "x is on the meta device": torch.ones(2, device="meta"),
    "x is torch.sparse_coo": torch.eye(2).to_sparse(),
    "x is torch.sparse_csr": torch.eye(2).to_sparse_csr(),
    "x is quantized, torch.qint8": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("text", UNSAVED)
def test_a_tensor_without_strided_values_is_refused(text: str, tmp_path: Path) -> None:
    x = UNSAVED[text]
    for save in (sf.save, sf.save_safetensors):
        with pytest.raises(sf.CheckpointError, match=text):
            save(tmp_path, {"x": x})
    state = _Held({"x": x})
    with pytest.raises(sf.CheckpointError, match=f"save: s.{text}"):
        sf.save(tmp_path, {"s": state})
    assert not os.listdir(tmp_path)


class _Held:
    """An object with this state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.zeros(2)
    inside = _Held({"a.b": x, "a": {"b": y}})
    for tree in (
        {"s": inside},
        {"s": _Held({"a.b": x}), "s.a.b": y},
        {"s.a.b": y, "s": _Held({"a.b": x})},
    ):
        with pytest.raises(sf.CheckpointError, match=r"two tensors are called s\.a\.b"):
            sf.save(tmp_path, tree)
