"""Programs for CUDA are captured and lowered where there is no GPU to run them.

Autograd has a thread for each device other than the CPU, so whatever a capture keeps in its own
thread must not be needed there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from no_gpu import built

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="this torch has a CUDA of its own"
)
SOME = (
    "scan",
    "dropout_in_a_scan",
    "cond",
    "checkpoint",
    "custom_derivative",
    "random_numbers",
    "without_a_mesh",
    "shard_map_in_jit",
    "embedding_bag",
    "AdamW",
)


HOST_WORK = {
    "plain": "",
    "dropout in a scan": "",
    "cond": "the CPU reads a value to decide what runs next",
    "while_loop": "the CPU reads a value to decide what runs next",
    "rows by counts": "the CPU reads how many rows go to each rank",
    "on the CPU": "it runs on the CPU",
    "an input": "lives on the CPU",
}


def test_some_programs_for_gpus_are_lowered_without_one(tmp_path: Path) -> None:
    said = built.run(tmp_path, *SOME)
    assert said["faults"] == {}
    for name in ("closed over", "made inside", "random"):
        text = said["refusals"][name]
        assert "tensors on different devices meet in one op" in text, name
        assert "device=x.device" in text and "captures.py" in text, name
    assert "the tensor is on cpu, but the mesh is over cuda" in said["refusals"]["an argument"]
    for name, reason in HOST_WORK.items():
        text = said["host work"][name]
        assert (reason in text) if reason else text == "", (name, text)


def test_all_programs_for_gpus_are_lowered_without_one(tmp_path: Path) -> None:
    assert built.run(tmp_path)["faults"] == {}
