"""Values that are equal but for the rounding of float64."""

from __future__ import annotations

from typing import Any

from torch.testing import assert_close
from torch.utils._pytree import tree_leaves


def close(got: Any, wanted: Any) -> None:
    """Assert that trees of tensors are equal to twelve digits."""
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def equal(got: Any, wanted: Any) -> None:
    """Assert that the leaves of two trees are equal to ten digits, whatever holds them."""
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-12)
