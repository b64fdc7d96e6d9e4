"""Sizes of simulated ranks as torch's symbolic numbers."""

from __future__ import annotations

import pytest
import torch

from shardfn import _compat


def test_arithmetic_is_each_ranks_own() -> None:
    size = _compat.size_of_ranks([4, 3])
    assert isinstance(size, torch.SymInt)
    for rank, n in enumerate((4, 3)):
        for made, wanted in (
            (size + 1, n + 1),
            (2 * size - size, n),
            (size // 2, n // 2),
            (size % 2, n % 2),
            (-size, -n),
            (torch.sym_max(size, 4), 4),
        ):
            assert _compat.of_rank(made, rank) == wanted


def test_a_comparison_has_one_answer_or_is_refused() -> None:
    size = _compat.size_of_ranks([4, 3])
    assert size != 4 and size > 1 and not (size > 9)
    assert [bool(size == n) for n in (3, 4)] == [False, False]
    with pytest.raises(RuntimeError, match=r"a size of \[True, False\] on these"):
        bool(size > 3)
    assert _compat.size_of_ranks([3, 3]) == 3


def test_only_a_backward_is_in_the_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(_compat.in_backward()))
    (x * x).sum().backward()
    assert seen == [True] and not _compat.in_backward()
