"""A real world of one rank, for tests of programs that run outside of the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import shardfn as sf


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of the one rank of a real world."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield sf.make_mesh((1,), ("a",), device_type="cpu")
    dist.destroy_process_group()
