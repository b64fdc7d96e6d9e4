"""Fake kernels of ops whose sizes follow from their arguments, in one thread and context."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from shardfn import _compat
from shardfn._compat.fakes.known_sizes import TABLE, sizes_known

aten = torch.ops.aten
A, B = torch.rand(5, 3), torch.rand(5, 2)


def test_the_sizes_are_those_of_the_op() -> None:
    mode = _compat.FakeTensorMode()
    with sizes_known():
        fake = aten.linalg_lstsq.default(mode.from_tensor(A), mode.from_tensor(B))
    real = aten.linalg_lstsq.default(A, B)
    assert [(x.shape, x.stride()) for x in fake] == [(x.shape, x.stride()) for x in real]


def test_a_driver_that_depends_on_values_is_refused() -> None:
    mode = _compat.FakeTensorMode()
    with sizes_known(), pytest.raises(DynamicOutputShapeException):
        aten.linalg_lstsq.default(mode.from_tensor(A), mode.from_tensor(B), driver="gelsd")


def test_drawing_an_example_leaves_the_users_generator_alone() -> None:
    before = torch.get_rng_state()
    test_the_sizes_are_those_of_the_op()
    assert torch.equal(torch.get_rng_state(), before)


def test_other_threads_and_later_calls_have_torchs_own() -> None:
    from torch._subclasses.fake_impls import op_implementations_dict as known

    answers: list[object] = []
    before = dict(known)
    with sizes_known():
        asked = known[aten.linalg_lstsq.default]
        thread = threading.Thread(target=lambda: answers.append(asked(None, None, A, B)))
        thread.start()
        thread.join()
    assert answers == [NotImplemented]
    assert known == before and set(TABLE) - set(before) == {*TABLE} - {aten.masked_select.default}


I, K = torch.randint(0, 4, (2, 3)), slice(None)
VIEWS = {
    "transposed": lambda i: (i.T,),
    "along the second dim": lambda i: (K, i.T),
    "apart": lambda i: (i.T, K, i.T),
    "together": lambda i: (K, i.T, i.T),
    "two orders": lambda i: (i.T, i.reshape(3, 2)),
    "expanded": lambda i: (i[:, :1].expand(2, 5), i[:, :1]),
    "permuted": lambda i: (i.expand(4, 2, 3).permute(1, 2, 0),),
    "contiguous": lambda i: (i,),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_the_strides_of_an_indexed_tensor_are_torchs(view: str, order: tuple[int, ...]) -> None:
    x = torch.rand(4, 4, 4).permute(order)
    real = x[VIEWS[view](I)]
    mode = _compat.FakeTensorMode()
    with _compat.patched("fakes"):
        fake = mode.from_tensor(x)[VIEWS[view](mode.from_tensor(I))]
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


def test_strides_that_torch_remembers_are_not_taken_nor_changed() -> None:
    x, i = torch.rand(4, 4, 4), I
    mode = _compat.FakeTensorMode()

    def strides() -> tuple[int, ...]:
        return mode.from_tensor(x)[:, mode.from_tensor(i).T].stride()

    before = strides()
    with _compat.patched("fakes"):
        assert strides() == x[:, i.T].stride() != before
    assert strides() == before
