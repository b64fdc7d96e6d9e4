"""Plain labels of a loss under `loss_parallel`, however they are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf

X = torch.arange(35.0, dtype=torch.float64).reshape(5, 7).sin()  # 7 classes over 3 ranks
LABELS = torch.tensor([6, 0, 3, 2, 6])


def test_labels_by_position_and_by_name_and_in_shard() -> None:
    def losses(d: Any, labels: Any) -> Any:
        with loss_parallel():
            return (
                F.cross_entropy(d, labels),
                F.cross_entropy(d, target=labels, reduction="sum"),
                F.cross_entropy(input=d, target=labels),
                F.nll_loss(F.log_softmax(d, 1), target=labels, reduction="none").sum(),
            )

    def full(d: Any, labels: Any) -> Any:
        return [x.full_tensor() for x in losses(d, labels)]

    mean, total = F.cross_entropy(X, LABELS), F.cross_entropy(X, LABELS, reduction="sum")
    wanted = [mean, total, mean, total]
    with simulated(tp=3) as mesh:
        d = distribute_tensor(X, mesh, [Shard(1)])
        found: Any = sf.jit(full, backend="aten")(d, LABELS)
        for got, x in zip(found, wanted, strict=True):
            assert_close(got.shards[2], x)
        ins = (sf.P(None, "tp"), sf.P())
        sharded = sf.shard(losses, mesh, ins, backend="aten")(X, LABELS)
        assert_close([sf.full(x) for x in sharded], wanted)
