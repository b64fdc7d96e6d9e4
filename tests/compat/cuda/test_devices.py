"""The number of a device: texts that ranks share leave that of their own out."""

from __future__ import annotations

import pytest
import torch

from shardfn._compat.cuda import devices, numbered, unnumbered


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 2)


def test_the_cpu_has_no_number(third: None) -> None:
    for place in ("cpu", "meta"):
        assert numbered(place) == unnumbered(torch.device(place)) == torch.device(place)


def test_a_device_of_this_process_is_written_without_its_number(third: None) -> None:
    assert unnumbered(torch.device("cuda", 2)) == torch.device("cuda")
    assert numbered("cuda") == torch.device("cuda", 2)


def test_another_device_keeps_its_number(third: None) -> None:
    other = torch.device("cuda", 1)
    assert unnumbered(other) == numbered(other) == other


def test_a_machine_without_one() -> None:
    if not torch.accelerator.is_available():
        assert numbered("cuda") == torch.device("cuda")
