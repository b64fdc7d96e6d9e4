"""The memory layout of arguments: copied only where it differs from the program's."""

from __future__ import annotations

import torch

from shardfn.runtime.layouts import laid_out, local_of_rank

X = torch.arange(6.0).view(2, 3)


def test_a_tensor_of_the_right_strides_is_taken_as_it_is() -> None:
    assert laid_out(X, (3, 1)) is X
    assert laid_out(X.t(), (1, 3)).data_ptr() == X.data_ptr()


def test_other_strides_are_a_copy_of_equal_values() -> None:
    for x in (X.t(), torch.ones(1).expand(2, 3), X[:, ::2]):
        dense = torch.empty(x.shape).stride()
        made = laid_out(x, dense)
        assert made.stride() == dense and torch.equal(made, x)
        assert made.data_ptr() != x.data_ptr()


def test_lazy_bits_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for x in (z.conj(), z.conj().imag):
        made = laid_out(x, x.stride())
        assert not made.is_conj() and not made.is_neg()
        assert torch.equal(made, x)


def test_a_plain_tensor_is_that_of_every_rank() -> None:
    assert local_of_rank(X, 0) is X and local_of_rank(X, 1) is X
