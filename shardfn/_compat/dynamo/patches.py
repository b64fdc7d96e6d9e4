"""The changes of Dynamo while it reads a captured function: rows of `patches.PATCHES`."""

from __future__ import annotations

from .. import dispatch, loops
from ..patching import NEVER, OBJECT, Patch, methods
from ..settings import of_captures
from . import generators, guards, reading, refused, restored, sizes, spared, steps, tree_functions
from .dtensors import calls, closed_over, objects

VARIABLES = "torch._dynamo.variables:"
HIGHER_ORDER = "torch._dynamo.variables.higher_order_ops:"
BUILDER = "torch._dynamo.variables.builder:"
REFUSED = "a captured function may not do this: an error by name, in place of a wrong program"

READING = (  # a captured function, by Dynamo
    *spared.PATCHES,
    Patch(
        ("torch._dynamo.trace_rules:is_callable_allowed",),
        "our own ops stay one op in the graph; allow_in_graph is for good",
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
        methods(VARIABLES + "PolyfilledFunctionVariable", "_get_polyfill_handlers"),
        "what it reads in their place",
        NEVER,
        new=reading.substitutes,
        takes="substitutes",
    ),
    Patch(
        (BUILDER + "wrap_to_fake_tensor_and_record",),
        "a view that is closed over, or a result of autograd, becomes a fake of another mode; "
        "a tensor on the meta device stands for one on the device of the program",
        NEVER,
        new=reading.faked,
        takes="device",
    ),
    Patch(
        (BUILDER + "make_dupe_guard",),
        "an object that a global and a closure variable lead to has a guard for one of them",
        "later than 2.13",
        new=reading.guarded_twice,
    ),
    Patch(
        methods(VARIABLES + "UserFunctionVariable", "get_source"),
        "what a function without a source closes over is taken for new: changes of it are lost",
        "later than 2.15",
        new=guards.found_again,
    ),
    Patch(
        methods(VARIABLES + "SliceVariable", "__init__"),
        "it takes the number out of a tensor, as of the step of a loop, and so does x[t]",
        NEVER,
        new=steps.sliced,
    ),
    Patch(
        methods(VARIABLES + "BuiltinVariable", "call_function"),
        "the same: it reads ours",
        NEVER,
        new=steps.selected,
        takes="steps",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "method___setitem__"),
        "the same: it reads ours",
        NEVER,
        new=steps.written,
        takes="steps",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_method"),
        "the same, of select and narrow: it reads ours",
        NEVER,
        new=steps.narrowed,
        takes="steps",
    ),
    Patch(
        ("torch._dynamo.variables.functions:invoke_and_store_as_constant",),
        "type(x) of a number that a function of ours returns asks for a guard that cannot be made",
        "later than 2.15",
        new=guards.without_source,
        optional=True,
    ),
    Patch(
        methods("torch.fx.experimental.symbolic_shapes:ShapeEnv", "_get_sloc"),
        "a condition on sizes is said to come from a line of ours",
        NEVER,
        new=sizes.place_noted,
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "var_getattr", "call_method", "unpack_var_sequence"),
        "it answers with a shape from before squeeze_, t_ and their kin",
        "later than 2.13",
        new=reading.fresh,
    ),
    Patch(
        ("torch._dynamo.utils:run_node",),
        "the error of a call on fake tensors becomes a text, also where it is ours",
        "later than 2.15",
        new=reading.own_error_raised,
    ),
    Patch(
        methods(
            "torch._dynamo.symbolic_convert:InstructionTranslatorBase",
            "_attach_traceback_to_exception",
        ),
        "an error of a builtin inside of a `with`, as in a derivative, loses the user's line",
        "later than 2.15",
        new=reading.raised_here,
        optional=True,
    ),
    Patch(
        methods("torch._dynamo.side_effects:SideEffects", "is_modified"),
        "what has its own items again counts as changed, as of functional_call",
        NEVER,
        new=restored.is_changed,
        takes="memo",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_method"),
        "it leaves out random_, whose ATen name is a word of Python's",
        "later than 2.13",
        new=reading.random_in_place,
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_method"),
        "torch.func refuses requires_grad_, and Dynamo that of arguments: it begins to be followed",
        NEVER,
        new=reading.grad_required,
    ),
    Patch(
        methods(VARIABLES + "TorchInGraphFunctionVariable", "call_function"),
        "it refuses to make a tensor that is followed; which inputs a gradient uses shows in its "
        "graph alone",
        NEVER,
        new=reading.torch_called,
    ),
    Patch(
        ("torch._dynamo.variables.builtin:SetAttrBuiltinVariable._call_setattr",),
        "it refuses x.requires_grad = True",
        NEVER,
        new=reading.flag_set,
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "AutogradFunctionVariable", "call_apply"),
        "under torch.func it looks inside, where the function's own derivatives count",
        "later than 2.13",
        new=reading.intact,
        takes="functions_read",
    ),
    Patch(
        ("torch._dynamo.variables.distributed:BackwardHookVariable.create",),
        "modules with full backward hooks need compiled autograd",
        "later than 2.13",
        new=dispatch.hooks_read,
        takes="hooked",
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "TorchInGraphFunctionVariable", "call_function"),
        "the number of the rank that traces is taken for every rank's; " + REFUSED,
        NEVER,
        new=refused.rank_call_refused,
    ),
    Patch(
        (
            f"{OBJECT}.call_method",
            "torch._dynamo.variables.distributed:DeviceMeshVariable.call_method",
        ),
        "the same, asked of a mesh or of a group",
        NEVER,
        new=refused.rank_method_refused,
        optional=True,
    ),
    Patch(
        (
            VARIABLES + "TorchInGraphFunctionVariable.call_function",
            VARIABLES + "UserFunctionVariable.call_function",
            VARIABLES + "UserMethodVariable.call_function",
            VARIABLES + "SkipFunctionVariable.call_function",
            VARIABLES + "UserDefinedClassVariable.call_function",
            BUILDER + "TensorSubclassVariable.call_function",
        ),
        "a call of DTensor: it reads ours; another one that makes a DTensor or communicates; "
        + REFUSED,
        NEVER,
        new=calls.function_called,
        takes="dtensors",
    ),
    Patch(
        methods(HIGHER_ORDER + "CheckpointHigherOrderVariable", "_call_function"),
        "torch.utils.checkpoint becomes an op of a graph, whose results hide how DTensors are "
        "placed and which are none: it reads ours",
        NEVER,
        new=calls.function_called,
        takes="dtensors",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_method"),
        "a generator of random numbers given to a method, a cast to a class of tensors; " + REFUSED,
        NEVER,
        new=refused.method_refused,
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
        ("torch._dynamo.variables.functions:CollectiveFunctionRewriteVariable.call_function",),
        "a collective of torch.distributed: it reads ours; " + REFUSED,
        NEVER,
        new=calls.collective_called,
        takes="dtensors",
    ),
    Patch(
        methods(VARIABLES + "UserFunctionVariable", "call_function"),
        "it reads hundreds of bytecodes a leaf in functions of trees, which may run as they are",
        NEVER,
        new=tree_functions.run_as_it_is,
    ),
    Patch(
        methods("torch._dynamo.variables.misc:ContextVarVariable", "_get_value"),
        "the value of a context variable is that of the capture; " + REFUSED,
        NEVER,
        new=refused.context_refused,
        optional=True,
    ),
    Patch(
        methods(BUILDER + "VariableBuilder", "wrap_tensor"),
        "a tensor of a class of its own; " + REFUSED,
        NEVER,
        new=refused.class_refused,
    ),
    Patch(
        methods(BUILDER + "VariableBuilder", "wrap_tensor"),
        "it refuses a dual number, which the capture refuses by its name",
        NEVER,
        new=reading.dual_wrapped,
    ),
    Patch(
        methods(BUILDER + "VariableBuilder", "wrap_tensor"),
        "a DTensor that the function closes over, as a global tensor",
        NEVER,
        new=closed_over.closed_over,
        takes="dtensors",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_method"),
        "a method of DTensor, of a global tensor",
        NEVER,
        new=calls.method_called,
        takes="dtensors",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "var_getattr"),
        "an attribute of DTensor, of a global tensor",
        NEVER,
        new=calls.attribute_read,
        takes="dtensors",
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "lookup_tp_getset_member"),
        "the class of a DTensor, which torch 2.15 reads from a table",
        NEVER,
        new=calls.declared_member,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "TensorVariable", "call_obj_hasattr"),
        "the same, asked for by hasattr",
        NEVER,
        new=calls.has_attribute,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "BuiltinVariable", "call_type"),
        "the class of a global tensor that the code takes for a DTensor",
        NEVER,
        new=calls.class_of,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "BuiltinVariable", "call_isinstance"),
        "a global tensor that the code takes for a DTensor",
        NEVER,
        new=calls.is_instance,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        ("torch._dynamo.output_graph:SubgraphTracer.create_node",),
        "an op of a DTensor and a plain tensor; " + REFUSED,
        NEVER,
        new=calls.node_created,
        takes="dtensors",
    ),
    Patch(
        (
            f"{OBJECT}.call_method",
            "torch._dynamo.variables.distributed:DeviceMeshVariable.call_method",
        ),
        "a question for the rank, asked of a mesh: the answer is a tensor",
        NEVER,
        new=objects.method_called,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        methods(OBJECT, "var_getattr"),
        "methods of a mesh that Dynamo has no rows for, and its ranks inside of a derivative",
        NEVER,
        new=objects.attribute_read,
        takes="dtensors",
        optional=True,
    ),
    Patch(
        methods(OBJECT, "call_obj_hasattr"),
        "Dynamo asks the stand-in of a mesh or a group",
        NEVER,
        new=objects.has_attribute,
        optional=True,
    ),
    Patch(
        methods(OBJECT, "repr_impl"),
        "the text is that of the stand-in of a mesh or a group",
        NEVER,
        new=objects.text_of,
        optional=True,
    ),
    Patch(
        methods(VARIABLES + "BuiltinVariable", "call_str"),
        "the same, of str",
        NEVER,
        new=objects.str_of,
        optional=True,
    ),
    Patch(
        methods("torch._dynamo.symbolic_convert:InstructionTranslatorBase", "setup_or_before_with"),
        "a mesh that is entered inside: it is the current one there",
        NEVER,
        new=objects.context_entered,
        takes="dtensors",
    ),
    Patch(
        methods("torch._higher_order_ops.flex_attention:FlexAttentionHOP", "__call__"),
        "flex attention under torch.func is refused; by its formula it is not",
        "later than 2.13",
        new=loops.differentiable_flex,
    ),
    Patch(
        ("torch._higher_order_ops.utils:_collect_fake_inputs",),
        "flex attention asks it for tensors, and it knows none that torch.func follows",
        "later than 2.15",
        new=loops.fake_inputs,
        optional=True,
    ),
    Patch(
        ("torch._dynamo._trace_wrapped_higher_order_op:mod_index",),
        "what its score function reads has no derivative under torch.func",
        "later than 2.13",
        new=loops.differentiable_index,
        optional=True,
    ),
    Patch(
        ("settings of torch._dynamo.config and others",),
        "shapes stay numbers, what a function stores is left out, and the user's are for "
        "torch.compile",
        NEVER,
        enter=of_captures,
    ),
)
