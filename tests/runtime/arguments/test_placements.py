"""The placements of arguments: their own, or those of in_placements, each mismatch named."""

from __future__ import annotations

import pytest
import torch

from shardfn._compat.cuda import devices
from shardfn.runtime.arguments.placements import _check_device


def test_an_argument_lives_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 1)
    for fits in ("cuda:1", "meta"):
        _check_device(torch.device(fits), "cuda")
    with pytest.raises(ValueError, match="it lives on cpu, and the mesh is over cuda"):
        _check_device(torch.device("cpu"), "cuda")
    with pytest.raises(ValueError) as caught:
        _check_device(torch.device("cuda:0"), "cuda")
    said = "it lives on cuda:0, and this rank's device is cuda:1; "
    assert str(caught.value).startswith(said)
    assert "torch.cuda.set_device(number) before" in str(caught.value)
