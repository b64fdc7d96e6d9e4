"""The rules for dtypes of one compilation."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._inductor import lowering, utils  # noqa: F401  which defines the rules
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND

import shardfn as sf
from shardfn._compat.cpp_kernels.dtypes import rules_kept

FLOAT = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each call that made the rules."""
    torchs = DtypePropagationOpsHandler.__init__
    calls: list[str] = []

    def noted(self: DtypePropagationOpsHandler) -> None:
        calls.append(threading.current_thread().name)
        torchs(self)

    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", noted)
    return calls


def test_rules_are_made_once_a_context(made: list[str]) -> None:
    for _ in range(2):
        with rules_kept():
            handlers = [DtypePropagationOpsHandler() for _ in range(5)]
        assert len(set(map(id, handlers))) == 1
    assert len(made) == 2
    DtypePropagationOpsHandler()
    DtypePropagationOpsHandler()
    assert len(made) == 4, "outside it is as before"


def test_an_op_that_is_added_has_a_rule(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with rules_kept():
        DtypePropagationOpsHandler()
        utils.register_op_dtype_propagation_rules("asinh_of_ours", FLOAT, None)
        try:
            handler = DtypePropagationOpsHandler()
            DtypePropagationOpsHandler()
        finally:
            utils.op_dtype_propagation_rules.pop("asinh_of_ours")
        assert callable(handler.asinh_of_ours)
        assert len(made) == 2
        # the same name with another rule
        name, rule = next(iter(utils.op_dtype_propagation_rules.items()))
        other = utils.OpDtypeRule(rule.type_promotion_kind, torch.float16)
        monkeypatch.setitem(utils.op_dtype_propagation_rules, name, other)
        DtypePropagationOpsHandler()
        assert getattr(handler, name).keywords == {"dtype": torch.float16}
    del handler.asinh_of_ours
    monkeypatch.undo()
    DtypePropagationOpsHandler()


def test_another_thread_makes_its_own(made: list[str]) -> None:
    with rules_kept():
        DtypePropagationOpsHandler()
        other = threading.Thread(target=DtypePropagationOpsHandler, name="other")
        other.start()
        other.join()
        DtypePropagationOpsHandler()
    assert made == [threading.current_thread().name, "other"]


def test_a_compilation_makes_them_once(made: list[str]) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    f = lambda x: (x.sin() * 2 + x.exp()).sum(1) / x.cos().sum()
    torch.testing.assert_close(sf.jit(f)(x), f(x))
    assert len(made) == 1
