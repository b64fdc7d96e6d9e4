"""The table of every change that shardfn makes to torch: the places, the reason, what ends it,
and what is lost in a torch without the place. Each is entered for a while, as for a capture or a
compilation, affects the thread that enters it only, and is undone afterwards.

A row is one reason. `patched` enters the rows of a stage, in their order: of two replacements of
one function the later row's is asked first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from . import casts, dispatch, loops, modules, patterns, seeds, settings, threads, tracing, versions
from .compilations import caches, reuse
from .cpp_kernels import folder, functions, index_values, instructions, units
from .distributed import (
    checkpoints,
    eager_collectives,
    every_rank,
    fsdp_hooks,
    groups,
    rank_sizes,
    stores,
)
from .dynamo import (
    argument_facts,
    generators,
    guards,
    instance_checks,
    lazy,
    missing_attributes,
    reading,
    refused,
    restored,
    shown,
    sizes,
    spared,
    sparse,
    steps,
    tree_functions,
    under_transforms,
    user_objects,
    value_checks,
)
from .dynamo.dtensors import calls, closed_over, objects
from .fakes import answers, constants, known_sizes, zeros
from .patching import DEGRADE, OR, REFUSE, Patch, each, enter, methods, refuse

VARIABLES = "torch._dynamo.variables:"
BUILDER = "torch._dynamo.variables.builder:"
TRANSLATOR = "torch._dynamo.symbolic_convert:InstructionTranslatorBase"
HIGHER_ORDER = "torch._dynamo.variables.higher_order_ops:"
LOCAL_MAP = f"{HIGHER_ORDER}LocalMapWrappedHigherOrderVariable"
DECOMPOSITIONS = "torch._decomp.decompositions:"
FAKES = "torch._subclasses.fake_tensor:"
CPP = "torch._inductor.codegen.cpp:"
WRAPPER = "torch._inductor.codegen.wrapper:PythonWrapperCodegen"
TENSORS = "torch.distributed.tensor:"
# methods of Dynamo's stand-ins for tensors, meshes and groups: before torch 2.15, and from it on
TENSOR_ATTRIBUTE = OR.join(methods(VARIABLES + "TensorVariable", "var_getattr", "tp_getattro_impl"))
OBJECT = "torch._dynamo.variables.script_object:TorchScriptObjectVariable"
CUSTOM = "torch._dynamo.variables.script_object:CustomClassObjectVariable"
OBJECT_CALL = f"{OBJECT}.call_method{OR}{CUSTOM}.call_method"
OBJECT_HAS = f"{OBJECT}.call_obj_hasattr{OR}{CUSTOM}.call_obj_hasattr"
OBJECT_TEXT = f"{OBJECT}.repr_impl{OR}{CUSTOM}.tp_repr_impl"
OBJECT_ATTRIBUTE = f"{OBJECT}.var_getattr{OR}{CUSTOM}.tp_getattro_impl"


@contextlib.contextmanager
def _inductor_settings() -> Iterator[None]:
    """Turn off Inductor's reordering for locality, and its store of compiled graphs, during a
    compilation. Inductor's settings are per thread (torch 2.13).
    """
    from torch._inductor import config

    with caches.settings(config, reorder_for_locality=False, fx_graph_cache=False):
        yield


def _others_checked(checked: frozenset[int], original: Any, wrapper: Any) -> None:
    """Patch codegen_input_size_asserts: write layout checks into generated code only for the
    inputs that the caller does not check.
    """
    inputs = wrapper.get_graph_inputs().items()
    others = dict(row for k, row in enumerate(inputs) if k not in checked)
    wrapper.get_graph_inputs = lambda: others
    try:
        original(wrapper)
    finally:
        del wrapper.get_graph_inputs


def _always() -> bool:
    """Apply a patch to the calls of every thread."""
    return True


GRAPHS = Patch(
    what="FX steps that shardfn skips: writing a graph's code, and searching node arguments",
    why="torch generates Python code for each FX graph, and searches each node's arguments for "
    "symbolic sizes",
    lost="without shardfn's patch, captures are a fifth slower, and lowering and compilation are "
    "slightly slower",
    on_missing=DEGRADE,
    calls={"torch.fx._lazy_graph_module:_LazyGraphModule.force_recompile": spared.left_unwritten},
    enter=spared.of_graphs,
    places=("torch.fx._lazy_graph_module:_use_lazy_graph_module", "torch.fx.graph:pytree"),
)

READING = (  # a captured function, by Dynamo
    GRAPHS,
    Patch(
        what="shardfn's own ops in Dynamo's graph",
        why="Dynamo traces into shardfn's ops, and torch's allow_in_graph cannot be undone",
        lost="without shardfn's patch, Dynamo traces the Python code inside shardfn's ops",
        calls={"torch._dynamo.trace_rules:is_callable_allowed": reading.kept_in_graph},
    ),
    Patch(
        what="Python functions that Dynamo cannot read",
        why="Dynamo cannot trace some Python functions and methods of texts, and torch's "
        "substitute_in_graph cannot be undone; it reads a descriptor in place of the "
        "value of a class, and compares keys by identity (torch 2.13)",
        lost="without shardfn's patch, a capture fails on inspect.signature, on optree's functions "
        "and on similar functions, and class properties and keys with an `__eq__` are not those "
        "of Python",
        calls={
            "torch._dynamo.trace_rules:is_polyfilled_callable": reading.is_substituted,
            VARIABLES + "PolyfilledFunctionVariable._get_polyfill_handlers": reading.substitutes,
            VARIABLES + "GetAttrVariable.call_method": reading.text_called,
            VARIABLES
            + "UserDefinedClassVariable.resolve_cls_descriptor": user_objects.class_described,
            "torch._dynamo.variables.hashable:HashableTracker.__eq__": user_objects.keys_compared,
            f"{TRANSLATOR}._load_attr": missing_attributes.attribute_loaded,
            "torch._dynamo.variables.builtin:GetAttrBuiltinVariable._call_getattr": (
                missing_attributes.attribute_asked
            ),
            VARIABLES + "BuiltinVariable.call_isinstance": instance_checks.instance_checked,
        },
        takes="substitutes",
    ),
    Patch(
        what="parameters of lazy modules",
        why="a lazy module makes its parameters in its first call: in a capture they would be "
        "fake tensors",
        lost="without shardfn's patch, a lazy module keeps fake tensors as its parameters",
        calls={
            "torch.nn.modules.lazy:LazyModuleMixin._infer_parameters": lazy.parameters_made,
            BUILDER + "VariableBuilder._wrap": lazy.shape_read,
        },
    ),
    Patch(
        what="tensors that a function closes over",
        why="Dynamo creates the fake tensor of a closed-over view or autograd result under another "
        "FakeTensorMode, and keeps a meta tensor on the meta device",
        lost="without shardfn's patch, a capture confuses closed-over views with other tensors",
        calls={BUILDER + "wrap_to_fake_tensor_and_record": reading.faked},
        takes="device",
    ),
    Patch(
        what="guards on what a function reads besides its arguments",
        why="if a function reads one object by two names, Dynamo guards only one of the names; "
        "if a function has no Dynamo source, Dynamo sets no guards on the values of its closure; "
        "Dynamo confuses the globals of two files that are not in sys.modules",
        lost="without shardfn's patch, shardfn does not notice a later change of a value that the "
        "function reads",
        until="later than 2.15",
        calls={
            BUILDER + "make_dupe_guard": reading.guarded_twice,
            VARIABLES + "UserFunctionVariable.get_source": guards.found_again,
            "torch._dynamo.variables.functions:invoke_and_store_as_constant": guards.without_source,
            "torch._dynamo.symbolic_convert:InliningInstructionTranslator."
            "get_globals_source_and_value": guards.globals_of,
        },
    ),
    Patch(
        what="Dynamo's guards that notice replaced code and changed objects",
        why="Dynamo does not notice that a function's code was replaced, treats a restored object "
        "as changed (functional_call restores one), and reports a change without its attribute or "
        "key",
        lost="without shardfn's patch, a call runs the old program after the function's code was "
        "replaced",
        calls={
            VARIABLES + "UserFunctionVariable.bind_args": guards.code_noted,
            f"{TRANSLATOR}._attach_traceback_to_exception": guards.exception_noted,
            "torch._dynamo.side_effects:SideEffects.is_modified": restored.is_changed,
            "torch._dynamo.output_graph:OutputGraph.get_replayed_side_effect_source_refs": (
                refused.side_effects_listed
            ),
        },
        takes="memo",
    ),
    Patch(
        what="ops that read values, under torch.func",
        why="under torch.func some ops read tensor values; shardfn's versions of these ops do not",
        lost="without shardfn's patch, a capture of a derivative fails on indexing by a mask and "
        "on similar ops",
        until="later than 2.15",
        calls={
            VARIABLES + "TorchInGraphFunctionVariable.call_function": (
                under_transforms.function_called
            ),
            VARIABLES + "TensorVariable.call_method": under_transforms.method_called,
            VARIABLES + "TensorVariable.method___setitem__": under_transforms.written,
        },
        takes="under_transforms",
    ),
    Patch(
        what="indexing by the step number of a loop",
        why="in x[t], select and narrow, Dynamo converts the step tensor t to a Python number",
        lost="without shardfn's patch, a capture fails on x[t], where t is the step number of a "
        "loop",
        calls={
            VARIABLES + "SliceVariable.__init__": steps.sliced,
            VARIABLES + "BuiltinVariable.call_function": steps.selected,
            VARIABLES + "TensorVariable.method___setitem__": steps.written,
            VARIABLES + "TensorVariable.call_method": steps.narrowed,
        },
        takes="steps",
    ),
    Patch(
        what="in-place methods of tensors",
        why="Dynamo reports the shape from before squeeze_ or t_, drops random_, and reads flags, "
        "attributes and identity from fake tensors in place of the arguments",
        lost="without shardfn's patch, a shape that is read after squeeze_ is the old shape, "
        "x.random_() draws nothing, and x.requires_grad of an argument x is False",
        until="later than 2.13",
        calls={
            TENSOR_ATTRIBUTE: reading.fresh,
            VARIABLES + "TensorVariable.unpack_var_sequence": reading.fresh,
            VARIABLES + "TensorVariable.call_method": reading.fresh_or_random,
            VARIABLES + "BuiltinVariable.call_function": argument_facts.identified,
            VARIABLES + "TensorVariable.hash_impl": argument_facts.hashed,
            VARIABLES + "BuiltinVariable._comparison_with_tensor": argument_facts.compared,
        },
    ),
    Patch(
        what="argument names and source lines in errors",
        why="Dynamo turns errors of fake tensors into text, loses the line of an error inside a "
        "`with`, shows shardfn's line for a condition on sizes, and refuses a dual number "
        "without naming it",
        lost="without shardfn's patch, some errors name neither the argument nor the user's source "
        "line",
        until="later than 2.15",
        on_missing=DEGRADE,
        calls={
            "torch.fx.experimental.symbolic_shapes:ShapeEnv._get_sloc": sizes.place_noted,
            "torch._dynamo.utils:run_node": reading.own_error_raised,
            f"{TRANSLATOR}._attach_traceback_to_exception": reading.raised_here,
            BUILDER + "VariableBuilder.wrap_tensor": reading.dual_wrapped,
        },
    ),
    Patch(
        what="print, breakpoint and loggers in a captured function",
        why="print and loggers would run once, at capture, and show fake tensors",
        lost="without shardfn's patch, print shows the fake tensors of the trace",
        calls={
            VARIABLES + "BuiltinVariable.call_function": shown.builtin_called,
            f"{TRANSLATOR}._load_attr": shown.method_loaded,
            "torch._dynamo.variables.misc:LoggingLoggerVariable.call_method": shown.logger_called,
        },
    ),
    Patch(
        what="requires_grad inside of a function",
        why="Dynamo and torch.func refuse requires_grad_, x.requires_grad = True and "
        "requires_grad=True of a new tensor; shardfn finds in Dynamo's graph on which inputs "
        "of torch.autograd.grad its outputs depend",
        lost="without shardfn's patch, a capture fails on code that calls torch.autograd.grad",
        calls={
            VARIABLES + "TensorVariable.call_method": reading.grad_required,
            VARIABLES + "TorchInGraphFunctionVariable.call_function": reading.torch_called,
            "torch._dynamo.variables.builtin:SetAttrBuiltinVariable._call_setattr": (
                reading.flag_set
            ),
        },
    ),
    Patch(
        what="autograd.Functions that Dynamo reads",
        why="under torch.func Dynamo traces into the forward and ignores the Function's own "
        "backward",
        lost="without shardfn's patch, the derivative of an autograd.Function is computed from its "
        "forward, not by its backward",
        until="later than 2.13",
        calls={VARIABLES + "AutogradFunctionVariable.call_apply": reading.intact},
        takes="functions_read",
    ),
    Patch(
        what="backward hooks that Dynamo reads",
        why="Dynamo needs compiled autograd for modules with full backward hooks",
        lost="without shardfn's patch, a capture fails on modules with full backward hooks",
        until="later than 2.13",
        calls={
            "torch._dynamo.variables.distributed:BackwardHookVariable.create": (
                dispatch.hooks_in_graph
            )
        },
        takes="hooked",
    ),
    Patch(
        what="rank queries, random generators and context variables",
        why="Dynamo turns the rank's number, generators, context variables and random numbers of "
        "Python and NumPy into constants of the program",
        lost="without shardfn's patch, the rank number and random numbers silently become "
        "constants of the program",
        calls={
            VARIABLES + "TorchInGraphFunctionVariable.call_function": refused.rank_call_refused,
            OBJECT_CALL: refused.rank_method_refused,
            VARIABLES + "TensorVariable.call_method": refused.method_refused,
            "torch._dynamo.variables.user_defined:call_random_fn": generators.refused_random,
            "torch._dynamo.variables.misc:call_random_fn": generators.refused_random,
            VARIABLES + "NumpyVariable.call_function": generators.numpy_called,
            "torch._dynamo.variables.misc:ContextVarVariable._get_value": refused.context_refused,
            BUILDER + "VariableBuilder.wrap_tensor": refused.class_refused,
        },
    ),
    Patch(
        what="checks of torch.distributions",
        why="the checks branch on the values of a distribution's parameters and samples",
        lost="without shardfn's patch, a capture fails on a distribution with validate_args",
        calls={
            **each(
                value_checks.function_passed,
                VARIABLES + "TorchInGraphFunctionVariable.call_function",
                VARIABLES + "SkipFunctionVariable.call_function",
            ),
            VARIABLES + "TensorVariable.call_method": value_checks.method_passed,
        },
    ),
    Patch(
        what="functions of trees",
        why="Dynamo traces hundreds of bytecodes per leaf in pytree functions that could run "
        "directly",
        lost="without shardfn's patch, captures of large trees are slower",
        on_missing=DEGRADE,
        calls={VARIABLES + "UserFunctionVariable.call_function": tree_functions.run_as_it_is},
    ),
    Patch(
        what="DTensors, meshes and groups in Dynamo",
        why="Dynamo traces DTensors, collectives and meshes for the one rank that captures; "
        "shardfn traces global tensors and its three primitives",
        lost="without shardfn's patch, Dynamo traces code with DTensors by torch's own rules, for "
        "one rank only",
        calls={
            **each(
                calls.function_called,
                VARIABLES + "TorchInGraphFunctionVariable.call_function",
                VARIABLES + "UserFunctionVariable.call_function",
                VARIABLES + "UserMethodVariable.call_function",
                VARIABLES + "SkipFunctionVariable.call_function",
                VARIABLES + "UserDefinedClassVariable.call_function",
                BUILDER + "TensorSubclassVariable.call_function",
                HIGHER_ORDER + "CheckpointHigherOrderVariable._call_function",
            ),
            "torch._dynamo.variables.functions:CollectiveFunctionRewriteVariable.call_function": (
                calls.collective_called
            ),
            BUILDER + "VariableBuilder.wrap_tensor": closed_over.closed_over,
            VARIABLES + "TensorVariable.call_method": calls.method_called,
            TENSOR_ATTRIBUTE: calls.attribute_read,
            VARIABLES + "TensorVariable.lookup_tp_getset_member": calls.declared_member,
            VARIABLES + "TensorVariable.call_obj_hasattr": calls.has_attribute,
            VARIABLES + "BuiltinVariable.call_type": calls.class_of,
            VARIABLES + "BuiltinVariable.call_isinstance": calls.is_instance,
            "torch._dynamo.output_graph:SubgraphTracer.create_node": calls.node_created,
            OBJECT_CALL: objects.method_called,
            OBJECT_ATTRIBUTE: objects.attribute_read,
            OBJECT_HAS: objects.has_attribute,
            OBJECT_TEXT: objects.text_of,
            VARIABLES + "BuiltinVariable.call_str": objects.str_of,
            f"{TRANSLATOR}.setup_or_before_with": objects.context_entered,
        },
        takes="dtensors",
    ),
    Patch(
        what="sparse tensors in Dynamo",
        why="Dynamo refuses sparse tensors; shardfn traces the dense tensors that they store",
        lost="without shardfn's patch, a capture fails on a function that closes over a sparse "
        "tensor",
        calls={
            BUILDER + "VariableBuilder.wrap_tensor": sparse.closed_over,
            VARIABLES + "TorchInGraphFunctionVariable.call_function": sparse.function_called,
            VARIABLES + "BuiltinVariable.call_function": sparse.operator_called,
            VARIABLES + "TensorVariable.call_method": sparse.method_called,
            VARIABLES + "BuiltinVariable.call_isinstance": sparse.is_instance,
        },
        takes="sparse",
    ),
    Patch(
        what="flex attention under torch.func",
        why="torch.func refuses flex attention and gives no derivative to tensors that its score "
        "function reads",
        lost="without shardfn's patch, a capture of the derivative of flex attention fails",
        until="later than 2.15",
        calls={
            "torch._higher_order_ops.flex_attention:FlexAttentionHOP.__call__": (
                loops.differentiable_flex
            ),
            "torch._higher_order_ops.utils:_collect_fake_inputs": loops.fake_inputs,
            "torch._dynamo._trace_wrapped_higher_order_op:mod_index": loops.differentiable_index,
        },
    ),
    Patch(
        what="settings of Dynamo for a capture",
        why="a capture needs static shapes and must not replay side effects, and the user's "
        "settings are meant for torch.compile",
        lost="without shardfn's patch, a capture depends on the user's settings of torch.compile",
        enter=settings.of_captures,
        places=("torch._dynamo.config:patch", "torch._functorch.config:patch"),
        takes="is_dynamic",
    ),
)

TRACING = (  # the graph that Dynamo read, by make_fx
    Patch(
        what="torch's caches of fake tensors and of code",
        why="both caches grow with each captured program without bound",
        lost="without shardfn's patch, the memory of a process that captures for days grows "
        "without bound",
        on_missing=DEGRADE,
        enter=caches.bounded,
        places=(FAKES + "FakeTensorMode.cache", "torch.fx.graph_module:_loader"),
    ),
    Patch(
        what="zero tensors that stand for missing tangents",
        why="torch's zero tensors give wrong sums, strides and views, or real tensors in place of "
        "fake ones",
        lost="without shardfn's patch, forward-mode derivatives fail, or have the wrong strides",
        until="later than 2.13",
        calls={FAKES + "FakeTensorMode.dispatch": zeros.zeros_dispatched},
        enter=zeros.zeros_kept_fake,
        places=("torch.library:Library.impl",),
    ),
    Patch(
        what="custom ops with register_autograd",
        why="register_autograd's function has no setup_context, so torch.func refuses the op",
        lost="without shardfn's patch, custom ops have no derivative",
        until="later than 2.13",
        calls=each(
            lambda derive, *args, **kwargs: derive(*args, **kwargs),
            "torch._ops:OpOverload.__call__",
            "torch._ops:OpOverloadPacket.__call__",
        ),
        takes="custom_ops",
    ),
    Patch(
        what="autograd.Functions whose forward takes the context",
        why="torch.func refuses an autograd.Function whose forward takes ctx",
        lost="without shardfn's patch, a capture of the derivative of an autograd.Function fails "
        "if the forward takes ctx",
        calls={"torch.autograd.function:_is_setup_context_defined": dispatch.context_split},
        enter=dispatch.context_split_in_c,  # where `apply` is C code, as from torch 2.15 on
        places=("torch.autograd.function:_bind_default_args",),
    ),
    Patch(
        what="autograd.Functions under make_fx",
        why="make_fx runs an autograd.Function in a form that torch.func does not accept",
        lost="without shardfn's patch, a capture of the derivative of an autograd.Function fails",
        calls={"torch.autograd.function:custom_function_call": dispatch.run_rewritten},
        takes="functions",
    ),
    Patch(
        what="LSTMs and RNNs",
        why="MKL-DNN's LSTM has no derivative under torch.func, and torch's decomposition drops "
        "the dropout between layers and does not know the lengths of packed sequences",
        lost="without shardfn's patch, an RNN runs without its dropout, and does not accept packed "
        "sequences",
        until="later than 2.13",
        calls={
            DECOMPOSITIONS + "select_one_layer_lstm_function": modules.layer_of_lstm,
            DECOMPOSITIONS + "_rnn_helper": modules.layers_of_rnn,
        },
        enter=functools.partial(modules.short_constants_known, reading.is_reading),
        places=modules.PLACES_OF_LIMIT,
    ),
    Patch(
        what="the user's hooks on saved tensors",
        why="a capture saves no tensors, and torch.func refuses to run under hooks on saved "
        "tensors",
        lost="without shardfn's patch, a capture inside saved_tensors_hooks fails",
        enter=tracing.without_saved_hooks,
        places=tuple(
            f"torch:_C._autograd.{name}_saved_tensors_default_hooks"
            for name in ("_top", "_push", "_pop")
        ),
    ),
    Patch(
        what="annotations on nodes of FX graphs",
        why="torch keeps the annotations of nodes for the whole process, not for one thread",
        lost="without shardfn's patch, graphs of other threads get the annotations of a capture",
        enter=tracing.metadata_per_thread,
        places=(
            "torch.fx.traceback:has_preserved_node_meta",
            "torch.fx.traceback:set_current_meta",
        ),
    ),
    Patch(
        what="torch's log messages about fake tensors",
        why="torch logs the failure that shardfn's error then reports",
        lost="without shardfn's patch, torch logs some errors a second time",
        on_missing=DEGRADE,
        enter=tracing.quiet,
        places=(FAKES + "FakeTensor",),
    ),
)

SIZES = Patch(
    what="result sizes that depend only on arguments, or on known values",
    why="torch treats some result sizes as data-dependent, keeps the known values of a tensor only "
    "if it has one element, refuses shifts of bools, and gives x[i.T] the strides of i, so a view "
    "of the result becomes a copy",
    lost="without shardfn's patch, a capture fails on some ops, or treats a copy as a view",
    until="later than 2.13",
    calls={
        "torch._meta_registrations:meta_index_Tensor": known_sizes.indexed,
        FAKES + "FakeTensorMode.may_turn_const": constants.may_be_constant,
        "torch._meta_registrations:shift_dtype_check": known_sizes.shift_checked,
    },
    enter=known_sizes.sizes_known,
    places=("torch._subclasses.fake_impls:op_implementations_dict",),
    is_mine=known_sizes.is_known,
)
ANSWERS = Patch(
    what="cached results of ops on fake tensors",
    why="computing torch's cache key takes four times as long as computing the result",
    lost="without shardfn's patch, captures take half as long again",
    on_missing=DEGRADE,
    calls={FAKES + "FakeTensorMode._cached_dispatch_impl": answers.remembered},
    is_mine=known_sizes.is_known,
)

# while Python that Dynamo does not trace runs in a capture
CHECKPOINTED = Patch(
    what="torch.utils.checkpoint in modules",
    why="torch.utils.checkpoint fails under torch.func",
    lost="without shardfn's patch, a capture fails on modules that call torch.utils.checkpoint",
    until="later than 2.15",
    calls={
        **each(
            lambda around, generator, *args, **kwargs: modules.checkpointed_generator(around),
            "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
            "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",
        ),
        "torch.utils.checkpoint:CheckpointFunction.apply": modules.checkpointed_call,
    },
    takes="checkpointed",
    is_mine=reading.is_reading,
)

PRINTS = Patch(
    what="print, breakpoint, warnings and loggers in captured modules and autograd.Functions",
    why="print and loggers would run once, at capture, and show fake tensors",
    lost="without shardfn's patch, print in a module or an autograd.Function shows the fake "
    "tensors of the trace",
    calls={
        **{place: functools.partial(shown.run_called, fn) for place, fn in shown.OF_PYTHON.items()},
        "logging:Logger._log": shown.run_logged,
    },
    is_mine=reading.is_reading,
)

MODULE = (  # while a module runs that Dynamo does not trace
    PRINTS,
    Patch(
        what="code that asks whether it is compiled",
        why="in eager mode, modules use fused kernels without a derivative and branch on tensor "
        "values; a torch.compile inside a module is part of the capture",
        lost="without shardfn's patch, a captured module takes the branches of its code that are "
        "meant for eager mode",
        calls={
            "torch.backends.mha:get_fastpath_enabled": lambda enabled: False,
            "torch.compiler:is_compiling": lambda asked: True,
            "torch._dynamo.eval_frame:_callback_from_stance": lambda chosen, callback: None,
            "torch.nn.attention.flex_attention:_validate_device": lambda check, *given: None,
        },
        enter=modules.nested_traces_allowed,
        places=("torch._dynamo.config:error_on_nested_fx_trace",),
        is_mine=reading.is_reading,
    ),
    Patch(
        what="code of torch that reads numbers from tensors",
        why="Adafactor converts norms to Python numbers, a batch norm without a momentum its count "
        "of batches, and nn.TransformerEncoder(mask=...) whether its mask is causal",
        lost="without shardfn's patch, a capture of Adafactor, of BatchNorm1d(n, momentum=None) or "
        "of nn.TransformerEncoder(mask=...) fails",
        calls={
            "torch.optim._adafactor:_single_tensor_adafactor": modules.with_numbers_as_tensors,
            "torch.nn.modules.batchnorm:_BatchNorm.forward": modules.batch_norm_run,
            "torch.nn.modules.batchnorm:SyncBatchNorm.forward": modules.sync_batch_norm_run,
            "torch.nn.modules.transformer:_detect_is_causal_mask": modules.causal_mask_run,
            "torch.nn.modules.transformer:TransformerEncoder.forward": modules.encoder_run,
        },
        is_mine=reading.is_reading,
    ),
    Patch(
        what="rank queries in a module",
        why="one program runs on every rank, so it cannot contain one rank's number",
        lost="without shardfn's patch, the rank number of one rank becomes a constant of the "
        "program",
        calls=each(
            modules.rank_asked,
            "torch.distributed:get_rank",
            *methods("torch.distributed.device_mesh:DeviceMesh", *sorted(refused.RANK - {"rank"})),
        ),
        takes="asked",
        is_mine=reading.is_reading,
    ),
    CHECKPOINTED,
    Patch(
        what="DTensors that a module makes",
        why="the captured program computes on global tensors",
        lost="without shardfn's patch, a module that makes a DTensor wraps a fake tensor",
        calls=each(modules.dtensor_made, *methods(TENSORS + "DTensor", "__init__", "from_local")),
        takes="making",
        is_mine=reading.is_reading,
    ),
)

INITIALISATION = (
    Patch(
        what="torch.nn.init.trunc_normal_",
        why="trunc_normal_ draws again until all numbers are in range, which depends on values",
        lost="without shardfn's patch, sf.init fails on a module that calls trunc_normal_",
        enter=dispatch.init_replaced,
        places=("torch.nn.init:_no_grad_trunc_normal_",),
        takes="truncated_normal",
    ),
    Patch(
        what="Module.to of fake parameters",
        why="Module.to swaps tensors, which fails for fake tensors because their mode refers to "
        "them",
        lost="without shardfn's patch, sf.init fails on a module that calls its own .to",
        until="later than 2.13",
        calls={"torch.nn.modules.module:Module._apply": modules.applied},
        is_mine=_always,
    ),
)

# a world of one process: torch's constructors of DTensors, and its collectives
PLACING: tuple[Patch, ...] = (
    Patch(
        what="DTensor's constructor in a fake world",
        why="torch calls DTensor's constructor with the local tensor of one rank",
        lost="without shardfn's patch, a DTensor in a fake world has the values of one rank only",
        enter=every_rank.constructor_replaced,
        places=(TENSORS + "DTensor.__new__",),
        takes="made",
    ),
    Patch(
        what="shards in a fake world",
        why="a shard and its size depend on the rank, but torch makes the shard of only one rank",
        lost="without shardfn's patch, a fake world has the shards of one rank only",
        calls=each(
            lambda on_all_ranks, fn, *args, **kwargs: on_all_ranks(fn, *args, **kwargs),
            TENSORS + "Shard._make_shard_tensor",
            TENSORS + "Replicate._make_replicate_tensor",
            "torch.distributed.tensor.placement_types:_StridedShard._make_shard_tensor",
            "torch.distributed.tensor._api:_dtensor_init_helper",
            "torch.distributed.tensor._api:redistribute_local_tensor",  # from_local's derivative
        ),
        takes="on_all_ranks",
        is_mine=_always,
    ),
    Patch(
        what="strides that differ between ranks",
        why="a DTensorSpec with strides that differ by rank has no hash",
        lost="without shardfn's patch, ops on uneven DTensors in a fake world fail",
        calls={"torch.distributed.tensor._api:compute_global_tensor_info": rank_sizes.global_sizes},
        is_mine=every_rank.runs_on_all_ranks,
    ),
    Patch(
        what="collectives in a fake world",
        why="torch's fake process group returns the tensors of one rank",
        lost="without shardfn's patch, collectives in a fake world return the values of one rank",
        enter=eager_collectives.kernels_replaced,
        places=("torch.library:Library.impl",),
        takes="communicated",
    ),
)

LOADING = (
    Patch(
        what="C++ kernels",
        why="Inductor compiles one file per kernel, and the time goes mostly into one shared "
        "header",
        lost="without shardfn's patch, a first compilation takes several times as long as with the "
        "patch",
        on_missing=DEGRADE,
        enter=units.kernels_joined,
        places=methods("torch._inductor.async_compile:AsyncCompile", "cpp_pybinding", "wait"),
    ),
    Patch(
        what="the folder where Inductor caches compiled kernels",
        why="torch caches kernels in a folder of /tmp that another user may read or may have "
        "created",
        lost="without shardfn's patch, compiled kernels stay in torch's folder",
        on_missing=DEGRADE,
        enter=folder.private_kernel_folder,
    ),
    Patch(
        what="the processor's instruction sets",
        why="Inductor builds and loads a test program for each instruction set, which takes eight "
        "seconds",
        lost="without shardfn's patch, the first compilation on a machine takes eight seconds "
        "longer",
        on_missing=DEGRADE,
        enter=instructions.quick_instruction_check,
        places=("torch._inductor.cpu_vec_isa:VecISA.check_build",),
    ),
)

COMPILATION = (
    SIZES,
    ANSWERS,
    *LOADING,
    Patch(
        what="values of compiled code",
        why="Inductor's formulas lose digits near zero or overflow, Inductor drops casts of an "
        "arange, casts to 16 bits and sums with zeros, and a NaN constant is an error",
        lost="without shardfn's patch, compiled erf, expm1, acosh, atanh, casts and signs of zero "
        "differ from the results of eager torch",
        calls={
            **{f"{functions.VECTORS}.{x}": functions.vector_formula(x) for x in functions.FORMULAS},
            "torch._inductor.index_propagation:IndexPropagation.propagate_sympy": (
                index_values.exact_propagation
            ),
            "torch._inductor.codegen.cpp:CppKernel.cache_dtype_convert": casts.unrounded_forgotten,
            "torch._inductor.lowering:to_dtype": casts.rounding,
            "torch._inductor.fx_passes.joint_graph:remove_no_ops": casts.sums_kept,
        },
        is_mine=_always,
    ),
    Patch(
        what="the order and the sizes of compiled kernels",
        why="a fused kernel may run before a scatter whose result the kernel reads, Inductor's "
        "reordering for locality and peak memory moves every reduction to the end, and Inductor's "
        "store of compiled graphs loses the sizes for which code with symbols is right",
        lost="without shardfn's patch, compiled code may lose the gradient of an embedding, does "
        "not overlap communication with compute, and pools of dynamic sizes may be wrong",
        until="later than 2.13",
        calls={
            "torch._inductor.memory:reorder_for_peak_memory": reuse.order_kept,
            "torch._inductor.scheduler:SchedulerNode.recompute_size_and_body": (reuse.writers_kept),
        },
        enter=_inductor_settings,
        places=(
            "torch._inductor.config:reorder_for_locality",
            "torch._inductor.config:fx_graph_cache",
        ),
        is_mine=_always,
    ),
    Patch(
        what="updates in place",
        why="Inductor treats an op that overwrites an argument as a reader of all values computed "
        "from the argument",
        lost="without shardfn's patch, compiled steps take more memory",
        until="later than 2.13",
        on_missing=DEGRADE,
        calls={
            "torch._inductor.scheduler:BaseSchedulerNode.decide_inplace_update": (
                reuse.in_place_decided
            )
        },
        is_mine=_always,
    ),
    Patch(
        what="checks of compiled code",
        why="compiled code checks the layout of each input, which takes a third of a microsecond "
        "per call",
        lost="without shardfn's patch, compiled calls take longer",
        on_missing=DEGRADE,
        calls={f"{WRAPPER}.codegen_input_size_asserts": _others_checked},
        takes="checked",
        is_mine=_always,
    ),
)

PATCHES: dict[str, tuple[Patch, ...]] = {
    "capture": (*READING, *TRACING, SIZES, ANSWERS),
    "fakes": (SIZES, ANSWERS),
    "graphs": (GRAPHS,),  # lowering and compilation
    "symbols": (  # Dynamo, where sizes are symbols
        Patch(
            what="F.linear of symbolic sizes",
            why="under torch.func, torch's kernel of F.linear converts symbolic sizes to Python "
            "numbers",
            lost="without shardfn's patch, derivatives of linear layers make dynamic sizes static",
            until="later than 2.13",
            enter=sizes.linear_written_out,
            places=("torch.ops:aten.linear.default",),
        ),
    ),
    "module": MODULE,
    "functions": (PRINTS,),  # while a method of an autograd.Function runs
    "again": (PRINTS, CHECKPOINTED),  # while Python runs to find an error
    "backward hooks": (
        Patch(
            what="backward hooks of modules",
            why="torch.func fails on modules with backward hooks",
            lost="without shardfn's patch, a capture fails on modules with backward hooks",
            until="later than 2.15",
            enter=modules.hooked_by,
            places=("torch.nn.modules.module:BackwardHook",),
            takes="hook",
        ),
    ),
    "initialisation": INITIALISATION,
    "new world": (
        Patch(
            what="Dynamo's rules with new process groups",
            why="Dynamo rebuilds its trace rules each time a process group is created",
            lost="without shardfn's patch, a fake world takes longer to make",
            on_missing=DEGRADE,
            enter=groups.rules_kept,
            places=("torch._dynamo.trace_rules:clear_lru_cache",),
        ),
    ),
    "new groups": (
        Patch(
            what="the timeout of a mesh's process groups",
            why="torch accepts no timeout for the process groups of a mesh with several axes",
            lost="without shardfn's patch, the process groups of a mesh have torch's default "
            "timeout",
            on_missing=DEGRADE,
            enter=stores.groups_time_out,
            places=("torch.distributed.distributed_c10d:_get_default_timeout",),
            takes="seconds",
        ),
    ),
    "world of shapes": PLACING,  # one process, without values
    "simulated world": (  # all ranks in one process
        *PLACING,
        Patch(
            what="fully_shard in a fake world",
            why="fully_shard makes the shards of one rank and sets up collectives between "
            "processes",
            lost="without shardfn's patch, fully_shard in a fake world trains the shards of one "
            "rank only",
            calls={
                f"{every_rank.FSDP}:FSDPParam._init_sharded_param": every_rank.fully_sharded,
                **fsdp_hooks.CALLS,
            },
            takes="fully_sharded",
            is_mine=_always,
        ),
        Patch(
            what="plans of torch.distributed.checkpoint",
            why="in a fake world one process saves the shards of all ranks, so it must not wait "
            "for other processes",
            lost="without shardfn's patch, checkpoints of DTensors in a fake world wait for other "
            "processes",
            enter=checkpoints.plans_of_one_process,
            places=("torch.distributed.checkpoint.utils:_DistWrapper",),
            if_imported=True,
        ),
    ),
    "dual level": (
        Patch(
            what="levels of dual numbers",
            why="torch counts levels of dual numbers for the whole process, and a compiled graph "
            "enters a level that torch does not count",
            lost="without shardfn's patch, sf.jvp inside a compiled backward fails",
            until="later than 2.13",
            enter=tracing.dual_level_counted,
            places=(
                "torch._functorch.eager_transforms:JVP_NESTING",
                "torch.autograd.forward_ad:_current_level",
            ),
        ),
    ),
    "plain": (
        Patch(
            what="torch.utils.checkpoint under sf.random.plain",
            why="torch.utils.checkpoint restores torch's generators, but sf.random.plain draws "
            "from other generators",
            lost="without shardfn's patch, a recomputation draws different random numbers",
            enter=seeds.checkpoints_wrapped,
            places=(seeds.REENTRANT, seeds.GENERATOR),
            takes="redrawing",
        ),
    ),
    "loading": LOADING,
    "patterns": (
        Patch(
            what="patterns of Inductor",
            why="Inductor's patterns ignore the dims of a softmax and of a permutation, and take "
            "out a cast to fewer bits that another cast follows",
            lost="without shardfn's patch, compiled attention may apply its softmax along the "
            "wrong dim, and `x.bfloat16().half()` has the digits of `x.half()`",
            until="later than 2.13",
            enter=patterns.constants_compared,
            places=(
                "torch._inductor.config:emulate_precision_casts",
                "torch._inductor.fx_passes.joint_graph:lazy_init",
                "torch._inductor.fx_passes.joint_graph:pass_patterns",
            ),
        ),
    ),
    "compilation": COMPILATION,
}

# Permanent registrations, each under a name of shardfn's: (what, why).
STAYS = (
    ("ops of torch.ops.shardfn", "captured programs consist of these ops"),
    (
        "Inductor's lowerings of these ops",
        "shardfn registers the lowerings at the first compilation",
    ),
    ("process groups named shardfn", "a program looks up its process group by name"),
    (
        "c10's warning that a kernel is overridden",
        "torch shows the warning once per process; the first capture triggers and suppresses it",
    ),
)


@contextlib.contextmanager
def patched(stage: str, **given: Any) -> Iterator[None]:
    """Enter the patches of a stage, such as "capture", in this thread.

    Args:
        stage: a key of PATCHES.
        given: the arguments of rows that take one, by name. Rows given None are left out.

    Raises:
        TorchVersionError: this torch is not known, or lacks a place that keeps programs right.
    """
    with contextlib.ExitStack() as stack:
        if stage == "capture":
            versions.require_known()
            stack.enter_context(threads.capturing())
        require_places(stage)
        for row in PATCHES[stage]:
            if row.takes is None:
                enter(row, (), stack)
            elif given[row.takes] is not None:
                enter(row, (given[row.takes],), stack)
        yield


@functools.cache
def require_places(stage: str) -> None:
    """Check once that torch has all places that a stage patches. The first capture checks every
    stage whose modules of torch have been imported.

    Raises:
        TorchVersionError: a place is gone, or takes other arguments, that keeps programs right.
    """
    rows = rows_of_all() if stage == "capture" else PATCHES[stage]
    looked_at = [row for row in rows if row.is_imported() or _is_entered(row, stage)]
    needed = [row for row in looked_at if row.on_missing == REFUSE]
    refuse([(row, place) for row in needed for place in row.missing()])


def rows_of_all() -> list[Patch]:
    """List every patch of the table once, over all stages."""
    return list(dict.fromkeys(row for rows in PATCHES.values() for row in rows))


def degraded() -> list[str]:
    """List the places that the running torch lacks where programs stay right, with what is lost:
    a line each.
    """
    rows = [row for row in rows_of_all() if row.on_missing == DEGRADE and row.is_imported()]
    return [f"{place} ({row.lost})" for row in rows for place in row.missing()]


def _is_entered(row: Patch, stage: str) -> bool:
    """Check whether a stage enters a patch without waiting for the user's import."""
    return row in PATCHES[stage] and not row.if_imported
