"""Calls that a captured function may not make, with alternatives: one row each."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from ... import _compat
from ...errors import is_inside

GROUP = (
    "the function makes or ends a process group",
    "make groups and meshes outside of the function, and close over the mesh",
)
MESH = ("the function makes a mesh", "make the mesh outside of the function, and close over it")
RETURNED = (
    "the function returns a process group, or passes one in place of a tensor",
    "mesh.get_group(axis) outside of the function",
)
MESH_RETURNED = (
    "the function returns a mesh, in the code of one rank (sf.jit or sf.shard_map)",
    "use the mesh outside of the function: the mesh that the function closes over, or "
    "x.device_mesh of a returned DTensor x",
)
WAITS = (
    "the function waits for all ranks, as dist.barrier does",
    "remove the barrier, since collectives already keep ranks in step; or call it outside of "
    "the function",
)
POINT = (
    "the function sends to one rank, or receives from one",
    "y = sf.ppermute(x, 'dp', [(0, 1)]), by axis name: rank 0 sends to rank 1, others get zeros",
)
OBJECTS = (
    "the function sends Python objects",
    "send Python objects outside of the function; use sf.all_gather for tensors",
)
ONE_RANK = (
    "the function sends from one rank to all, or from all ranks to one",
    "sf.all_gather, or sf.psum(torch.where(sf.axis_index(name) == 0, x, 0), name)",
)
PLACES = (
    "the function makes a DTensor",
    "inside the function use sf.constrain(x, P('axis')); outside use sf.distribute or "
    "sf.from_local",
)
STAGES = (
    "the function calls .trace, .lower or .compile of a transformed function",
    "call the transformed function itself; use .trace, .lower and .compile outside",
)
WORLD = ("the function enters a fake world", "enter the fake world outside of the function")
CONTEXT = ("the function asks for the current mesh", "close over the mesh")
MODULE = (
    "the function calls functionalize of a module",
    "call functionalize outside of the function, and close over its result",
)
PARAMETER = (
    "the function makes a module or a parameter",
    "make the module outside of the function; sf.functionalize(module) turns it into a pure "
    "function",
)
WRAPS = (
    "the function shards or wraps a module",
    "call parallelize_module, distribute_module or fully_shard outside of the function, and "
    "close over the module; use sf.bucketed_grad in place of DistributedDataParallel",
)
DDP = (
    "the function calls a module of DistributedDataParallel, whose hooks reduce gradients",
    "call the wrapped module, model.module; sf.bucketed_grad(loss) reduces gradients in buckets",
)
COUNTS = (
    "the function counts its own collectives while it runs",
    "sf.explain(fn, *args), or sf.jit(fn).lower(*args).collectives, outside of the function",
)
STORE = (
    "the function makes a C++ object, such as a store of torch.distributed",
    "make the object outside of the function",
)
OF_CPP = ("the function makes a C++ object", "make the object outside of the function")
GENERATOR = (
    "the function reads or seeds a generator of random numbers",
    "call torch.rand and similar functions without a generator, and sf.random.state.seed(seed) "
    "before the captured function; or use sf.random with a key; or pass random numbers as "
    "arguments",
)
HOOK = (
    "the function registers a hook on a module",
    "register a forward hook before the call, which runs the hook; or use y.register_hook(fn) "
    "of a tensor y",
)
BY_NAME = (
    "the function asks for a process group by its name",
    "mesh.get_group(axis); the ops of torch.ops._c10d_functional take the group's name directly",
)
NODE = (
    "the function asks for the local rank, the number of this process on its machine",
    "mesh.get_local_rank(axis), which is a tensor; or read the number outside of the function",
)
OTHER = (
    "the function calls a function of torch.distributed that cannot be captured",
    "shardfn's collectives inside shard_map; make groups and meshes, and call barriers, "
    "outside of the function",
)
FSDP = (
    "the function calls a module of fully_shard, whose hooks gather its parameters",
    "torch.func.functional_call(module, params, args) of a module without fully_shard; pass "
    'params as an argument, sharded by fully_shard or by sf.strategy("zero3", params, mesh)',
)
LOCAL_MAP = (
    "local_map: the placements of a DTensor differ from in_placements",
    "redistribute_inputs=True of local_map, or x.redistribute(mesh, placements) before the call",
)
NO_LIST = (
    "local_map: a single placement in place of a list of placements",
    "a list of placements for each argument and result: out_placements=([Shard(0)],)",
)
OUT_PLACEMENTS = (
    "local_map: out_placements must have as many entries as the function has results",
    "out_placements=([Shard(0)], None), with a list for each tensor and None for each number",
)
# texts of torch's local_map (torch 2.13 to 2.15), each with what to write instead
LOCAL_MAPS = {
    "does not match the number of input args": (
        "local_map: in_placements must have as many entries as the call has arguments",
        "in_placements=([Shard(0)], None), with a list for each tensor and None for each number",
    ),
    "expects placements but received": (
        "local_map: in_placements has None where the argument is a DTensor",
        "a list of placements for this DTensor; or in_placements=None, which accepts every "
        "argument as it is placed",
    ),
    "expects in grad placements but received": (
        "local_map: in_grad_placements has None where the argument is a DTensor",
        "a list of placements for this DTensor, or in_grad_placements=None",
    ),
    "one PlacementType be provided for each output": OUT_PLACEMENTS,
    "expects None placements but received": (
        "local_map: placements for a value that is not a tensor",
        "None in place of these placements",
    ),
    "torch.Tensor output expected but received": (
        "local_map: the mapped function returns a DTensor, and must return a plain tensor",
        "return x.to_local() of the DTensor x",
    ),
    "object is not iterable": NO_LIST,
    "has no len()": NO_LIST,
    "ValueError": LOCAL_MAP,
    "IndexError": (
        "local_map: in_grad_placements must have as many entries as the call has arguments",
        "in_grad_placements=([Shard(0)], [Partial()]), with a list for each argument",
    ),
}
LOCAL_MAP_FRAME = "_local_map_wrapped"
PINS = (
    "the function calls sf.pin, which pins activations of a module",
    "call sf.pin outside of the function; inside, use sf.constrain of the value",
)
AXIS = (
    "the function asks a mesh for an axis that the mesh does not have",
    "one of the names in mesh.mesh_dim_names",
)
PROOF = (
    "the function calls sf.check, sf.rule or sf.saved_residuals",
    "call sf.check, sf.rule or sf.saved_residuals outside of the function",
)

IN_SHARD = (  # in place of code of one rank
    "use sf.jit(fn) or sf.shard_map for the code of one rank; under sf.shard use global "
    "tensors and sf.constrain(x, placements)"
)
STYLES = "/torch/distributed/tensor/parallel/"
MODULE_IN_SHARD = (
    "use sf.jit(fn) or sf.shard_map; under sf.shard use the module without "
    "parallelize_module, with in_placements from sf.placements(params, plan, axis='tp', "
    "module=module)"
)
PULLBACK = (
    "the function calls a pullback of torch.func.vjp that was made outside of the function",
    "sf.vjp, whose pullbacks can be called inside and outside of the captured function; or "
    "torch.func.vjp inside the function",
)
# (folder or file, name of a function) -> the problem, what to write instead.
TORCH: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("new_group", "new_subgroups", "split_group", "shrink_group"), GROUP),
    "new_subgroups_by_enumeration": GROUP,
    **dict.fromkeys(("parallelize_module", "fully_shard", "distribute_module"), WRAPS),
    "CommDebugMode": COUNTS,
    **dict.fromkeys(("init_process_group", "destroy_process_group", "abort_process_group"), GROUP),
    **dict.fromkeys(("init_device_mesh", "_flatten", "_unflatten", "from_group"), MESH),
    **dict.fromkeys(("barrier", "monitored_barrier"), WAITS),
    **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), POINT),
    **dict.fromkeys(("all_gather_object", "gather_object", "broadcast_object_list"), OBJECTS),
    **dict.fromkeys(("scatter_object_list", "send_object_list", "recv_object_list"), OBJECTS),
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), ONE_RANK),
    "get_node_local_rank": NODE,
}
OURS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("distribute", "from_local"), PLACES),
    **dict.fromkeys(("trace", "lower", "compile"), STAGES),
    "current_mesh": CONTEXT,
    **dict.fromkeys(("check", "rule", "saved_residuals"), PROOF),
    "make_mesh": MESH,
    "fake_world": WORLD,
    "functionalize": MODULE,
    "pin": PINS,
}
CLASSES = {  # the file and the method of a class of torch
    ("device_mesh.py", "__init__"): MESH,  # DeviceMesh(...)
    ("fully_sharded_data_parallel.py", "__init__"): WRAPS,
    ("distributed.py", "__init__"): WRAPS,  # DistributedDataParallel(...)
    ("distributed.py", "forward"): DDP,
    ("distributed.py", "_pre_forward"): DDP,
}
FOLDERS = "/torch/distributed/", "/torch/nn/parallel/"
# Dynamo's text, for errors without frames (torch 2.13 to 2.15).
SIGNS = {
    "P2P compilation disabled": POINT,
    "Opaque object type: <class 'torch.distributed.device_mesh.DeviceMesh'>": MESH,
    "opaque value type, got <class 'torch.distributed.device_mesh.DeviceMesh": MESH_RETURNED,
    "opaque constant type, got <class 'torch.distributed.device_mesh.Dev": MESH_RETURNED,
    "opaque value type, got <class 'torch.distributed.distributed_c10d.P": RETURNED,
    "opaque constant type, got <class 'torch.distributed.distributed_c10d.P": RETURNED,
    "`torch.nn.Parameter()` constructor": PARAMETER,
    "._resolve_process_group": BY_NAME,
    "_autograd_grad with lost grad_fn linkage": PULLBACK,
    "Invalid mesh_dim_name": AXIS,
    "<class 'torch.utils.hooks.RemovableHandle'>": HOOK,
    "the function `Random.": GENERATOR,  # of Python
    "random.seed.__self__": GENERATOR,  # the same in torch 2.15
    "Mesh dimension '": AXIS,
}
# Dynamo's texts of a class of C++ (torch 2.13, 2.15).
CPP = "pybind11_object.__new__", "pybind11_type.__new__"
FORKS = "fork_rng", "freeze_rng_state"  # keep the state of torch's random numbers


def row_of(name: str) -> tuple[str, str] | None:
    """The problem and the alternative of a function of torch.distributed, if the table has it."""
    return TORCH.get(name)


def row_of_attribute(name: str) -> tuple[str, str]:
    """The problem and the alternative of an attribute of a mesh or a process group."""
    if name in TORCH:
        return TORCH[name]
    if re.match("_?all|_?reduce|gather|scatter", name):
        got = f"the function communicates by a method of a process group: .{name}"
        return got, "a function of torch.distributed, such as dist.all_reduce(x, group=group)"
    got = f"the function reads .{name} of a mesh or a process group"
    return got, "read the attribute outside of the function; mesh.get_group(axis) returns a group"


def row_of_error(frames: Sequence[Any], message: str) -> tuple[str, str] | None:
    """The problem and the alternative, if the calls that led to an error include one of the
    table.

    Args:
        frames: of the traced code, the outermost first: records with `filename` and `name`.
        message: the error's text.
    """
    rows = _of_local_map(frames, message)
    rows += [row for row in (_row_of_frame(frame) for frame in frames) if row is not None]
    rows += [row for name, row in TORCH.items() if f"function `{name}`" in message]
    rows += [row for sign, row in SIGNS.items() if sign in message]
    rows += _called_by_line(frames, message)
    rows += [GENERATOR for frame in frames if frame.name in FORKS]
    if any(text in message for text in CPP):
        lines = [getattr(frame, "line", None) or "" for frame in frames]
        rows.append(STORE if any("Store(" in line for line in lines) else OF_CPP)
    rows += [OTHER for frame in frames if _is_other(frame)]
    return rows[0] if rows else None


def _of_local_map(frames: Sequence[Any], text: str) -> list[tuple[str, str]]:
    """The rows of the table for a mistake that torch's local_map finds."""
    users = [frame for frame in frames if not is_inside(frame.filename)]
    if not users or users[-1].name != LOCAL_MAP_FRAME:
        return []
    return [row for sign, row in LOCAL_MAPS.items() if sign in text]


def _called_by_line(frames: Sequence[Any], text: str) -> list[tuple[str, str]]:
    """The rows of the table for functions that the user's line calls, where torch refuses the call
    before it has a frame (torch 2.13).
    """
    others = [i for i, frame in enumerate(frames) if _is_other(frame)]
    if not others and frames and _compat.MAKES_DTENSOR in text:
        others = [len(frames)]
    if not others or others[0] == 0:
        return []
    line = getattr(frames[others[0] - 1], "line", None) or ""
    return [row for name, row in TORCH.items() if re.search(rf"\b{name}\(", line)]


def _is_other(frame: Any) -> bool:
    """Whether a frame is of torch.distributed."""
    return "/torch/distributed/" in frame.filename and frame.name != LOCAL_MAP_FRAME


def _row_of_frame(frame: Any) -> tuple[str, str] | None:
    """The row of the table for the function of a frame."""
    file = frame.filename
    if any(folder in file for folder in FOLDERS):
        known = CLASSES.get((os.path.basename(file), frame.name))
        known = known or TORCH.get(frame.name)
        return FSDP if known is None and "/torch/distributed/fsdp/" in file else known
    if is_inside(frame.filename):
        return WORLD if frame.filename.endswith("world.py") else OURS.get(frame.name)
    return None
