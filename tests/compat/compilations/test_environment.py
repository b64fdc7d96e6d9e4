"""What a compilation depends on besides its program is part of its key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config

from shardfn import _compat
from shardfn._compat.compilations import environment as module


def test_it_names_torch_the_machine_and_the_compiler_and_stays_as_it_is() -> None:
    text = _compat.environment()
    assert f"torch {torch.__version__}" in text and "compiler " in text
    assert f"machine {_compat.machine()}" in text
    assert text == _compat.environment()
    assert " at 0x" not in text, "an address would differ in each process"


def test_a_setting_or_an_option_of_the_compiler_makes_it_another() -> None:
    before = _compat.environment()
    with config.patch({"max_fusion_size": 3}):
        assert _compat.environment() != before
    torch.use_deterministic_algorithms(True)
    try:
        assert _compat.environment() != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert _compat.environment() == before


def test_another_source_of_shardfn_is_another_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    first = module._sources()
    (tmp_path / "a.py").write_text("x = 2")
    assert module._sources() != first


def test_passes_of_the_user_have_no_text() -> None:
    assert not _compat.has_own_passes()
    with config.patch({"post_grad_custom_post_pass": lambda graph: None}):
        assert _compat.has_own_passes()
