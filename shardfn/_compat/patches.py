"""Every change that shardfn makes to torch: the place, the reason, and the torch version that
ends it. Each is entered for a capture or a compilation, affects the capturing thread only, and
is undone afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import dispatch, modules, patterns, threads, tracing
from .compilations import caches, reuse
from .cpp_kernels.patches import KERNELS, RULES, VALUES, WRITTEN
from .distributed import (
    checkpoints,
    eager_collectives,
    every_rank,
    fsdp_hooks,
    groups,
    rank_sizes,
    stores,
    subclasses,
)
from .dynamo import sizes, spared
from .dynamo.patches import READING
from .fakes import answers, known_sizes, zeros
from .patching import NEVER, Patch, enter, methods


@contextlib.contextmanager
def _inductor_order() -> Iterator[None]:
    """Inductor's settings for a compilation. They are per thread (torch 2.13)."""
    from torch._inductor import config

    with caches.settings(config, reorder_for_locality=False):
        yield


def _others_checked(checked: frozenset[int], original: Any, wrapper: Any) -> None:
    """Write the checks of all inputs but those that each call checks."""
    inputs = wrapper.get_graph_inputs().items()
    others = dict(row for k, row in enumerate(inputs) if k not in checked)
    wrapper.get_graph_inputs = lambda: others
    try:
        original(wrapper)
    finally:
        del wrapper.get_graph_inputs


TRACING = (  # the graph that Dynamo read, by make_fx
    Patch(
        ("the answers of fake tensors, the code of graphs: caches of the process",),
        "they grow with each program, and nothing bounds them",
        NEVER,
        enter=caches.bounded,
    ),
    Patch(
        ("torch.fx's modules of graphs, of all threads",),
        "the code of each is written whenever it changes; none is run",
        NEVER,
        enter=spared.code_on_demand,
    ),
    Patch(
        ("torch._subclasses.fake_tensor:FakeTensorMode.dispatch",),
        "zeros that stand for no tangent: numbers added to them, and strides of theirs",
        "later than 2.13",
        new=zeros.zeros_dispatched,
    ),
    Patch(
        ("torch.fx.experimental.proxy_tensor:set_meta",),
        "it writes the metadata of each value a second time, for passes that nothing runs",
        NEVER,
        new=tracing.value_noted,
        optional=True,
    ),
    Patch(
        (f"kernels of {(*zeros.VIEWS, *zeros.ARITHMETIC)} for key {zeros.KEY}",),
        "views of such zeros become real tensors; their arithmetic leaves copies to meta",
        "later than 2.13",
        enter=zeros.zeros_kept_fake,
    ),
    Patch(
        ("torch._ops:OpOverload.__call__", "torch._ops:OpOverloadPacket.__call__"),
        "what register_autograd was given has no setup_context, and torch.func refuses it",
        "later than 2.13",
        new=lambda derive, *args, **kwargs: derive(*args, **kwargs),
        takes="custom_ops",
    ),
    Patch(
        ("torch.autograd.function:_is_setup_context_defined",),
        "torch.func refuses an autograd.Function whose forward takes the context",
        NEVER,
        new=dispatch.context_split,
        optional=True,
    ),
    Patch(
        (
            "torch.autograd.function._SingleLevelFunction.setup_context",
            "torch.autograd.function._bind_default_args",
        ),
        "the same, where `apply` is C code, as from torch 2.15 on",
        NEVER,
        enter=dispatch.context_split_in_c,
    ),
    Patch(
        ("torch.autograd.function:custom_function_call",),
        "it runs one in a form that torch.func takes",
        NEVER,
        new=dispatch.function_called,
        takes="functions",
        optional=True,
    ),
    Patch(
        ("torch._decomp.decompositions:select_one_layer_lstm_function",),
        "the LSTM of MKL-DNN has no derivative that a transform takes",
        NEVER,
        new=modules.layer_of_lstm,
        optional=True,
    ),
    Patch(
        ("torch._decomp.decompositions:_rnn_helper",),
        "it leaves out the dropout between layers",
        "later than 2.13",
        new=modules.layers_of_rnn,
        optional=True,
    ),
    Patch(
        ("the user's hooks on saved tensors, of this thread",),
        "a capture saves none, and torch.func refuses to work under them",
        NEVER,
        enter=tracing.without_saved_hooks,
    ),
    Patch(
        ("torch.fx.traceback.has_preserved_node_meta", "torch.fx.traceback.set_current_meta"),
        "notes on nodes are the process's: other threads' graphs would get them",
        NEVER,
        enter=tracing.notes_kept_apart,
    ),
    Patch(
        ("the log of torch._subclasses.fake_tensor",),
        "it says what an error of ours is about to say",
        NEVER,
        enter=tracing.quiet,
    ),
)

SIZES = Patch(
    (f"fake kernels of {tuple(str(op) for op in known_sizes.TABLE)}",),
    "torch takes their sizes for dependent on values, though the arguments decide them",
    "later than 2.13",
    enter=known_sizes.sizes_known,
)
INDEXED = Patch(
    ("torch._meta_registrations:meta_index_Tensor",),
    "the strides of x[i.T] follow i's, and a view after it is a copy",
    "later than 2.13",
    new=known_sizes.indexed,
    is_mine=known_sizes.is_known,
)

ANSWERS = Patch(
    ("torch._subclasses.fake_tensor:FakeTensorMode._cached_dispatch_impl",),
    "it remembers results by a key that takes four times as long as a result",
    NEVER,
    new=answers.remembered,
    is_mine=known_sizes.is_known,
)

# a world of one process: torch's constructors of DTensors, and its collectives
PLACING: tuple[Patch, ...] = (
    Patch(
        ("torch.distributed.tensor:DTensor.__new__",),
        "it is given the tensor of one rank",
        NEVER,
        enter=every_rank.constructor_replaced,
        takes="made",
    ),
    Patch(
        (
            "torch.distributed.tensor:Shard._make_shard_tensor",
            "torch.distributed.tensor:Replicate._make_replicate_tensor",
            "torch.distributed.tensor.placement_types:_StridedShard._make_shard_tensor",
            "torch.distributed.tensor._api:_dtensor_init_helper",
            # of the derivative of from_local
            "torch.distributed.tensor._api:redistribute_local_tensor",
        ),
        "a shard, and its size, depend on the rank",
        NEVER,
        new=lambda on_all_ranks, fn, *args, **kwargs: on_all_ranks(fn, *args, **kwargs),
        takes="on_all_ranks",
        is_mine=lambda: True,
    ),
    Patch(
        ("torch.distributed.tensor._api:compute_global_tensor_info",),
        "a spec with strides that differ between ranks has no hash",
        NEVER,
        new=rank_sizes.global_sizes,
        is_mine=every_rank.runs_on_all_ranks,
    ),
    Patch(
        (f"kernels of c10d, {eager_collectives.NAMES}, for {eager_collectives.KEYS}",),
        "the fake process group answers with the tensors of one rank",
        NEVER,
        enter=eager_collectives.kernels_replaced,
        takes="communicated",
    ),
)

PATCHES: dict[str, tuple[Patch, ...]] = {
    "capture": (*READING, *TRACING, SIZES, INDEXED, ANSWERS),
    "fakes": (SIZES, INDEXED, ANSWERS),
    "numbers": spared.NUMBERS,
    "symbols": (  # Dynamo, where sizes are symbols
        Patch(
            ("the kernel of aten::linear for torch.func, in Python",),
            "torch's own makes numbers of sizes that are symbols",
            "later than 2.13",
            enter=sizes.linear_written_out,
        ),
    ),
    "module": modules.PATCHES,
    "backward hooks": (
        Patch(
            ("torch.nn.modules.module.BackwardHook",),
            "modules with backward hooks fail under torch.func",
            "later than 2.15",
            enter=modules.hooked_by,
            takes="hook",
        ),
    ),
    "initialisation": (
        Patch(
            ("torch.nn.init:_no_grad_trunc_normal_",),
            "it draws until all numbers fit, which depends on values",
            NEVER,
            enter=dispatch.init_replaced,
            takes="truncated_normal",
        ),
        Patch(
            ("torch.nn.modules.module:Module._apply",),
            "it swaps fake parameters, which fails: their mode refers to them",
            "later than 2.13",
            new=modules.applied,
            is_mine=lambda: True,
        ),
    ),
    "new world": (
        Patch(
            ("torch._dynamo.trace_rules.clear_lru_cache",),
            "every process group has Dynamo make its rules again, in case some are missing",
            NEVER,
            enter=groups.rules_kept,
        ),
    ),
    "new groups": (
        Patch(
            ("torch.distributed.distributed_c10d._get_default_timeout",),
            "the groups of a mesh of several axes take no timeout",
            NEVER,
            enter=stores.groups_time_out,
            takes="seconds",
        ),
    ),
    "world of shapes": PLACING,  # one process, without values
    "simulated world": (  # all ranks in one process
        *PLACING,
        Patch(
            ("the handlers of ops, and the search for a sharding, of torch.distributed.tensor",),
            "C++ code takes a subclass of DTensor for a DTensor",
            "2.12",
            enter=subclasses.subclass_called,
            takes="dispatched",
        ),
        Patch(
            (f"{every_rank.FSDP}:FSDPParam._init_sharded_param",),
            "fully_shard makes the shards of one rank",
            NEVER,
            new=every_rank.fully_sharded,
            takes="sharded",
            is_mine=lambda: True,
            optional=True,
        ),
        Patch(
            methods(f"{every_rank.FSDP}_group:FSDPParamGroup", "unshard"),
            "its collectives run outside of DTensor, and have one rank",
            NEVER,
            new=lambda unsharded, _, group, *args, **kw: unsharded(group),
            takes="unsharded",
            is_mine=lambda: True,
            optional=True,
        ),
        *fsdp_hooks.PATCHES,
        Patch(
            ("torch.distributed.checkpoint.utils._DistWrapper.__init__",),
            "a plan of one process has the shards of all ranks",
            NEVER,
            enter=checkpoints.plans_of_one_process,
        ),
    ),
    "dual level": (
        Patch(
            (
                "torch._functorch.eager_transforms.JVP_NESTING",
                "torch.autograd.forward_ad._current_level",
            ),
            "numbers of the process, as the level itself is: a graph opens one unnoticed",
            "later than 2.13",
            enter=tracing.dual_level_counted,
        ),
    ),
    "loading": KERNELS,
    "patterns": (
        Patch(
            ("the patterns of torch._inductor.fx_passes.fuse_attention",),
            "they ignore dims and sizes: of a softmax, of a permutation",
            "later than 2.13",
            enter=patterns.constants_compared,
        ),
    ),
    "compilation": (
        SIZES,
        ANSWERS,
        *KERNELS,
        RULES,
        *VALUES,
        *WRITTEN,
        Patch(
            ("a setting of torch._inductor.config",),
            "reordering for locality puts every reduction last",
            "later than 2.13",
            enter=_inductor_order,
        ),
        Patch(
            ("torch._inductor.memory:reorder_for_peak_memory",),
            "it puts every reduction last",
            "later than 2.13",
            new=reuse.order_kept,
            is_mine=lambda: True,
        ),
        Patch(
            ("torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_input_size_asserts",),
            "code checks the layout of each input: a third of a microsecond at each call",
            NEVER,
            new=_others_checked,
            takes="checked",
            is_mine=lambda: True,
            optional=True,
        ),
        Patch(
            ("torch._inductor.scheduler:BaseSchedulerNode.decide_inplace_update",),
            "what overwrites an argument counts as a reader of all made of that",
            "later than 2.13",
            new=reuse.in_place_decided,
            is_mine=lambda: True,
        ),
    ),
}

# Permanent registrations, each under a name of shardfn's: (what, why).
STAYS = (
    ("ops of torch.ops.shardfn", "programs are made of them"),
    ("Inductor's lowerings of those", "registered at the first compilation"),
    ("process groups named shardfn", "a program finds its group by name"),
    (
        "c10's warning that a kernel is overridden",
        "torch says it once in a process; the first capture lets it be said unheard",
    ),
)


@contextlib.contextmanager
def patched(stage: str, **given: Any) -> Iterator[None]:
    """Enter the patches of a stage of PATCHES, in this thread.

    Args:
        stage: a key of PATCHES.
        given: the arguments of rows that take one, by name. Rows given None are left out.
    """
    with contextlib.ExitStack() as stack:
        if stage == "capture":
            stack.enter_context(threads.capturing())
        for row in PATCHES[stage]:
            if row.takes is None:
                enter(row, (), stack)
            elif given[row.takes] is not None:
                enter(row, (given[row.takes],), stack)
        yield
