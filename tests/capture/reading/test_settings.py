"""The context of a capture: what is active inside of it, and nothing afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture import trace
from shardfn.capture.reading.settings import Settings, tracing
from shardfn.capture.shard_map import axis_names

aten = torch.ops.aten


def inside(settings: Settings, look: Any) -> Any:
    mode = _compat.fake_mode()
    with tracing(settings, mode, _compat.Memo()) as at_work:
        return look(at_work, mode)


def test_a_capture_has_a_recording_a_scope_and_fake_tensors() -> None:
    def look(at_work: Any, mode: Any) -> Any:
        assert trace.is_recording() and at_work.recorded.name == "f"
        assert at_work.recorded.mode is mode
        assert axis_names.current_scope() is at_work.names
        assert _compat.is_fake(torch.ones(2))
        return at_work.names

    scope = inside(Settings(name="f", device="meta", rank=(1,)), look)
    assert (scope.device, scope.rank, scope.may_be_of_ranks) == ("meta", (1,), False)
    assert not trace.is_recording() and not _compat.is_fake(torch.ones(2))
    assert axis_names.current_scope() is not scope


def test_an_error_ends_it_too() -> None:
    def look(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        inside(Settings(), look)
    assert not trace.is_recording() and not _compat.is_fake(torch.ones(2))


def test_ops_with_rules_are_not_decomposed() -> None:
    table = lambda at_work, _: at_work.recorded.table
    op = aten.addr.default
    both = inside(Settings(), table)
    assert op in both
    one = inside(Settings(undecomposed=frozenset({op})), table)
    assert op not in one and len(one) == len(both) - 1


def test_the_mesh_is_that_of_the_call() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        settings = Settings(mesh=mesh, may_be_of_ranks=True)
        scope = inside(settings, lambda at_work, _: at_work.names)
        assert scope.mesh is mesh and scope.may_be_of_ranks


def test_inference_mode_is_off_inside() -> None:
    with torch.inference_mode():
        assert not inside(Settings(), lambda *_: torch.is_inference_mode_enabled())
        assert torch.is_inference_mode_enabled()


def test_anomaly_mode_is_off_inside_and_back_afterwards() -> None:
    loss = lambda w, x: torch.tanh(x @ w).square().sum()
    w, x = torch.randn(3, 2).double(), torch.randn(5, 3).double()
    wanted = torch.func.grad(loss)(w, x)
    with torch.autograd.detect_anomaly(check_nan=False):
        assert not inside(Settings(), lambda *_: torch.is_anomaly_enabled())
        found = sf.jit(sf.grad(loss), backend="aten")(w, x)
        torch.testing.assert_close(found, wanted)
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()
