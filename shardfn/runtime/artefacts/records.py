"""A record of JSON as the records that the runtime works with. All of it is checked: the file may
come from anybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from ... import _compat
from ..._compat.cuda import numbered
from ...capture import Captured, Reads, constant_key
from ...capture.closure.closed_over_tensors import ClosedOver
from ...capture.printing import program_text
from ...compile.text import graph_of, placements_of, tensor_of, value_of
from ...mesh import all_coordinates, axes_of, group_names
from ...partition import Plan, layout
from ...partition.collective_bytes import collectives_in
from ...partition.plan import Slot
from ...partition.printing import local_text
from ...random import ambient
from ...schedule.check import check
from ...types import TENSOR, Aval, LocalProgram, MeshAxes, Program
from ...world import current_world
from ..arguments import Placed
from .file import filled
from .pipelines import bind_pipelines, check_pipelines
from .trees import tree_of

GROUP = re.compile(r"shardfn:[0-9a-f]{8}:(\w+)")
Tensors = Mapping[str, torch.Tensor]


def unread(*_: Any, **__: Any) -> NoReturn:
    """Stand in for the user's function of a loaded program, which is never called."""
    raise AssertionError("the program was loaded without its function")


def placed_of(said: dict[str, Any], mesh: Any, state: tuple[Any, ...]) -> Placed:
    """Rebuild the `Placed` arguments of a saved program from JSON."""
    count = len(said["paths"])
    positions = ("tensors", "donated")
    if any(type(i) is not int or not 0 <= i < count for k in positions for i in said[k]):
        raise ValueError("positions of tensors")
    constants = [(int(i), value_of(x, ())) for i, x in said["constants"]]
    tree = tree_of(said["tree"])
    if tree.num_leaves != count:
        raise ValueError("the number of arguments")
    return Placed(
        world=current_world(),
        mesh=mesh,
        axes=axes_of(mesh),
        treedef=tree,
        paths=tuple(map(str, said["paths"])),
        tensors=tuple(said["tensors"]),
        dtensors=tuple(map(bool, said["dtensors"])),
        avals=tuple(_aval(*row) for row in said["avals"]),
        marks=tuple(map(placements_of, said["marks"])),
        unreduced=tuple(said["unreduced"]),
        followed=(),
        static=frozenset(),
        donated=tuple(said["donated"]),
        constants=tuple((i, constant_key(x), x) for i, x in constants),
        state=state,
        dynamic={},
    )


def _aval(shape: Any, stride: Any, _: Any, dtype: Any, device: Any) -> Aval:
    kind = value_of({"dtype": dtype}, ())
    return Aval(tuple(shape), tuple(stride), kind, str(numbered(device)))


def captured_of(record: dict[str, Any], tensors: Tensors) -> Captured:
    """Rebuild the capture of a saved program: only its inputs and results."""
    said, results = record["outside"], record["results"]
    leaves = [TENSOR if _is_tensor(x) else value_of(x, ()) for x in results["leaves"]]
    tree = tree_of(results["tree"])
    if tree.num_leaves != len(leaves):
        raise ValueError("the number of results")
    program = Program(
        name=str(record["name"]),
        graph=_signature(said["inputs"], results["values"]),
        in_paths=tuple(map(str, said["paths"])),
        out_paths=tuple(map(str, results["paths"])),
        out_leaves=tuple(leaves),
        out_tree=tree,
        show=program_text,
    )
    return Captured(
        program=program,
        outside=_outside(said, tensors),
        mesh=None,
        own_mesh=None,
        brought_mesh=None,
        reads=Reads(unread, ()),
        strided={int(k): bool(is_own) for k, is_own in said["strided"]},
    )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, dict) and "tensor" in x


def _outside(said: dict[str, Any], tensors: Tensors) -> ClosedOver:
    """Rebuild the closed-over tensors of a saved program, with their values."""
    closed = [
        ambient.PLACEHOLDER_STATE if like is None else filled(tensor_of(like), tensors[str(i)])
        for i, like in enumerate(said["tensors"])
    ]
    draws = int(said["draws"])
    if (draws > 0) != any(x is ambient.PLACEHOLDER_STATE for x in closed):
        raise ValueError("the record of the random state is invalid")
    names = tuple(map(str, said["names"]))
    lines = (None,) * len(closed)
    count = int(said["constants"])
    return ClosedOver(tuple(closed), names, lines, draws=draws, constants=count)


def _signature(inputs: Sequence[Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """Build a graph of placeholders and outputs without the ops between them."""
    graph = torch.fx.Graph()
    with _compat.fake_mode():
        for k, like in enumerate(inputs):
            graph.placeholder(f"in_{k}").meta["val"] = tensor_of(like)
        results = []
        for like in values:
            value = tensor_of(like)
            layout_of = (list(value.shape), list(value.stride()))
            node = graph.call_function(torch.ops.aten.empty_strided.default, layout_of)
            node.meta["val"] = value
            results.append(node)
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def plan_of(record: dict[str, Any], axes: MeshAxes, captured: Captured) -> Plan:
    """Rebuild the placements of a saved program's inputs and results."""
    graph = captured.program.graph.graph
    (output,) = graph.find_nodes(op="output")
    said = record["results"]
    ins = [x.meta["val"] for x in graph.find_nodes(op="placeholder")]
    outs = [x.meta["val"] for x in output.args[0]]
    slots = _slots([*ins, *outs], [*said["inputs"], *said["marks"]], axes)
    results = slots[len(ins) :]
    node = next(iter(graph.nodes))
    unreduced = tuple((results[k], node) for k in said["unreduced"])
    return Plan(axes, (), slots[: len(ins)], results, unreduced=unreduced)


def _slots(values: Any, marks: Any, axes: MeshAxes) -> tuple[Slot, ...]:
    rows = zip(values, map(placements_of, marks), strict=True)
    slots = tuple(Slot(k, value, own) for k, (value, own) in enumerate(rows))
    if any(len(slot.placements) != len(axes.names) for slot in slots):
        raise ValueError("a placement for each axis")
    return slots


def programs_of(
    record: dict[str, Any], plan: Plan, captured: Captured, mesh: Any
) -> dict[tuple[int, ...], LocalProgram]:
    """Rebuild the local program of each rank, keyed by its coordinate."""
    everyone = all_coordinates(plan.axes)
    graphs = [graph_of(said["graph"]) for said in record["programs"]]
    names = dict(zip(plan.axes.names, group_names(mesh), strict=True))
    made = []
    for said, graph in zip(record["programs"], graphs, strict=True):
        for node in graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, lambda x: _renamed(x, names))
        bind_pipelines(graph, names)
        check(graph, plan.axes)
        made.append(_local(captured, plan, graph, tuple(map(str, said["elided"]))))
    found = {c: made[k] for c, k in zip(everyone, record["of"], strict=True)}
    for coordinate, program in found.items():
        _check_shapes(program, plan, coordinate)
    check_pipelines(found, plan.axes)
    return found


def _renamed(x: Any, names: Mapping[str, str]) -> Any:
    """Replace a saved process-group name by the name in this job's mesh."""
    match = GROUP.fullmatch(x) if isinstance(x, str) else None
    return names[match[1]] if match else x


def _local(
    captured: Captured, plan: Plan, graph: torch.fx.Graph, elided: tuple[str, ...]
) -> LocalProgram:
    program = captured.program
    return LocalProgram(
        name=program.name,
        axes=plan.axes,
        graph=graph,
        unordered=graph,
        in_paths=program.in_paths,
        in_placements=tuple(slot.placements for slot in plan.ins),
        out_placements=tuple(slot.placements for slot in plan.outs),
        out_paths=program.out_paths,
        elided=elided,
        show=local_text,
        records=collectives_in,
    )


def _check_shapes(program: LocalProgram, plan: Plan, coordinate: Any) -> None:
    """Check that a program takes and returns the shards of its rank, laid out as `shard` lays
    them out: compiled code does not.
    """
    holders = program.graph.find_nodes(op="placeholder")[len(plan.axes.names) :]
    (output,) = program.graph.find_nodes(op="output")
    for slots, nodes in ((plan.ins, holders), (plan.outs, output.args[0])):
        for slot, node in zip(slots, nodes, strict=True):
            shape = layout.local_shape(
                slot.value.shape, slot.placements, plan.axes.sizes, coordinate
            )
            value = node.meta["val"]
            if (tuple(value.shape), value.dtype) != (tuple(shape), slot.value.dtype):
                raise ValueError(f"{node}: the shape is not that of a shard")
    for slot, node in zip(plan.ins, holders, strict=True):
        value = node.meta["val"]
        is_here = layout.is_here(slot.placements, coordinate)
        order = layout.stride_order(slot.value.shape, slot.value.stride()) if is_here else [0]
        if value.stride() != tuple(layout.dense_strides(value.shape, order)):
            raise ValueError(f"{node}: the strides are not those of a shard")
