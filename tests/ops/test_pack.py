"""pack: tensors one after the other, in one flat buffer."""

from __future__ import annotations

import torch

from shardfn import _compat
from shardfn.ops.pack import pack


def test_elements_follow_each_other_in_the_order_of_the_tensors() -> None:
    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(5.0)
    assert pack([first, second]).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_buffer_is_memory_of_its_own() -> None:
    x = torch.ones(3)
    pack([x]).zero_()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_fake_buffer_counts_all_elements() -> None:
    with _compat.FakeTensorMode():
        xs = [torch.empty(2, 3, dtype=torch.float16), torch.empty(0, 5).half()]
        packed = pack(xs)
    assert (packed.shape, packed.dtype) == ((6,), torch.float16)
