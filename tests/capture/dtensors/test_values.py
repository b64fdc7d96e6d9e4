"""Which values of Dynamo's graph are DTensors, and how torch places each."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import _compat
from shardfn.capture.dtensors import table, values
from shardfn.capture.dtensors.checks import NeedsRanks
from shardfn.capture.shard_map import axis_names
from shardfn.ops import placement, shard_map

X = torch.ones(6, 4)
PLACEMENTS = [Shard(0), Shard(3), Replicate(), Partial("sum"), Partial("max")]
TEXTS = ["S0", "S3", "R", "Psum", "Pmax"]


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


def is_dtensor(node: torch.fx.Node, outer: Any = None) -> bool:
    return values.is_dtensor(node, outer or {}, {})


def dtensors() -> values.DTensors:
    return values.DTensors(_compat.fake_mode())


def test_an_op_of_a_dtensor_makes_a_dtensor() -> None:
    nodes = Nodes()
    y = nodes.call(torch.mul, nodes.call(torch.neg, nodes.d), 2)
    assert is_dtensor(nodes.d) and is_dtensor(y)
    assert not is_dtensor(nodes.x)
    assert not is_dtensor(nodes.call(torch.neg, nodes.x))


def test_local_tensors_sizes_and_unmarked_values_are_none() -> None:
    nodes = Nodes()
    local = nodes.call(shard_map.to_local, nodes.d, "dp:2=0,tp:3=")
    size = nodes.call(len, nodes.d, value=6)
    unmarked = nodes.call(placement.unmarked, nodes.d)
    assert [is_dtensor(x) for x in (local, size, unmarked)] == [False] * 3


def test_a_gradient_is_what_its_primal_is() -> None:
    nodes = Nodes()

    def _autograd_grad(*args: Any) -> Any: ...

    every = nodes.call(_autograd_grad, [nodes.d], [nodes.d, nodes.x])
    assert is_dtensor(nodes.call(operator.getitem, every, 0))
    assert not is_dtensor(nodes.call(operator.getitem, every, 1))


def test_an_input_of_a_subgraph_is_what_it_is_outside() -> None:
    nodes = Nodes()
    inner = torch.fx.Graph().placeholder("y")
    assert is_dtensor(inner, {inner: nodes.d})
    assert not is_dtensor(inner, {inner: nodes.x})


def test_placements_and_their_texts() -> None:
    assert [values.placement_of(text) for text in TEXTS] == PLACEMENTS
    for known, text in zip(PLACEMENTS, TEXTS, strict=True):
        assert values._said(known) == text


def test_a_dtensor_says_its_own_placements(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Replicate(), Shard(1)])
    assert values.text_of(d) == "dp=R,tp=S1"


def test_torch_places_what_ops_make(mesh: Any) -> None:
    nodes = Nodes()
    placed = lambda node: dtensors().placed("placements", node, {})
    assert placed(nodes.d) == "dp=S0,tp=R" and placed(nodes.x) is None
    assert placed(nodes.method("t", nodes.d)) == "dp=S1,tp=R"
    assert placed(nodes.method("sum", nodes.d, 0)) == "dp=Psum,tp=R"
    after = nodes.call(placement.moved, nodes.d, "dp=R,tp=S1", "dp=S0,tp=R")
    assert placed(nodes.call(torch.neg, after)) == "dp=R,tp=S1"


def test_what_torch_cannot_place_is_refused(mesh: Any) -> None:
    nodes = Nodes()
    y = nodes.call(torch.mm, nodes.d, nodes.d)
    with pytest.raises(sf.CaptureError) as caught:
        dtensors().placed("to_local", y, {})
    text = str(caught.value)
    assert text.startswith("DTensor.to_local: torch places no such DTensor")
    assert "x.redistribute(mesh, placements) before it" in text
    assert dtensors().placed(table.PARTIAL, y, {}) is None


def test_a_call_that_places_by_itself_needs_no_placements(mesh: Any) -> None:
    nodes = Nodes()
    y = nodes.call(torch.mm, nodes.d, nodes.d)
    for name in values.PLACING:
        assert dtensors().placed(name, y, {}) == "dp=?,tp=?"


def test_the_mesh_of_a_dtensor_may_be_a_part(mesh: Any) -> None:
    assert dtensors().mesh(Nodes().d, {}) == mesh
    assert dtensors().mesh(Nodes("tp=S0").d, {}) == mesh["tp"]
    with pytest.raises(sf.CaptureError, match="of a plain tensor"):
        dtensors().mesh(Nodes().x, {})


def test_mixing_is_checked_once_there_is_a_dtensor(mesh: Any) -> None:
    graph = Nodes()
    made = dtensors()
    mixed = graph.call(torch.add, graph.d, graph.x)
    made.check(mixed, dict)
    made.check(graph.d, dict)
    with pytest.raises(sf.CaptureError, match="a DTensor of shape"):
        made.check(mixed, dict)


def test_a_stand_in_has_the_global_shape_and_no_values(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Shard(0), Shard(1)]).requires_grad_()
    fake = dtensors().stand_in(d)
    assert fake.shape == X.shape and fake.stride() == X.stride()
    assert fake.requires_grad and fake.device.type == "cpu"
    assert type(fake).__name__ == "FakeTensor"


def test_code_that_asks_for_the_class_may_be_of_ranks(mesh: Any) -> None:
    nodes = Nodes()
    assert dtensors().asked_for(nodes.d, {})
    assert not dtensors().asked_for(nodes.x, {})
    with (
        axis_names.scope(mesh, "cpu", may_be_of_ranks=True),
        pytest.raises(NeedsRanks, match="isinstance"),
    ):
        dtensors().asked_for(nodes.x, {})


def test_a_closed_over_dtensor_is_placed_as_it_is(mesh: Any) -> None:
    d = distribute_tensor(X, mesh, [Replicate(), Shard(1)])
    assert dtensors().closed_over(d) == (placement.placed, "dp=R,tp=S1")
    with axis_names.scope(mesh, "cpu"):
        fn, text = dtensors().closed_over(d)
        assert fn is values._constrained and text == "dp=R,tp=S1"


def test_lookups_of_a_row_sharded_table_do_not_meet_each_others_masks() -> None:
    table = torch.arange(8.0).view(4, 2)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = distribute_tensor(table, mesh, [Shard(0)])
        for ids in ([0, 3], [1, 2]):
            i = distribute_tensor(torch.tensor(ids), mesh, [Replicate()])

            def fn(w: Any, i: Any) -> Any:
                y = torch.nn.functional.embedding(i, w)
                return y.redistribute(mesh, [Replicate()]), y.placements

            out, placements = sf.jit(fn, backend="aten")(w, i)
            assert placements[0].is_partial()
            torch.testing.assert_close(sf.full(out), table[ids])
            eager = torch.nn.functional.embedding(i, w)
            torch.testing.assert_close(eager.full_tensor(), table[ids])


def test_a_result_of_control_flow_is_what_its_body_returns() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        w = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        add = lambda c, k: (c + k * w.full_tensor().sum(), w * 2)
        fn = lambda x, ks: sf.scan(add, x.sum(), ks)
        for _ in range(2):  # a second capture knows nothing of the first
            total, rows = sf.jit(fn, backend="aten")(torch.ones(3), torch.arange(3.0))
            assert not isinstance(total, DTensor) and isinstance(rows, DTensor)
            torch.testing.assert_close(total.shards[1], torch.tensor(15.0))
