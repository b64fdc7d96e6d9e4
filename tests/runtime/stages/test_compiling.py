"""One rank's program is compiled for the backend: which inputs are donated, and what is checked."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn._compat.compilations.undisturbed import SettingsChanged
from shardfn.errors import ShardError
from shardfn.runtime.stages import compiling


def test_coordinates_stand_before_the_donated_inputs() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        step = sf.shard(lambda x, y: (x + y, y), mesh, sf.P("dp"), donate_argnums=(1,))
        placed = step.trace(torch.ones(4), torch.ones(4)).placed
    assert compiling.donated_places(placed) == [2]
    assert compiling._checked(placed) == [0, 1, 2]


def test_no_garbage_is_collected_while_a_call_waits_for_its_compilation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    compile_now = compiling.compiled_program

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return compile_now(*args, **kwargs)

    monkeypatch.setattr(compiling, "compiled_program", noted)
    lowered = sf.jit(torch.sin, backend="aten").lower(torch.ones(3))
    assert lowered.compile()(torch.zeros(3)).tolist() == [0.0] * 3
    assert seen == [False] and gc.isenabled()


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
