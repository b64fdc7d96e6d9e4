"""The table of all state of shardfn that outlives a call, and `clear()`, which empties the caches.

All other state is in values, or in objects that a row of the table refers to. tests/test_state.py
checks that each variable of the package that changes after import has a row.

`clear()` drops captures, compiled programs and costs, which can be recomputed. `clear()` keeps
settings of the user (rules, the links of a mesh), the state of running code (worlds, context
variables, patches), and registrations that happen once per process.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


def _clear_each(stores: Iterable[Any]) -> None:
    """Clear each store of a registry."""
    for store in list(stores):  # a copy, since a store may die meanwhile
        store.clear()


Forget = Callable[[Any], Any]
CLEAR: Forget = operator.methodcaller("clear")
CLEAR_CACHE: Forget = operator.methodcaller("cache_clear")
CLEAR_EACH: Forget = _clear_each


class State(NamedTuple):
    """A row: one variable that is written to after import, and how `clear` empties it."""

    module: str  # below shardfn
    name: str
    what: str
    forget: Forget | None = None  # None: `clear()` leaves it


CONTEXTS = (
    State("mesh", "_stack", "the meshes of `use_mesh`, the innermost last"),
    State("capture.aten_trace", "_recording", "the loops and hooks of the capture that runs now"),
    State(
        "capture.shard_map.axis_names",
        "_scope",
        "the mesh and axis names of the enclosing shard_map",
    ),
    State(
        "capture.refusals.leaked_values",
        "_WATCHED",
        "functions that a capture checks for values that they store",
    ),
    State("_compat.threads", "_CAPTURING", "whether this thread captures"),
    State(
        "_compat.compilations.undisturbed",
        "_known",
        "torch's settings when this thread began to compile",
    ),
    State("_compat.dynamo.reading", "_READING", "whether a module runs as part of a capture"),
    State(
        "_compat.dynamo.reading",
        "_USES",
        "for each gradient in a captured function, the inputs on which it depends",
    ),
    State("_compat.dynamo.lazy", "_MADE", "modules whose parameters a capture has made"),
    State("_compat.dynamo.sizes", "_NOTED", "inputs and guards of Dynamo's current trace"),
    State(
        "_compat.dynamo.spared",
        "_SPARED",
        "whether FX graphs search node arguments for symbolic sizes",
    ),
    State("_compat.modules", "_HOOKED", "whether a class of shardfn replaces torch's BackwardHook"),
    State("_compat.block_calls", "_BODIES", "the repeated blocks of the program being compiled"),
    State(
        "compile.repeats.calls",
        "_KINDS",
        "the kinds of repeated blocks in the program being compiled",
    ),
    State("_compat.loops", "_IN_BODY", "whether a loop body is being traced"),
    State("_compat.fakes.known_sizes", "_KNOWN", "whether shardfn's fake kernels are in use"),
    State("_compat.distributed.every_rank", "_INSIDE", "whether torch runs for all ranks"),
    State("ops.debug", "_rank", "the simulated rank that runs now"),
    State(
        "ops.debug",
        "_constant_calls",
        "debug calls with constant arguments only, which run when a capture ends",
    ),
    State("random.ambient", "_source", "the source of torch's random calls"),
    State("random.ambient", "_tag", "the name of the random state in use"),
)

REGISTRIES = (
    State("world", "_entered", "the fake world that the process is in"),
    State("extensions", "_rooms", "which subpackage implements an extension point"),
    State("extensions", "_services", "the implementations of extension points"),
    State("world", "_real", "the world of the process group"),
    State(
        "ops.messages",
        "_pair",
        "a process group for each direction between two pipeline stages (not on Gloo)",
    ),
    State("world", "_groups", "how many times a world has created process groups"),
    State("jobs.beside", "_watches", "the watchdog of each world"),
    State("jobs.beside", "_connections", "sockets of process groups"),
    State("mesh", "_known_meshes", "axes, links and world of each live mesh"),
    State("partition.rule_api.registry", "_rules", "sharding rules of users"),
    State(
        "compile.loops",
        "_compiled",
        "compiled loops, by number, while a program that calls them exists",
    ),
    State("stored.folder", "_warned", "cache problems that were already reported once"),
    State("ops.debug", "_objects", "functions that debug ops call, by number"),
    State("_compat.inductor", "_effects", "shardfn's ops with side effects"),
    State("ops.prims", "PRIMS", "the primitives of per-rank code, by op"),
    State(
        "ops.prims", "CALLS", "the primitives of per-rank code, by the function that a user calls"
    ),
    State("collectives", "COLLECTIVES", "the kinds of collectives, by name"),
    State("collectives", "STEPS", "the name of the collective for each step of a redistribution"),
    State("random.used", "_lines", "where keys were used, under SHARDFN_CHECK=1"),
    State("random.ambient", "state", "the user's random states, by name"),
    State("_compat.inductor", "_formulas", "ops that Inductor writes as formulas"),
    State(
        "_compat.distributed.every_rank",
        "_one_thread",
        "a lock: one thread at a time runs torch on the tensors of all simulated ranks",
    ),
    State(
        "_compat.dynamo.reading",
        "_one_thread",
        "a lock: one thread at a time runs a function again without torch.compile",
    ),
    State("_compat.cpp_kernels.folder", "_kernel_folder", "users of the kernel folder"),
    State("_compat.native.library", "_loaded", "C++ functions of the call path"),
    State("_compat.threads", "_replaced", "attributes of torch that are currently replaced"),
)

# A function carries its own store, as `_shardfn_kept`.
CACHES = (
    State("runtime.cache", "_stores", "captures and ready calls", CLEAR_EACH),
    State("runtime.cache", "_alive", "caches of functions that cannot hold their own cache", CLEAR),
    State("runtime.cache", "_prepared", "steps that the simulator runs", CLEAR),
    State("runtime.cache", "_families", "programs compiled for many sizes", CLEAR),
    State("runtime.cache", "counts", "captures, partitions, compilations", CLEAR),
    State("partition.plan_cache", "_known", "plans of programs", CLEAR_EACH),
    State("partition.propagation.strategy_units", "extended", "placements", CLEAR_CACHE),
    State("partition.redistribute", "_route", "the cheapest routes", CLEAR_CACHE),
    State("schedule.check", "sends", "the ops that communicate", CLEAR_CACHE),
    State("capture.rewrites.decompositions", "table", "decompositions", CLEAR_CACHE),
    State("capture.rewrites.foreach", "table", "torch._foreach ops", CLEAR_CACHE),
    State("_compat.fakes.answers", "_ANSWERS", "results of fake tensors", CLEAR),
    State("_compat.cpp_kernels.units", "_kernels", "compiled C++ kernels", CLEAR),
    State("compile.text.ops", "_name_of_op", "names of ops that files may call", CLEAR_CACHE),
    State("compile.once", "_runners", "compiled programs in use, by key", CLEAR),
    State("capture.checkpoint.torch_policies", "_contexts", "context_fns of checkpoint", CLEAR),
    State("capture.checkpoint.policies", "read", "policies, by text", CLEAR_CACHE),
    State("capture.modules.submodule_paths", "_relative_path", "paths of modules", CLEAR_CACHE),
    State("errors", "is_ours", "whether a file belongs to shardfn", CLEAR_CACHE),
)

ONCE = (
    State(
        "_compat.patching",
        "takes_calls",
        "whether a replacement fits the signature of torch's function",
    ),
    State(
        "_compat.patches",
        "require_places",
        "groups of patches whose attributes all exist in the installed torch",
    ),
    State("_compat.versions", "require_known", "whether shardfn supports the installed torch"),
    State("_compat.tracing", "core_decompositions", "torch's decompositions"),
    State("_compat.distributed.groups", "_unreduced_class", "a class over torch's"),
    State("_compat.distributed.groups", "_gone_class", "a class over torch's"),
    State("_compat.dynamo.reading", "_handler", "functions that Dynamo traces in place of others"),
    State("_compat.dynamo.shown", "_text_method", "Dynamo's class for methods of texts"),
    State("_compat.cpp_kernels.units", "_processor", "the processor's instruction sets"),
    State(
        "_compat.compilations.environment",
        "_fixed",
        "versions of torch and of other packages, and a description of the machine",
    ),
    State("_compat.compilations.caches", "_changed", "contexts of torch's settings"),
    State(
        "compile.native",
        "_loading",
        "whether shardfn's C++ functions for calls are loaded, or are being loaded",
    ),
    State(
        "compile.ahead",
        "_preparation",
        "whether the C++ header of kernels is precompiled, or is being precompiled",
    ),
    State("_compat.inductor", "_after_class", "a class over torch's"),
    State("_compat.inductor", "_lower_collective", "lowerings of shardfn's collectives"),
    State("_compat.block_calls", "_call_class", "Inductor's IR class for calls of repeated blocks"),
    State("_compat.inductor", "_effect_class", "Inductor's IR class for calls whose order is kept"),
    State(
        "_compat.inductor",
        "_register_lowerings",
        "whether the Inductor lowerings of two ops of shardfn, pack and formula, are registered",
    ),
    State("_compat.fakes.zeros", "_warn_of_overrides", "torch's warning about overridden kernels"),
)

NUMBERS = (
    State(
        "_compat.compilations.undisturbed",
        "_changes",
        "number of changes that other threads made to torch's settings",
    ),
    State(
        "_compat.compilations.garbage",
        "_pauses",
        "number of objects created since the last garbage collection, and whether the user has "
        "frozen objects",
    ),
    State("world", "_exchanges", "how often the ranks of each group have exchanged strings"),
    State("jobs.rendezvous", "_joins", "number of jobs that this process has joined"),
    State("ops.debug", "_numbers", "the next free number for a function that a debug op calls"),
    State("capture.annotations", "_numbers", "the next free number for a checkpointed call"),
    State("compile.loops", "_numbers", "the next free number for a compiled loop"),
    State(
        "runtime.warmup.switch",
        "_numbers",
        "the next number for the switch of a program from warmup to compiled code",
    ),
)

AT_WORK = (
    State("progress", "_door", "lock for the thread that shows a progress line"),
    State("progress", "_own", "the progress line of a thread"),
    State("world", "_door", "lock for entering or leaving a world"),
    State("jobs.beside", "_door", "lock for starting a watchdog"),
    State("training.checkpoints.save", "_running", "running background saves, by folder"),
    State("runtime.cache", "_writing", "lock for writing to a cache"),
    State("runtime.cache", "_taken", "donated arguments of the calls that run now"),
    State("_compat.threads", "_table", "lock for replacing an attribute of torch"),
)

STATE = (*CONTEXTS, *REGISTRIES, *CACHES, *ONCE, *NUMBERS, *AT_WORK)


def clear() -> None:
    """Drop all captures and compiled programs. The next call captures and compiles again."""
    for row in STATE:
        module = sys.modules.get(f"shardfn.{row.module}")
        if row.forget is not None and module is not None:
            row.forget(getattr(module, row.name))
