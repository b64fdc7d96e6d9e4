"""Ops of a subclass of DTensor reach it where torch would treat it as a DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardfn._compat.distributed import subclasses

NAME = "_propagate_op_sharding_dispatch_slow_path"


@pytest.fixture(name="dispatcher")
def _dispatcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's dispatcher, as of a version that needs the change."""

    class Dispatcher:
        def __init__(self) -> None:
            self._custom_op_handlers = {"op": lambda *args: ("torch's handler", args)}

        def _propagate_op_sharding_dispatch_slow_path(self, *args: Any) -> Any:
            return "torch", args

    made = Dispatcher()
    monkeypatch.setattr(DTensor, "_op_dispatcher", made)
    monkeypatch.setattr(subclasses, "_is_needed", lambda: True)
    forgotten = lambda: made.__dict__.setdefault("forgotten", True)
    name = "_clear_DTensor_sharding_propagator_cache"
    monkeypatch.setattr(torch._C, name, forgotten, raising=False)
    return made


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    return ("ours", func) if "ours" in args else NotImplemented


def test_ops_of_the_subclass_reach_it_inside_alone(dispatcher: Any) -> None:
    slow = lambda *args: getattr(dispatcher, NAME)(*args)
    handlers = dispatcher._custom_op_handlers
    with subclasses.subclass_called(dispatch):
        assert slow("op", ("ours",), {}, 7) == ("ours", "op")
        assert handlers["op"]("op", ("ours",), {}) == ("ours", "op")
        assert slow("op", (1,), {}, 7) == ("torch", ("op", (1,), {}, 7))
        assert handlers["op"]("op", (1,), {}) == ("torch's handler", ("op", (1,), {}))
        assert dispatcher.forgotten
    assert slow("op", ("ours",), {}) == ("torch", ("op", ("ours",), {}))
    assert handlers["op"](1) == ("torch's handler", (1,))


def test_later_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(type(DTensor._op_dispatcher), NAME, None)
    monkeypatch.setattr(subclasses, "_is_needed", lambda: False)
    with subclasses.subclass_called(dispatch):
        assert getattr(type(DTensor._op_dispatcher), NAME, None) is before
