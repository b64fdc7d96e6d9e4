"""Values that are equal but for the rounding of float64."""

from __future__ import annotations

from typing import Any

from torch.testing import assert_close


def close(got: Any, wanted: Any) -> None:
    """Assert that trees of tensors are equal to twelve digits."""
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)
