"""The memory of a tensor: who owns it, and what can be taken."""

from __future__ import annotations

import weakref

import pytest
import torch

from shardfn import _compat
from shardfn._compat.memory import (
    are_alone,
    are_plain,
    can_be_taken,
    empty_strided,
    exchange,
    is_sole_owner,
    storage_of,
)


def test_views_share_the_memory_and_copies_do_not() -> None:
    x = torch.ones(3)
    view, copy = x[:2], x.clone()
    assert storage_of(view) == storage_of(x) != storage_of(copy)
    assert not is_sole_owner(x) and is_sole_owner(copy)


def test_memory_of_numpy_and_of_other_processes_is_not_ours() -> None:
    array = torch.ones(3).numpy()
    assert not is_sole_owner(torch.from_numpy(array))
    assert not is_sole_owner(torch.ones(3).share_memory_())


def test_a_tensor_with_a_weak_reference_stays() -> None:
    x = torch.ones(3)
    assert can_be_taken(x)
    ref = weakref.ref(x)
    assert not can_be_taken(x) and ref() is x


def test_several_are_asked_as_one() -> None:
    xs = [torch.ones(2), torch.ones(3)]
    assert are_alone(xs) and are_alone([])
    view = xs[0][:1]
    assert not are_alone(xs)
    del view
    assert are_alone(xs)


def test_plain_tensors_are_unknown_to_autograd() -> None:
    x = torch.ones(2)
    assert are_plain([x]) and not are_plain([x.clone().requires_grad_()])
    assert not are_plain([torch.nn.Parameter(x, requires_grad=False)])
    with torch.inference_mode():
        assert not are_plain([torch.ones(1)])


def test_two_tensors_exchange_memory_and_class_and_keep_attributes() -> None:
    x, y = torch.ones(2), torch.nn.Parameter(torch.zeros(3))
    x.note = "x"  # type: ignore[attr-defined]
    exchange([x], [y])
    assert (type(x), type(y)) == (torch.nn.Parameter, torch.Tensor)
    assert x.tolist() == [0, 0, 0] and y.tolist() == [1, 1]
    assert x.note == "x"  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
def test_an_empty_tensor_of_a_layout_is_as_the_dispatcher_makes_it(device: str) -> None:
    mode = _compat.fake_mode()
    with mode:
        ours = empty_strided([3, 2], [1, 5], torch.float16, device)
        torchs = torch.empty_strided([3, 2], [1, 5], dtype=torch.float16, device=device)
        pairs = [(ours, torchs), (ours + ours, torchs + torchs)]
    assert type(ours) is type(torchs) and ours.fake_mode is mode
    for x, like in pairs:
        assert (x.shape, x.stride()) == (like.shape, like.stride())
        assert (x.dtype, x.device) == (like.dtype, like.device)
    plain = empty_strided([2], [1], torch.float32, "cpu")
    assert type(plain) is torch.Tensor
