"""Which values of Dynamo's graph are DTensors, and how torch places each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import _compat
from shardfn.capture.dtensors import dtensor_values, replaced_calls
from shardfn.capture.shard_map import axis_names
from shardfn.ops import placement

X = torch.ones(6, 4)


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(6):
        mesh = sf.make_mesh((2, 3), ("dp", "tp"))
        with axis_names.scope(mesh, "cpu"):
            axis_names.enter_mesh("f", mesh, None)
            yield mesh


class Nodes:
    """A graph with a plain tensor x and a DTensor d."""

    def __init__(self, text: str = "dp=S0,tp=R") -> None:
        self.graph = torch.fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["example_value"] = X
        self.d = self.call(placement.placed, self.x, text)

    def call(self, target: Any, *args: Any, value: Any = X) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["example_value"] = value
        return node

    def method(self, name: str, *args: Any) -> torch.fx.Node:
        node = self.graph.call_method(name, args)
        node.meta["example_value"] = X
        return node


def dtensors() -> dtensor_values.DTensors:
    return dtensor_values.DTensors(_compat.fake_mode())


def test_what_torch_cannot_place_is_refused(mesh: Any) -> None:
    nodes = Nodes()
    y = nodes.call(torch.mm, nodes.d, nodes.d)
    with pytest.raises(sf.CaptureError) as caught:
        dtensors().placed("to_local", y, {})
    text = str(caught.value)
    assert text.startswith("DTensor.to_local: torch cannot place this DTensor")
    assert "x.redistribute(mesh, placements) before this op" in text
    assert dtensors().placed(replaced_calls.PARTIAL, y, {}) is None


def test_lookups_of_a_row_sharded_table_do_not_meet_each_others_masks() -> None:
    rows = torch.arange(8.0).view(4, 2)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = distribute_tensor(rows, mesh, [Shard(0)])
        for ids in ([0, 3], [1, 2]):
            i = distribute_tensor(torch.tensor(ids), mesh, [Replicate()])

            def fn(w: Any, i: Any) -> Any:
                y = torch.nn.functional.embedding(i, w)
                return y.redistribute(mesh, [Replicate()]), y.placements

            out, placements = sf.jit(fn, backend="aten")(w, i)
            assert placements[0].is_partial()
            torch.testing.assert_close(sf.full(out), rows[ids])
            eager = torch.nn.functional.embedding(i, w)
            torch.testing.assert_close(eager.full_tensor(), rows[ids])
