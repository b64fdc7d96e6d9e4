"""Arguments and metadata go through JSON and come back as they were."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from shardfn import _compat
from shardfn._compat.cuda import devices
from shardfn.compile.text import (
    Unwritable,
    devices_of,
    tensor_of,
    tensor_text,
    value_of,
    value_text,
)

VALUES = [
    None,
    True,
    3,
    -(2**40),
    "dp,tp",
    0.1,
    -0.0,
    math.inf,
    1.5 - 2j,
    [1, [2.5, None]],
    (1, ("a", ())),
    torch.float8_e4m3fn,
    torch.channels_last,
    torch.strided,
    torch.device("cuda", 3),
]


def through_json(x: Any) -> Any:
    return value_of(json.loads(json.dumps(value_text(x, lambda node: -1))), ())


@pytest.mark.parametrize("x", VALUES, ids=repr)
def test_a_value_comes_back(x: Any) -> None:
    back = through_json(x)
    assert back == x and type(back) is type(x)
    assert math.copysign(1, back) == math.copysign(1, x) if x == -0.0 else True


def test_nan_comes_back() -> None:
    assert math.isnan(through_json(math.nan))


@pytest.mark.parametrize("x", [torch.ones(2), object(), {1: 2}, b"bytes", len])
def test_another_object_is_refused(x: Any) -> None:
    with pytest.raises(Unwritable):
        value_text(x, lambda node: -1)


@pytest.mark.parametrize(
    "said",
    [
        {"node": 0},
        {"node": -1},
        {"dtype": "nn"},
        {"format": "save"},
        {"eval": "1"},
        {},
        {"a": 1, "b": 2},
        1.5,
    ],
    ids=str,
)
def test_a_text_that_stands_for_nothing_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        value_of(said, ())


BASE = torch.zeros(4, 6, dtype=torch.complex64)
TENSORS = [BASE, BASE.t(), BASE[1:, 2], BASE.conj(), BASE[:0], BASE.conj().imag]


@pytest.mark.parametrize("x", TENSORS, ids=range(len(TENSORS)))
def test_the_metadata_of_a_tensor_comes_back(x: torch.Tensor) -> None:
    said = json.loads(json.dumps(tensor_text(x)))
    with _compat.fake_mode():
        back = tensor_of(said)
    for name in ("shape", "dtype", "device"):
        assert getattr(back, name) == getattr(x, name)
    for name in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(back, name)() == getattr(x, name)()


@pytest.mark.parametrize(
    "said",
    [
        [[2], [1, 1], 0, "float32", "cpu"],
        [[-2], [1], 0, "float32", "cpu"],
        [[2], [1], 0.5, "float32", "cpu"],
        [[2], [1], 0, "float33", "cpu"],
        [[2], [1]],
    ],
    ids=str,
)
def test_metadata_that_no_tensor_has_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        tensor_of(said)


def test_the_devices_of_nodes_are_told_once() -> None:
    graph = torch.fx.Graph()
    for place in ("meta", "cpu", "meta"):
        graph.placeholder("x").meta["val"] = torch.ones(2, device=place)
    graph.placeholder("n").meta["val"] = 3
    assert devices_of(graph.nodes) == ["cpu", "meta"]


def test_a_device_of_this_process_is_written_without_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 1)
    own, other = torch.device("cuda", 1), torch.device("cuda", 0)
    written = [value_text(x, lambda node: 0) for x in (own, other)]
    assert written == [{"device": "cuda"}, {"device": "cuda:0"}]
    assert [value_of(x, ()) for x in written] == [own, other]
