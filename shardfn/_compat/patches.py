"""Every change that shardfn makes to torch: the place, the reason, and the torch version that
ends it. Each is entered for a capture or a compilation, affects the capturing thread only, and
is undone afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import dispatch, known_sizes, modules, threads, tracing, zeros
from .distributed import checkpoints, every_rank
from .dynamo import generators, reading, tree_functions
from .patching import Patch, enter

NEVER = "not known to end"


def _methods(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


@contextlib.contextmanager
def _inductor_order() -> Iterator[None]:
    """Inductor's settings for a compilation. They are per thread (torch 2.13)."""
    from torch._inductor import config

    wanted = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    known = {name: x for name, x in wanted.items() if hasattr(config, name)}
    with config.patch(known):
        yield


VARIABLES = "torch._dynamo.variables:"
BUILDER = "torch._dynamo.variables.builder:"
REFUSED = "a captured function may not do this: an error by name, in place of a wrong program"

READING = (  # a captured function, by Dynamo
    Patch(
        ("torch._dynamo.trace_rules:is_callable_allowed",),
        "our own ops stay whole in the graph; allow_in_graph is for good",
        NEVER,
        new=reading.kept_in_graph,
    ),
    Patch(
        ("torch._dynamo.trace_rules:is_polyfilled_callable",),
        "Dynamo cannot read these functions: it reads ours; substitute_in_graph is for good",
        NEVER,
        new=reading.is_substituted,
        takes="substitutes",
    ),
    Patch(
        _methods(
            VARIABLES + "PolyfilledFunctionVariable", "_get_polyfill_handlers"
        ),
        "what it reads in their place",
        NEVER,
        new=reading.substitutes,
        takes="substitutes",
    ),
    Patch(
        (BUILDER + "wrap_to_fake_tensor_and_record",),
        "a view that is closed over, or a result of autograd, becomes a fake of another mode",
        "later than 2.13",
        new=reading.faked,
    ),
    Patch(
        _methods(
            VARIABLES + "TensorVariable",
            "var_getattr",
            "call_method",
            "unpack_var_sequence",
        ),
        "it answers with a shape from before squeeze_, t_ and their kin",
        "later than 2.13",
        new=reading.fresh,
    ),
    Patch(
        _methods(VARIABLES + "TensorVariable", "call_method"),
        "it leaves out random_, whose ATen name is a word of Python's",
        "later than 2.13",
        new=reading.random_in_place,
    ),
    Patch(
        _methods(VARIABLES + "AutogradFunctionVariable", "call_apply"),
        "under torch.func it looks inside, where the function's own derivatives count",
        "later than 2.13",
        new=reading.intact,
    ),
    Patch(
        _methods(VARIABLES + "TorchInGraphFunctionVariable", "call_function"),
        "the number of the rank that traces is taken for every rank's; " + REFUSED,
        NEVER,
        new=reading.refused_rank_call,
    ),
    Patch(
        (
            "torch._dynamo.variables.script_object:TorchScriptObjectVariable.call_method",
            "torch._dynamo.variables.distributed:DeviceMeshVariable.call_method",
        ),
        "the same, asked of a mesh or of a group",
        NEVER,
        new=reading.refused_rank_method,
        optional=True,
    ),
    Patch(
        (
            VARIABLES + "TorchInGraphFunctionVariable.call_function",
            VARIABLES + "UserFunctionVariable.call_function",
            VARIABLES + "SkipFunctionVariable.call_function",
            VARIABLES + "UserDefinedClassVariable.call_function",
            BUILDER + "TensorSubclassVariable.call_function",
        ),
        "a call that makes a DTensor or communicates; " + REFUSED,
        NEVER,
        new=reading.refused_call,
    ),
    Patch(
        _methods(VARIABLES + "TensorVariable", "call_method"),
        "a generator of random numbers given to a method; " + REFUSED,
        NEVER,
        new=generators.refused_generator,
    ),
    Patch(
        (
            "torch._dynamo.variables.user_defined:call_random_fn",
            "torch._dynamo.variables.misc:call_random_fn",
        ),
        "Python's random, which Dynamo calls while it reads; " + REFUSED,
        NEVER,
        new=generators.refused_random,
    ),
    Patch(
        (
            "torch._dynamo.variables.functions:"
            "CollectiveFunctionRewriteVariable.call_function",
        ),
        "a collective of torch.distributed; " + REFUSED,
        NEVER,
        new=reading.refused_collective,
    ),
    Patch(
        _methods(VARIABLES + "UserFunctionVariable", "call_function"),
        "it reads hundreds of bytecodes a leaf in functions of trees, which may run as they are",
        NEVER,
        new=tree_functions.run_as_it_is,
    ),
    Patch(
        _methods(VARIABLES + "TensorVariable", "method_as_subclass"),
        "a cast to a class of tensors; " + REFUSED,
        NEVER,
        new=reading.refused_cast,
    ),
    Patch(
        _methods(BUILDER + "VariableBuilder", "wrap_tensor"),
        "a tensor of a class of its own; " + REFUSED,
        NEVER,
        new=reading.refused_class,
    ),
    Patch(
        ("three settings of torch._dynamo.config",),
        "shapes stay numbers, and what a function stores is no part of it",
        NEVER,
        enter=reading.reading_settings,
    ),
)

TRACING = (  # the graph that Dynamo read, by make_fx
    Patch(
        ("torch._subclasses.fake_tensor:FakeTensorMode.dispatch",),
        "zeros that stand for no tangent: numbers added to them, and strides of theirs",
        "later than 2.13",
        new=zeros.zeros_dispatched,
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
        ("the user's hooks on saved tensors, of this thread",),
        "a capture saves none, and torch.func refuses to work under them",
        NEVER,
        enter=tracing.without_saved_hooks,
    ),
    Patch(
        (
            "torch.fx.traceback.has_preserved_node_meta",
            "torch.fx.traceback.set_current_meta",
        ),
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

MODULE = (  # a module that Dynamo does not trace
    Patch(
        ("torch.backends.mha:get_fastpath_enabled",),
        "attention has a fused kernel for inference, which has no derivative",
        NEVER,
        new=lambda enabled: False,
        is_mine=reading.is_reading,
    ),
    Patch(
        ("torch.compiler:is_compiling",),
        "code that is written to be compiled branches on values where this is False",
        NEVER,
        new=lambda asked: True,
        is_mine=reading.is_reading,
    ),
    Patch(
        ("torch._dynamo.eval_frame:_callback_from_stance",),
        "what is compiled inside is part of the module; set_stance is the process's",
        NEVER,
        new=lambda chosen, callback: None,
        is_mine=reading.is_reading,
    ),
    Patch(
        ("torch._dynamo.config.error_on_nested_fx_trace, of this thread",),
        "the same",
        NEVER,
        enter=modules.nested_traces_allowed,
    ),
    Patch(
        (
            "torch.distributed:get_rank",
            *_methods(
                "torch.distributed.device_mesh:DeviceMesh", *sorted(reading.RANK)
            ),
        ),
        "a program is for every rank",
        NEVER,
        new=modules.rank_asked,
        takes="asked",
        is_mine=reading.is_reading,
        optional=True,
    ),
    Patch(
        ("torch.utils.checkpoint:_checkpoint_without_reentrant_generator",),
        "it fails under torch.func",
        "later than 2.15",
        new=lambda around, generator, *args, **kwargs: (
            modules.checkpointed_generator(around)
        ),
        takes="checkpointed",
        is_mine=reading.is_reading,
    ),
    Patch(
        ("torch.utils.checkpoint:CheckpointFunction.apply",),
        "the same",
        "later than 2.15",
        new=modules.checkpointed_call,
        takes="checkpointed",
        is_mine=reading.is_reading,
    ),
    Patch(
        (
            "torch.distributed.tensor:DTensor.__init__",
            "torch.distributed.tensor:DTensor.from_local",
        ),
        "a module makes no DTensor",
        NEVER,
        new=modules.dtensor_made,
        takes="making",
        is_mine=reading.is_reading,
    ),
)

PATCHES: dict[str, tuple[Patch, ...]] = {
    "capture": (*READING, *TRACING, SIZES),
    "fakes": (SIZES,),
    "module": MODULE,
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
    ),
    "simulated world": (  # all ranks in one process
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
            ),
            "the sizes of a shard depend on the rank",
            NEVER,
            new=lambda on_all_ranks, fn, *args, **kwargs: on_all_ranks(
                fn, *args, **kwargs
            ),
            takes="on_all_ranks",
            is_mine=lambda: True,
        ),
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
    "compilation": (
        SIZES,
        Patch(
            ("two settings of torch._inductor.config",),
            "reordering for memory puts every reduction last",
            "later than 2.13",
            enter=_inductor_order,
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
