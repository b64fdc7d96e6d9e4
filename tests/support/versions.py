"""Tests of behaviour that a torch before some version does not have."""

from __future__ import annotations

import pytest
import torch


def is_before(version: str) -> bool:
    """Whether the torch that runs is older."""
    return torch.__version__ < version  # type: ignore[operator]


def needs_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """A mark that skips a test on an older torch."""
    return pytest.mark.skipif(is_before(version), reason=reason)
