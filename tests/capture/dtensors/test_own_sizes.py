"""Shards of different sizes: the local shapes of a rank, and what differs between readings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.dtensors import own_sizes
from shardfn.capture.shard_map import axis_names
from shardfn.ops import shard_map

ROWS = (("dp", 2, "S0"), ("tp", 3, "S0"))


@pytest.fixture(name="mesh")
def _mesh() -> Iterator[Any]:
    with sf.fake_world(6):
        yield sf.make_mesh((2, 3), ("dp", "tp"))


def test_chunks_are_those_of_torch() -> None:
    for size in range(12):
        for n in range(1, 6):
            cut = [len(x) for x in torch.chunk(torch.empty(size), n)]
            cut += [0] * (n - len(cut))
            assert [own_sizes.chunk(size, n, k) for k in range(n)] == cut


def test_local_shapes_are_those_of_chunks_of_chunks() -> None:
    for size in (0, 1, 5, 7, 12):
        for i in range(2):
            for k in range(3):
                at = {"dp": i, "tp": k}
                outer = own_sizes.chunk(size, 2, i)
                wanted = own_sizes.chunk(outer, 3, k), 4
                assert own_sizes.local_shape(ROWS, (size, 4), at) == wanted


def test_equal_shards_need_no_rank(mesh: Any) -> None:
    with axis_names.scope(mesh, "cpu"):
        assert own_sizes.shards_of("f", ROWS, (12, 4)) == "dp:2=0,tp:3=0"


@pytest.mark.parametrize(
    ("rank", "kind"), [(None, sf.PlacementError), ((), own_sizes.NeedsOwnSizes)]
)
def test_uneven_shards_of_one_program_are_refused(mesh: Any, rank: Any, kind: Any) -> None:
    with axis_names.scope(mesh, "cpu", rank=rank), pytest.raises(kind) as caught:
        own_sizes.shards_of("x.to_local", ROWS, (8, 4))
    text = str(caught.value)
    assert "dim 0 of 4 elements, sharded over tp of 3 ranks" in text
    assert "shards of equal size, since all ranks share one program" in text


def test_uneven_shards_of_a_rank_have_its_sizes_and_are_noted(mesh: Any) -> None:
    with axis_names.scope(mesh, "cpu", rank=(0, 2)) as here:
        assert own_sizes.may_differ()
        text = own_sizes.shards_of("f", ROWS, (7, 4))
        assert text == "dp:2=0@4/7,tp:3=0@0/4"
        assert here.cuts == [(ROWS, (7, 4), (0, 4))]
    fits = lambda *rank: own_sizes.fits(here.cuts, ("dp", "tp"), rank)
    assert fits(0, 2) and not fits(0, 1), "2, 2, 0 rows on one side"
    assert not fits(1, 2), "1, 1, 1 rows on the other"


def graph(size: int, op: Any = torch.narrow) -> torch.fx.GraphModule:
    """A reading of a function on a rank with so many rows."""
    made = torch.fx.Graph()
    x = made.placeholder("x")
    y = made.call_function(op, (x, 0, 0, size))
    made.output(made.call_function(torch.mul, (y, 2)))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def test_constants_that_differ_are_found() -> None:
    readings = [own_sizes.traits(graph(n)) for n in (3, 3, 2)]
    assert own_sizes.differing("f", readings) == {(0, 1)}
    assert own_sizes.differing("f", readings[:2]) == frozenset()


def test_other_ops_are_refused() -> None:
    readings = [own_sizes.traits(graph(3, op)) for op in (torch.narrow, torch.roll)]
    with pytest.raises(sf.CaptureError) as caught:
        own_sizes.differing("f", readings)
    text = str(caught.value)
    assert "ranks whose shards have other sizes run other ops" in text
    assert "one rank: call_function narrow" in text
    assert "another: call_function roll" in text


def test_another_number_of_ops_is_refused() -> None:
    longer = graph(3)
    (output,) = longer.graph.find_nodes(op="output")
    with longer.graph.inserting_before(output):
        longer.graph.call_function(torch.neg, (output.args[0],))
    readings = [own_sizes.traits(graph(3)), own_sizes.traits(longer)]
    with pytest.raises(sf.CaptureError, match="run other ops"):
        own_sizes.differing("f", readings)


def of_local(rows: int, where: str) -> Any:
    made = torch.fx.Graph()
    x = made.placeholder("x")
    y = made.call_function(shard_map.from_local, (x, f"dp:2=0@{rows}/5"), {"where": where})
    y.meta["example_value"] = torch.empty(rows, 2)
    made.output(y)
    return own_sizes.traits(torch.fx.GraphModule(torch.nn.Module(), made))


def test_a_dtensor_of_another_shape_on_each_rank_is_refused() -> None:
    every = [of_local(n, "DTensor.from_local: its argument") for n in (3, 2)]
    with pytest.raises(sf.PlacementError) as caught:
        own_sizes.differing("f", every)
    assert "shape (3, 2) on one rank, (2, 2) on another" in str(caught.value)
    results = [of_local(n, own_sizes.RESULT) for n in (3, 2)]
    assert own_sizes.differing("f", results) == frozenset(), "each rank's own"


def held(*values: float) -> Any:
    root = torch.nn.Module()
    root.c = torch.tensor(values)
    made = torch.fx.Graph()
    made.output(made.get_attr("c"))
    return own_sizes.traits(torch.fx.GraphModule(root, made))


def test_a_constant_tensor_must_be_the_same() -> None:
    assert own_sizes.differing("f", [held(1, 2), held(1, 2)]) == frozenset()
    for other in (held(1, 3), held(1, 2, 3)):
        with pytest.raises(sf.CaptureError) as caught:
            own_sizes.differing("f", [held(1, 2), other])
        assert "a constant tensor of it depends on a size" in str(caught.value)


def test_marks_name_all_axes_and_refuse_what_ranks_do_together(mesh: Any) -> None:
    module = graph(3)
    with axis_names.scope(mesh, "cpu"):
        own_sizes.mark(module, "f", frozenset({(0, 1)}))
        nodes = list(module.graph.nodes)
        assert nodes[1].meta[own_sizes.DIFFERS] == {"dp", "tp"}
        assert own_sizes.DIFFERS not in nodes[2].meta
        nodes[1].target = shard_map.psum
        with pytest.raises(sf.CaptureError) as caught:
            own_sizes.mark(module, "f", frozenset({(0, 1)}))
    assert "psum: a loop, a branch or a collective depends on a size" in str(caught.value)
