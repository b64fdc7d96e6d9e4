"""The memory of a tensor: who owns it, and what can be taken."""

from __future__ import annotations

import pytest
import torch

from shardfn import _compat
from shardfn._compat.memory import empty_strided


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
