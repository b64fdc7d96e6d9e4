"""Contexts in a captured function. A mesh is the current one inside, and none after an error;
`loss_parallel` counts for the code of one rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import shardfn as sf
from shardfn.capture.dtensors import mesh_contexts
from shardfn.capture.dtensors.mesh_contexts import in_mesh

X = torch.arange(30.0, dtype=torch.float64).reshape(5, 6).sin()
LABELS = torch.arange(5)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(sf.ShardError, match="use_mesh"), in_mesh("dp"):
        pass


def test_plain_labels_beside_sharded_samples_are_refused() -> None:
    mesh_contexts.refuse_sharded((1, None), 2)
    mesh_contexts.refuse_sharded((0,), 1)
    with pytest.raises(sf.PlacementError) as caught:
        mesh_contexts.refuse_sharded((0, 1), 2)
    text = str(caught.value)
    assert "the labels are a plain tensor, but the logits are sharded on dim 0" in text
    assert "try: DTensor.from_local(target, mesh, placements)" in text


def test_labels_outside_of_the_context_and_of_other_placements() -> None:
    def inside(d: Any, labels: Any) -> Any:
        with loss_parallel():
            return F.nll_loss(d.log_softmax(1), labels).full_tensor()

    def after(d: Any, labels: Any) -> Any:
        with loss_parallel():
            pass
        return F.cross_entropy(d, labels).full_tensor()

    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        both = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
        classes = distribute_tensor(X, mesh, [Replicate(), Shard(1)])
        out: Any = sf.jit(inside, backend="aten")(classes, LABELS)
        torch.testing.assert_close(out.shards[3], F.cross_entropy(X, LABELS))
        with pytest.raises(sf.PlacementError, match="the labels are a plain tensor"):
            sf.jit(inside, backend="aten")(both, LABELS)
        with pytest.raises(
            sf.CaptureError, match="the op has a DTensor and a plain tensor as operands"
        ):
            sf.jit(after, backend="aten")(classes, LABELS)
        placed = distribute_tensor(LABELS, mesh, [Shard(0), Replicate()])
        out = sf.jit(inside, backend="aten")(both, placed)
        torch.testing.assert_close(out.shards[3], F.cross_entropy(X, LABELS))
