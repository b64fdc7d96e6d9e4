"""Calls that a captured function may not make, with alternatives: one row each."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from ... import _compat
from ...errors import is_inside

GROUP = (
    "it makes or ends a process group",
    "make groups and meshes outside, and close over the mesh",
)
MESH = ("it makes a mesh", "make the mesh outside of the function, and close over it")
RETURNED = (
    "it returns a process group, or passes one where a tensor belongs",
    "mesh.get_group(axis) outside of the function",
)
MESH_RETURNED = (
    "it returns a mesh, in the code of one rank",
    "use the mesh outside of the function: the one that it closes over, or x.device_mesh of a "
    "DTensor that it returns",
)
WAITS = (
    "it waits for all ranks",
    "leave it out: ranks keep in step by their collectives; or call it outside",
)
POINT = (
    "it sends to one rank, or receives from one",
    "y = sf.ppermute(x, 'dp', [(0, 1)]), by axis name: rank 0 sends to rank 1, others get zeros",
)
OBJECTS = (
    "it sends Python objects",
    "send them outside of the function; sf.all_gather for tensors",
)
ONE_RANK = (
    "it sends to, or from, one rank",
    "sf.all_gather, or sf.psum(torch.where(sf.axis_index(name) == 0, x, 0), name)",
)
PLACES = (
    "it makes a DTensor",
    "sf.constrain(x, P('axis')) inside; sf.distribute and sf.from_local outside",
)
STAGES = (
    "it stages another function",
    "call the function; .trace, .lower and .compile are for outside",
)
WORLD = ("it enters a world", "enter the world outside of the function")
CONTEXT = ("it asks for the current mesh", "close over the mesh")
MODULE = (
    "it makes a function of a module",
    "call functionalize outside, and close over the function",
)
PARAMETER = (
    "it makes a module or a parameter",
    "make it outside; sf.functionalize(module) makes a function of it",
)
WRAPS = (
    "it shards or wraps a module",
    "parallelize_module, distribute_module and fully_shard outside of the function, which closes "
    "over the module; sf.bucketed_grad in place of DistributedDataParallel",
)
DDP = (
    "it calls a module of DistributedDataParallel, whose hooks reduce gradients",
    "the module in it, model.module; sf.bucketed_grad(loss) reduces gradients in buckets",
)
COUNTS = (
    "it counts collectives while it runs",
    "sf.explain(fn, *args), or sf.jit(fn).lower(*args).collectives, outside of the function",
)
STORE = (
    "it makes an object of C++, such as a store of torch.distributed",
    "make it outside of the function",
)
OF_CPP = ("it makes an object of C++", "make it outside of the function")
GENERATOR = (
    "it reads or seeds a generator of random numbers",
    "torch.rand and others inside, which sf.random.state.seed(seed) seeds before the call; "
    "sf.random with a key; or numbers drawn outside, as arguments",
)
HOOK = (
    "it registers a hook on a module",
    "a forward hook registered before the call, which runs it; y.register_hook(fn) of a tensor",
)
BY_NAME = (
    "it asks for a process group by its name",
    "mesh.get_group(axis); the ops of torch.ops._c10d_functional take the name itself",
)
NODE = (
    "it asks for the number of this process on its machine",
    "mesh.get_local_rank(axis), which is a tensor; or read it outside of the function",
)
OTHER = (
    "it calls a function of torch.distributed that cannot be captured",
    "collectives of shardfn inside shard_map; groups, meshes and barriers outside of the function",
)
FSDP = (
    "it calls a module of fully_shard, whose hooks gather its parameters",
    "torch.func.functional_call(module, params, args) of a module without fully_shard, with "
    'params as arguments: those of fully_shard, or of sf.strategy("zero3", params, mesh)',
)
LOCAL_MAP = (
    "local_map: a DTensor is placed otherwise than in_placements say",
    "redistribute_inputs=True of local_map, or x.redistribute before it",
)
NO_LIST = (
    "local_map: a placement where a list of placements belongs",
    "a list for each argument and result: out_placements=([Shard(0)],)",
)
OUT_PLACEMENTS = (
    "local_map: out_placements of another length than the results",
    "out_placements=([Shard(0)], None), one list for each result: None for a number",
)
# texts of torch's local_map (torch 2.13 to 2.15), each with what to write instead
LOCAL_MAPS = {
    "does not match the number of input args": (
        "local_map: in_placements of another length than the arguments",
        "in_placements=([Shard(0)], None), one list for each leaf: None for a number",
    ),
    "expects placements but received": (
        "local_map: in_placements has None for a DTensor",
        "a list of placements for it, or in_placements=None: each as it is placed",
    ),
    "expects in grad placements but received": (
        "local_map: in_grad_placements has None for a DTensor",
        "a list of placements for it, or in_grad_placements=None",
    ),
    "one PlacementType be provided for each output": OUT_PLACEMENTS,
    "expects None placements but received": (
        "local_map: placements for a value that is not a tensor",
        "None in its place",
    ),
    "torch.Tensor output expected but received": (
        "local_map: the function returns a DTensor",
        "x.to_local() of it",
    ),
    "object is not iterable": NO_LIST,
    "has no len()": NO_LIST,
    "ValueError": LOCAL_MAP,
    "IndexError": (
        "local_map: in_grad_placements of another length than the arguments",
        "in_grad_placements=([Shard(0)], [Partial()]), one list for each leaf",
    ),
}
LOCAL_MAP_FRAME = "_local_map_wrapped"
PINS = (
    "it pins activations of a module",
    "sf.pin outside of the function; inside, sf.constrain of the value",
)
AXIS = (
    "it asks a mesh for an axis that the mesh does not have",
    "one of the names in mesh.mesh_dim_names",
)
PROOF = ("it checks another function", "call it outside of the function")

IN_SHARD = (  # in place of code of one rank
    "sf.jit(fn) or sf.shard_map, for code of one rank; in shard: global tensors, and "
    "sf.constrain(x, placements)"
)
STYLES = "/torch/distributed/tensor/parallel/"
MODULE_IN_SHARD = (
    "sf.jit(fn) or sf.shard_map; in shard: the module without parallelize_module, its parameters "
    "at sf.placements(params, plan, axis='tp', module=module)"
)
PULLBACK = (
    "it applies a pullback of torch.func that was made outside of it",
    "sf.vjp, whose pullbacks work everywhere, or torch.func.vjp inside of the function",
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
        got = f"it communicates by a method of a process group: .{name}"
        return got, "a function of torch.distributed, such as dist.all_reduce(x, group=group)"
    got = f"it reads .{name} of a mesh or a process group"
    return got, "read it outside of the function; mesh.get_group(axis) for a group"


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
