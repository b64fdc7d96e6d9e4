"""What a program leaves in the process: settings, registries and what the system gave it."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

OURS = "shardfn"


def digest(x: Any) -> str:
    """A long answer in short."""
    return hashlib.sha256(repr(x).encode()).hexdigest()[:16]


CALLED = (types.FunctionType, staticmethod, classmethod, property)


def _members(owner: Any) -> list[Any]:
    return sorted((name, id(x)) for name, x in vars(owner).items() if type(x) in CALLED)


def _classes(module: types.ModuleType) -> str:
    """The methods of the classes of a package of torch's, by identity."""
    inside = [
        x
        for name, x in sorted(sys.modules.items())
        if name.startswith(module.__name__) and x is not None
    ]
    classes = {
        c
        for x in inside
        for c in vars(x).values()
        if isinstance(c, type) and c.__module__.startswith(module.__name__)
    }
    members = [(c.__module__, c.__qualname__, _members(c)) for c in classes]
    return digest(sorted(members))


def _functions(*names: str) -> str:
    """The functions of modules of torch's, by identity."""
    return digest(
        [
            (name, key, id(x))
            for name in names
            for key, x in sorted(vars(sys.modules[name]).items())
            if isinstance(x, (types.FunctionType, type))
        ]
    )


def _dynamo_registries() -> Any:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    sets = (
        trace_rules._allowed_callable_ids,
        trace_rules._disallowed_callable_ids,
        trace_rules._polyfilled_function_ids,
    )
    return (
        [digest(sorted(ids.function_ids or ())) for ids in sets],
        len(PolyfilledFunctionVariable._get_polyfill_handlers()),
        len(VariableBuilder._id_dispatch()),
        digest([str(x) for x in trace_rules.get_torch_obj_rule_map()]),
    )


def _dispatcher() -> Any:
    names = sorted(torch._C._dispatch_get_all_op_names())
    mine = [n for n in names if not n.startswith(OURS + "::")]
    looked = ("aten::view", "aten::add.Tensor", "aten::linalg_cross", "bystander::power")
    return (
        len(mine),
        digest(mine),
        [digest(torch._C._dispatch_dump(n)) for n in looked],
        digest(sorted(x for x in torch.library._impls if not x.startswith(OURS))),
    )


def _fake_kernels() -> Any:
    from torch._subclasses import fake_impls

    known = fake_impls.op_implementations_dict
    return len(known), digest(sorted(str(op) for op in known))


def _lowerings() -> Any:
    from torch._inductor.lowering import lowerings

    return sorted(str(op) for op in lowerings if OURS not in str(op))


def _configs() -> Any:
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    known = [m.get_config_copy() for m in (dynamo, inductor, functorch)]
    return [digest(sorted((k, str(v)) for k, v in c.items())) for c in known]


def _loggers() -> Any:
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    known = [x for x in known if isinstance(x, logging.Logger)]
    return sorted(
        (x.name, x.level, x.disabled, len(x.handlers))
        for x in known
        if x.name.startswith(("root", "torch")) and (x.level or x.disabled or x.handlers)
    )


def _filters() -> Any:
    known = logging.Logger.manager.loggerDict.items()
    return sorted(name for name, x in known if getattr(x, "filters", None))


def _open_files() -> Any:
    """What is open; sockets and pipes by kind, as their numbers change."""
    places = []
    for name in os.listdir("/proc/self/fd"):
        try:
            places.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # the listing itself
    return sorted(p.split(":[")[0] for p in places if not p.startswith("/proc"))


def _random() -> Any:
    states = (torch.get_rng_state().tolist(), random.getstate(), torch.initial_seed())
    return digest(states)


def _distributed() -> Any:
    world = dist.distributed_c10d._world
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator
    return (
        dist.is_initialized(),
        len(world.pg_map),
        len(rules.op_to_rules),
        len(rules.op_strategy_funcs),
        _members(DTensor),
        _members(dist.device_mesh.DeviceMesh),
    )


# Of the process, and the same for every thread while others capture.
SHARED: dict[str, Callable[[], Any]] = {
    "configs": _configs,
    "excepthook": lambda: (id(sys.excepthook), id(threading.excepthook)),
    "warnings.filters": lambda: repr(warnings.filters),
    "environment": lambda: digest(sorted(os.environ.items())),
    "threads": lambda: sorted(
        x.name for x in threading.enumerate() if not x.name.startswith("bystander")
    ),
    "logging": _loggers,
    "random state": _random,
    "lowerings": _lowerings,
    "signals": lambda: [str(signal.getsignal(s)) for s in (2, 15)],
    "defaults": lambda: (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        sys.getrecursionlimit(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mha._is_fastpath_enabled,
        torch._dynamo.eval_frame._stance.stance,
    ),
    "pytree": lambda: len(torch.utils._pytree.SUPPORTED_NODES),
}

# Of the process, and changed while a capture is at work: what stands there then asks for whom.
AFTERWARDS: dict[str, Callable[[], Any]] = {
    "Dynamo's registries": _dynamo_registries,
    "Dynamo's classes": lambda: _classes(torch._dynamo),
    "Dynamo's functions": lambda: _functions(
        "torch._dynamo.trace_rules", "torch._dynamo.eval_frame", "torch._dynamo.variables.builder"
    ),
    "functorch": lambda: _functions("torch._functorch.eager_transforms", "torch._functorch.apis"),
    "autograd": lambda: (
        _functions("torch.autograd.function", "torch.utils.checkpoint"),
        _functions("torch.nn.modules.module", "torch.backends.mha"),
    ),
    "dispatcher": _dispatcher,
    "calls of ops": lambda: [
        id(kind.__call__) for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    ],
    "fake kernels": _fake_kernels,
    "fake tensors": lambda: _classes(sys.modules["torch._subclasses.fake_tensor"]),
    "torch.distributed": _distributed,
    "torch.distributed's functions": lambda: _functions("torch.distributed"),
    "filters of logs": _filters,
    "garbage collection": gc.isenabled,
    "open files": _open_files,
    "fx's notes": lambda: (
        torch.fx.traceback.has_preserved_node_meta(),
        sorted(torch.fx.traceback.get_current_meta()),
    ),
}
