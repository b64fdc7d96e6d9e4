"""Records of JSON become records of the runtime, with names of this mesh, and are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.mesh import group_names
from shardfn.runtime.artefacts import records, save


def record_and_mesh(compiled: Any) -> tuple[dict[str, Any], Any]:
    programs = compiled.of_all()
    record = {
        **save._origin(compiled),
        "arguments": save._arguments(compiled.placed),
        "outside": save._outside(compiled.captured),
        "results": save._results(compiled),
        **save._programs(programs),
    }
    return record, compiled.placed.mesh


def test_ranks_of_uneven_shards_have_programs_of_their_own_and_this_meshes_groups() -> None:
    with sf.fake_world(3, numerics=False):
        mesh = sf.make_mesh((3,), ("dp",), device_type="cpu")
        step = sf.shard(lambda x: x * x.sum(), mesh, P("dp"), backend="aten")
        record, _ = record_and_mesh(step.compile(sf.ShapeDtype((7,))))
        assert record["of"] == [0, 0, 1] and len(record["programs"]) == 2
        captured = records.captured_of(record, {})
        axes = records.axes_of(mesh)
        plan = records.plan_of(record, axes, captured)
        for program in record["programs"]:
            for row in program["graph"]:
                if "all_reduce" in row.get("op", ""):
                    row["args"][-1] = "shardfn:00000000:dp"
        programs = records.programs_of(record, plan, captured, mesh)
        (start,) = [node for node in programs[(2,)].graph.nodes if "collective" in node.meta]
        assert start.args[-1] == group_names(mesh)[0]
    first, _, last = (
        [n.meta["val"].shape for n in x.graph.find_nodes(op="placeholder")]
        for x in programs.values()
    )
    assert (first[-1], last[-1]) == ((3,), (1,))


def changed(name: str, key: str, value: Any) -> Any:
    def change(record: dict[str, Any]) -> None:
        record[name][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed("arguments", "tensors", [1]),
        changed("arguments", "donated", [-1]),
        changed("arguments", "tree", {"tuple": []}),
        changed("arguments", "marks", [[0]]),
        changed("outside", "draws", 1),
        changed("outside", "inputs", []),
        changed("results", "marks", [["R"]]),
        changed("results", "leaves", []),
        changed("results", "values", []),
    ],
)
def test_a_record_that_does_not_fit_itself_is_refused(change: Any) -> None:
    compiled = sf.jit(lambda x: x + 1, backend="aten").compile(torch.ones(2))
    record, mesh = record_and_mesh(compiled)
    change(record)
    with pytest.raises((ValueError, LookupError, AssertionError, StopIteration)):
        placed = records.placed_of(record["arguments"], mesh, ())
        assert len(placed.marks[0]) == 0
        captured = records.captured_of(record, {})
        plan = records.plan_of(record, records.axes_of(mesh), captured)
        records.programs_of(record, plan, captured, mesh)
