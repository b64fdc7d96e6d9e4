"""torch.distributed.checkpoint in a world of one process: plans without the others."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.utils import _DistWrapper

from shardfn._compat.distributed.checkpoints import (
    chunk,
    is_of_one_process,
    plans_of_one_process,
    write_item,
)


def test_inside_a_wrapper_asks_no_other_process() -> None:
    assert not is_of_one_process()
    with plans_of_one_process():
        assert is_of_one_process()
        assert _DistWrapper(None, True, 0).use_dist is False
    assert not is_of_one_process()


def test_an_item_names_the_place_of_its_chunk() -> None:
    x = torch.ones(5, 3, dtype=torch.float16)
    item = write_item("w", x, chunk([2, 0], [3, 3]))
    assert (item.index.fqn, item.index.offset) == ("w", torch.Size([2, 0]))
    data = item.tensor_data
    assert data.size == x.size() and data.properties.dtype == torch.float16
    assert data.chunk.sizes == torch.Size([3, 3])
