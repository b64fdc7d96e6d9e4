"""The table of accepted types. Each kind of argument has a test and an error text, and each
parameter of a public function or method has a kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Kind(NamedTuple):
    """A kind of argument."""

    test: Callable[[Any], bool]
    needed: str
    fix: str


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _is_limit(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.dim() == 0 and not x.is_complex()
    return isinstance(x, float) or (_is_number(x) and abs(x) < 2**63)


def _is_world(x: Any) -> bool:
    if isinstance(x, Mapping):
        names = all(isinstance(k, str) and k.isidentifier() for k in x)
        return bool(x) and names and all(_is_count(n) and n for n in x.values())
    return _is_count(x) and x > 0


def _are_worlds(x: Any) -> bool:
    is_sequence = isinstance(x, Sequence) and not isinstance(x, str)
    return is_sequence and all(map(_is_world, x))


def _is_shape(x: Any) -> bool:
    is_sequence = isinstance(x, Sequence) and not isinstance(x, str)
    return is_sequence and all(map(_is_count, x))


def _are_meshes(x: Any) -> bool:
    is_sequence = isinstance(x, Sequence) and not isinstance(x, str)
    return is_sequence and bool(x) and all(map(_is_mesh, x))


def _is_mesh(x: Any) -> bool:
    if isinstance(x, Mapping):
        return _is_world(x)
    return _is_shape(x) and len(x) > 0 and all(n > 0 for n in x)


def _are_names(x: Any) -> bool:
    is_sequence = isinstance(x, Sequence) and not isinstance(x, str)
    return x is None or (is_sequence and all(isinstance(n, str) for n in x))


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_state(x: Any, names: tuple[str, ...]) -> bool:
    return isinstance(x, Mapping) and all(name in x for name in names)


def _is_device(x: Any) -> bool:
    refused = (RuntimeError, TypeError, ValueError, AssertionError, ImportError)
    try:
        torch.empty((), device=x)
    except refused:  # as the device's backend says
        return False
    return True


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _is_flag_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.dim() == 0


def _state(of: str, *names: str) -> Kind:
    """The kind of a dict with these names, that an `init` or a `state_dict` has made."""
    rows = f"with {' and '.join(map(repr, names))}" if names else "of tensors"
    return Kind(lambda x: _is_state(x, names), f"a dict {rows}", of)


FLAG = Kind(_is_flag, "True or False", "the default")
FLAG_OR_NONE = Kind(lambda x: x is None or _is_flag(x), "True, False or None", "None")
ITERABLE = Kind(
    lambda x: isinstance(x, Iterable) and not isinstance(x, str | Mapping),
    "an iterable of batches",
    "torch.utils.data.DataLoader(dataset, batch_size=32)",
)
SEED = Kind(_is_count, "an int from 0 up", "seed=0")
FUNCTION = Kind(callable, "a function", "lambda x: x.sum()")
FUNCTION_OR_NONE = Kind(lambda x: x is None or callable(x), "a function, or None", "None")
PATTERNS = Kind(
    lambda x: x is None or isinstance(x, Mapping),
    "a dict from name patterns to placements, or None",
    "{'layers.*.mlp': P('dp', 'tp')}",
)
WORLDS = Kind(
    _are_worlds, "a tuple of numbers of ranks, or of dicts from axis names to sizes", "(1, 2, 3)"
)
SHAPE = Kind(_is_shape, "a tuple of sizes, each 0 or more", "ShapeDtype((2, 3))")
SHAPE_OR_NONE = Kind(
    lambda x: x is None or _is_shape(x), "a tuple of sizes, each 0 or more, or None", "shape=(4, 3)"
)
MESHES = Kind(
    _are_meshes,
    "a list of meshes, each a dict from axis names to sizes, or a shape",
    "meshes=[{'dp': 8}, {'dp': 4, 'tp': 2}]",
)
AXIS = Kind(
    lambda x: isinstance(x, str) and x.isidentifier(), "the name of a mesh axis", "axis='pp'"
)
NAMES = Kind(_are_names, "a tuple of axis names, or None", "axis_names=('dp', 'tp')")
DEVICE_TYPE = Kind(
    lambda x: x is None or isinstance(x, str), "the type of a device, or None", "device_type='cpu'"
)
DTYPE = Kind(lambda x: isinstance(x, torch.dtype), "a dtype", "torch.float32")
LIMIT = Kind(_is_limit, "a real number, or a tensor with one element", "max_norm=1.0")
TOLERANCE = Kind(lambda x: _is_number(x) and x >= 0, "a number, 0 or more", "1e-6")

SCALE = Kind(lambda x: _is_number(x) and 0 < x < 2**127, "a positive number", "2.0**16")
GROWTH = Kind(lambda x: _is_number(x) and x >= 1, "a number, 1 or more", "2.0")
BACKOFF = Kind(lambda x: _is_number(x) and 0 < x <= 1, "a number above 0, at most 1", "0.5")
INTERVAL = Kind(lambda x: _is_count(x) and x > 0, "an int from 1 up", "2000")
STEP = Kind(lambda x: x is None or _is_count(x), "an int of 0 or more, or None", "step=0")
KEEP = Kind(
    lambda x: x is None or (_is_count(x) and x > 0), "an int of 1 or more, or None", "keep=3"
)
POSITIONS = Kind(
    lambda x: x is None or _is_count(x) or _is_shape(x),
    "the position of an argument, a list of positions, or None",
    "argnums=0",
)
PATH = Kind(lambda x: isinstance(x, str | os.PathLike), "the path of a folder", "'run/steps'")
FILE = Kind(PATH.test, "the path of a file", "'run/step.artefact'")
FILE_OR_NONE = Kind(
    lambda x: x is None or PATH.test(x), "the path of a file, or None", "path='picture.svg'"
)
BYTES = Kind(
    lambda x: isinstance(x, str) or (_is_count(x) and x > 0),
    "a number of bytes, or text such as '25MB'",
    "'5GB'",
)

COUNTS = Kind(
    lambda x: (
        x is None
        or (
            isinstance(x, Mapping)
            and all(isinstance(k, str) and _is_count(n) for k, n in x.items())
        )
    ),
    "a dict from kinds of collectives to their counts, or None",
    "counts={'all_reduce': 2}",
)
NUMBER_OR_NONE = Kind(lambda x: x is None or _is_count(x), "an int of 0 or more, or None", "0")
COUNT = Kind(_is_count, "an int from 0 up", "0")
SIZE = Kind(INTERVAL.test, "an int from 1 up", "4")
COSTS = Kind(
    lambda x: (
        isinstance(x, Mapping)
        and all(isinstance(k, str) and TOLERANCE.test(n) for k, n in x.items())
    ),
    "a dict from kinds of actions to times",
    'costs={"F": 1, "B": 1, "W": 1}',
)
RANKS = Kind(INTERVAL.test, "a number of ranks, 1 or more", "8")
RANKS_OR_NONE = Kind(KEEP.test, "a number of ranks, 1 or more, or None", "node=8")
NUMBER = Kind(TOLERANCE.test, "a number, 0 or more", "2**20")
RATE = Kind(lambda x: _is_number(x) and x > 0, "a positive number", "1e12")
SHARE = Kind(BACKOFF.test, "a number above 0, at most 1", "0.5")
EFFICIENCY = Kind(
    lambda x: hasattr(x, "product16"), "an sf.Efficiency", "efficiency=sf.Efficiency(memory=0.7)"
)
RATE_OR_NONE = Kind(lambda x: x is None or RATE.test(x), "a positive number, or None", "80e9")
TEXT = Kind(lambda x: isinstance(x, str), "text", "'all_reduce'")
DEVICE = Kind(_is_device, "a device of this machine, or None", "'cpu'")
LOSS = Kind(_is_floating, "a floating tensor", "loss_fn(params, batch)")
FINITE = Kind(_is_flag_tensor, "a 0-d tensor of bool", "grads, finite = scaler.unscale(...)")
LINK = Kind(
    lambda x: x is None or hasattr(x, "bandwidth"),
    "an sf.Link, or None",
    "sf.Link(latency=10e-6, bandwidth=50e9)",
)
LINKS = Kind(
    lambda x: x is None or isinstance(x, Mapping),
    "a dict from axis names to sf.Link, or None",
    "links={'dp': sf.Link(latency=10e-6, bandwidth=50e9)}",
)
TOLERANCES = Kind(
    lambda x: (
        x is None
        or (
            isinstance(x, Mapping)
            and all(isinstance(k, str) and TOLERANCE.test(n) for k, n in x.items())
        )
    ),
    "a dict from fields to tolerances, or None",
    "tolerances={'peak_bytes': 0.1}",
)
PROGRAM = Kind(
    lambda x: callable(x) or isinstance(x, str), "a function, or the path of a script", "'train.py'"
)
PROGRAM_OR_NONE = Kind(
    lambda x: x is None or PROGRAM.test(x), "a function, the path of a script, or None", "None"
)
THREADS = Kind(
    lambda x: x is None or (_is_count(x) and 0 < x <= 1024), "an int from 1 to 1,024", "world=8"
)
AXES = Kind(
    lambda x: x is None or (isinstance(x, Mapping) and _is_world(x)),
    "a dict from axis names to sizes",
    "{'dp': 4, 'tp': 2}",
)
MESH_OR_AXES = Kind(
    lambda x: AXES.test(x) or hasattr(x, "mesh_dim_names"),
    "a mesh, a dict from axis names to sizes, or None",
    "mesh={'dp': 4, 'tp': 2}",
)
PLACE = Kind(
    lambda x: isinstance(x, str) or (isinstance(x, int) and not isinstance(x, bool)),
    "a number, or text: a source line, the name of a value, or an op",
    "'train.py:12', 'mm_1' or 'mm'",
)
WATCH = Kind(
    lambda x: x is None or callable(x),
    "a function that takes a rank and a tensor, or None",
    "watch=lambda rank, x: x.isnan().any()",
)
BACKEND = Kind(
    lambda x: x in (None, "aten", "inductor"), "'inductor', 'aten' or None", "backend='aten'"
)
OF_SCALE = _state("scaler.init()", "scale", "good_steps")
OF_AVERAGE = _state("ema.init(params)", "count", "average")
OF_OPTIM = _state("opt.init(params)")
OF_SCHEDULE = _state("schedule.state_dict()", "options", "scheduler")

# function, or class and method -> parameter -> kind
ARGUMENTS: dict[str, dict[str, Kind]] = {
    "BucketPlan.load": {"path": FILE},
    "BucketPlan.merge": {"indices": COUNT},
    "BucketPlan.save": {"path": FILE},
    "BucketPlan.split": {"index": COUNT, "at": COUNT},
    "Efficiency": {
        "product8": SHARE,
        "product16": SHARE,
        "product32": SHARE,
        "attention": SHARE,
        "memory": SHARE,
        "link": SHARE,
        "network": SHARE,
    },
    "Ema.average": {"state": OF_AVERAGE},
    "Ema.update": {"state": OF_AVERAGE},
    "Hardware": {
        "flops": RATE,
        "flops32": RATE,
        "memory": RATE,
        "link": RATE,
        "latency": NUMBER,
        "node": RANKS_OR_NONE,
        "network": NUMBER,
        "network_latency": NUMBER,
        "capacity": RATE_OR_NONE,
        "flops8": RATE_OR_NONE,
        "launch": NUMBER,
        "efficiency": EFFICIENCY,
        "power": SHARE,
        "float8": FLAG,
    },
    "Hardware.compute": {"flops": NUMBER, "nbytes": NUMBER, "dtype": DTYPE, "is_attention": FLAG},
    "Hardware.peak": {"dtype": DTYPE},
    "Link.send": {"kind": TEXT, "nbytes": NUMBER, "n": RANKS},
    "InspectedRun.back": {"count": COUNT},
    "InspectedRun.find": {"where": TEXT},
    "InspectedRun.goto": {"where": PLACE},
    "InspectedRun.next": {"count": COUNT},
    "LossScale.init": {"device": DEVICE},
    "LossScale.scale": {"loss": LOSS, "state": OF_SCALE},
    "LossScale.select": {"finite": FINITE},
    "LossScale.unscale": {"state": OF_SCALE},
    "LossScale.update": {"state": OF_SCALE, "finite": FINITE},
    "Lowered.compile": {"backend": BACKEND, "warm": FLAG},
    "Lowered.time": {"links": LINKS},
    "Lowered.stage": {"k": COUNT},
    "StepTime.mfu_of": {"flops": NUMBER},
    "Lowered.verbose": {"rank": COUNT},
    "Memory.of": {"kind": TEXT},
    "OpOnRanks.state": {"rank": COUNT},
    "Optim.schedule": {"make": FUNCTION},
    "Optim.update": {"state": OF_OPTIM},
    "Schedule": {"name": TEXT},
    "Schedule.check": {"stages": SIZE, "on_the_way": SIZE, "costs": COSTS, "alive": KEEP},
    "Schedule.home": {"stage": COUNT},
    "Schedule.load_state_dict": {"state": OF_SCHEDULE},
    "StepTime.trace": {"path": FILE},
    "assert_comms": {"counts": COUNTS, "max_implicit": NUMBER_OR_NONE},
    "audit": {
        "distributed": PROGRAM,
        "single": PROGRAM_OR_NONE,
        "world": THREADS,
        "mesh": AXES,
        "steps": KEEP,
    },
    "check": {"fn": FUNCTION, "worlds": WORLDS, "rtol": TOLERANCE, "atol": TOLERANCE},
    "clear_cache": {"stored": FLAG},
    "clip_by_global_norm": {"max_norm": LIMIT},
    "compare": {"raises": FLAG},
    "compose": {"transform": FUNCTION},
    "draw": {"path": FILE_OR_NONE},
    "first_nan": {"step": FUNCTION},
    "from_local": {"shape": SHAPE_OR_NONE},
    "functionalize": {"share": FLAG},
    "inspect_ranks": {"step": FUNCTION, "watch": WATCH},
    "linearize": {"fn": FUNCTION},
    "load": {"path": PATH, "step": STEP, "strict": FLAG},
    "load_compiled": {"path": FILE},
    "load_safetensors": {"path": PATH, "strict": FLAG},
    "loader": {"data": ITERABLE, "seed": SEED, "rows": FLAG_OR_NONE},
    "lock": {
        "path": FILE,
        "update": FLAG,
        "tolerances": TOLERANCES,
        "links": LINKS,
        "kernels": FLAG,
    },
    "loss_scale": {"initial": SCALE, "growth": GROWTH, "backoff": BACKOFF, "interval": INTERVAL},
    "make_mesh": {"device_type": DEVICE_TYPE},
    "measure_hardware": {"link": LINK},
    "meshes": {"examples": SIZE, "seed": SEED},
    "mixed_precision": {"argnums": POSITIONS},
    "overlay": {"profile": FILE, "path": FILE_OR_NONE},
    "pin": {"outputs": PATTERNS, "inputs": PATTERNS},
    "plan": {"fn": FUNCTION, "meshes": MESHES, "axis_names": NAMES, "axis": AXIS},
    "Lowered.report": {"path": FILE},
    "report": {"path": FILE, "mesh": MESH_OR_AXES},
    "save": {"path": PATH, "step": STEP, "keep": KEEP, "background": FLAG},
    "save_safetensors": {"path": PATH, "max_bytes": BYTES},
    "saved_residuals": {"fn": FUNCTION},
    "schedules.dualpipev": {"coordinates": SIZE, "microbatches": SIZE},
    "schedules.gpipe": {"coordinates": SIZE, "microbatches": SIZE},
    "schedules.interleaved": {"coordinates": SIZE, "microbatches": SIZE, "chunks": SIZE},
    "schedules.one_f_one_b": {"coordinates": SIZE, "microbatches": SIZE},
    "schedules.zbv": {"coordinates": SIZE, "microbatches": SIZE},
    "schedules.zero_bubble": {"coordinates": SIZE, "microbatches": SIZE},
    "ShapeDtype": {"shape": SHAPE, "dtype": DTYPE},
    "sweep": {"fn": FUNCTION, "meshes": MESHES, "axis_names": NAMES, "axis": AXIS},
    "tree_map": {"fn": FUNCTION, "is_leaf": FUNCTION_OR_NONE},
    "vjp": {"fn": FUNCTION, "has_aux": FLAG},
}
