"""The compiler is prepared for calls that wait for kernels, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.runtime import dispatch
from shardfn.runtime.stages import preparing


@pytest.mark.parametrize(
    ("options", "times"),
    [({}, 1), ({"backend": "aten"}, 0), ({"warmup": "aten"}, 0)],
    ids=["inductor", "aten", "warming up"],
)
def test_only_a_call_that_waits_for_kernels_has_the_compiler_prepared(
    options: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(preparing, "prepare_compiler", lambda: prepared.append(1))
    monkeypatch.setattr(dispatch, "traced_for", refuse)
    with pytest.raises(ZeroDivisionError):
        sf.jit(torch.sin, **options)(torch.ones(3))
    assert len(prepared) == times
    compiled = sf.jit(torch.sin, **options).compile(sf.ShapeDtype((3,)))
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin())
    assert len(prepared) == 2 * times


def refuse(*_: Any) -> None:
    """In place of a capture."""
    raise ZeroDivisionError


def test_a_fake_world_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(preparing, "prepare_compiler", lambda: prepared.append(1))
    with sf.fake_world(2):
        step = sf.shard(torch.sin, sf.make_mesh((2,), ("dp",)), sf.P("dp"))
        step(torch.ones(4))
    assert not prepared
