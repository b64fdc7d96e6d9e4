"""One rank's program is compiled for the backend: which inputs are donated, and what is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn._compat.compilations.undisturbed import SettingsChanged
from shardfn.errors import ShardError
from shardfn.runtime.stages import compiling


def test_it_is_compiled_again_if_another_thread_changes_settings_and_refused_if_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_now, tries = compiling.compiled_program, []

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        tries.append(None)
        if len(tries) < 3:
            raise SettingsChanged
        return compile_now(*args, **kwargs)

    monkeypatch.setattr(compiling, "compiled_program", disturbed)
    x = torch.ones(3)
    assert torch.equal(sf.jit(lambda x: x.sin(), backend="aten")(x), x.sin())
    tries[:] = []
    monkeypatch.setattr(compiling, "ATTEMPTS", 2)
    with pytest.raises(ShardError, match="jit.*compiled 2 times.*default dtype") as caught:
        sf.jit(lambda x: x.cos(), backend="aten")(x)
    assert "before the other threads start" in str(caught.value)
