"""The tensors that autograd follows from outside: the options of their gradients, and a key."""

from __future__ import annotations

import torch

from shardfn.buckets import BucketOptions
from shardfn.runtime.backward.followed import Followed

W = torch.ones(2, requires_grad=True)
ONE = Followed((0, 2), (W,), ("x", "y", "w"), (True, False, True))


def test_real_gradients_have_the_options_of_bucketed_grad() -> None:
    x, y, w = ONE.wishes
    assert y == "", "a complex gradient is in no bucket"
    assert BucketOptions.of(x) == BucketOptions("x", 25_000_000, 2**20, max_in_flight=2**30)
    assert BucketOptions.of(w).leaf == "w"
