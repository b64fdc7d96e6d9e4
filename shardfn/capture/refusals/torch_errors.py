"""Translates torch's errors during a capture into errors with the user's line, the problem and
a suggestion.
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from ... import _compat
from ...errors import CaptureError, ShardError, call_site, is_ours, is_users, source_at
from . import data_dependent, rank_numbers, tensor_subclasses
from .custom_ops import cause_of_custom_op
from .display_libraries import cause_in_display, is_of_display
from .refused_writes import ALONE, BUFFERS
from .unsupported_calls import GENERATOR, row_of, row_of_attribute, row_of_error

HELD = (
    "the function writes in place to an argument or a closed-over tensor",
    "return a new value; in a module, use register_buffer for state that changes",
)

MODULES = r"\._modules\['(\w+)'\]"  # in Dynamo's name of a submodule

HIGHER_ORDER = "the function uses torch.cond or another higher-order op under a gradient"

UNREAD = "the function cannot be captured as one graph"
OF_VALUES = (
    data_dependent.BRANCH[0],
    data_dependent.NUMBER[0],
    data_dependent.KEY[0],
    ".item()",
    ".tolist()",
    UNREAD,
    "the function raises",
)

SHAPED = "call the module once on an example, which makes its parameters"

DENSE = (
    "sparse=False for the gradient of an embedding; x.to_dense() outside of the function; or pass "
    "indices and values as arguments, and use index_add"
)

DETACHED = (
    "x.detach() of arguments that need no second derivative; for attention, "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)

DEVICES = "tensors on different devices meet in one op"
ONE_DEVICE = (
    "device=x.device for tensors that the function makes; x.to(device) before the call for "
    "arguments"
)

CUSTOM_OP = (
    "the function differentiates a custom op that has no usable derivative",
    "torch.library.custom_op with register_autograd, and arguments that are tensors, not "
    "lists of tensors",
)

NO_DERIVATIVE = DETACHED, CUSTOM_OP[1]  # what errors suggest where torch has none

SHARED = (
    "under vmap, the function writes values that differ between samples to a tensor that all "
    "samples share",
    "write to x.new_zeros(shape) or zeros_like(x) of a tensor x that differs between samples; "
    "or use an op that returns the value",
)

DATA = (
    "the function reads .data of a tensor under a derivative or a vmap",
    "x.detach() in place of x.data",
)
BRANCHES = "Data-dependent branching"
# torch's text -> the problem for the user, and the suggestion.
WRITTEN_ARRAY = (
    "the function writes in place to a NumPy array by np.copyto or np.put",
    "return the new value, or write to a copy: array.copy()",
)
CHANGED_FLAG = (
    "the function changes requires_grad of an argument or a closed-over tensor",
    "x.detach(), or x.detach().requires_grad_(), inside the function; or change the flag before "
    "the call",
)
CAUSES = (
    (
        "_cache_enabled",
        "the function enters torch.nn.utils.parametrize.cached()",
        "enter cached() in the forward of a functionalized module; or read the parameter once: "
        "w = module.weight",
    ),
    (_compat.NO_DERIVATIVE, *CUSTOM_OP),
    ("HigherOrderOperator custom_function_call", *CUSTOM_OP),  # where it takes a list of tensors
    (
        "side effects happened",
        "the function changes an object outside of itself: {places}",
        "return the new value instead of storing it",
    ),
    (BRANCHES, "the function branches on a tensor's value", "torch.where(condition, a, b)"),
    (_compat.MAKES_DTENSOR, tensor_subclasses.DTENSOR, tensor_subclasses.FIX),
    (_compat.WITHOUT_SHAPE, "the function reads a parameter that has no shape yet", SHAPED),
    (
        _compat.WITHOUT_VALUES,
        "a lazy module makes its parameters from the values of its first call's arguments",
        SHAPED,
    ),
    (
        "Tensor subclass Uninitialized",
        "the function makes a module whose parameters have no shape yet",
        "a module with stated sizes: nn.Linear(5, 3) in place of nn.LazyLinear(3)",
    ),
    ("to be on the same device", DEVICES, ONE_DEVICE),
    (
        "Attempted to copy.deepcopy a tensor",
        "the function calls copy.deepcopy on a tensor, or on an object with tensors",
        "x.clone() of a tensor; a deep copy of a module or of an object before the call",
    ),
    ("'dst' must be an array", *WRITTEN_ARRAY),  # np.copyto
    ("'a' must be an array", *WRITTEN_ARRAY),  # np.put
    (
        _compat.ASKS_RANK,
        "the function asks for its rank, and the captured answer would be the same on every rank",
        "sf.axis_index(axis_name) inside shard_map; or mesh.size() for the number of ranks",
    ),
    (
        _compat.COUNTS_BATCHES,
        "the function calls a SyncBatchNorm with momentum=None in a job of several processes, "
        "which uses its count of batches as a Python number",
        "BatchNorm1d(n, momentum=None) under sf.shard, whose batch is that of all ranks",
    ),
    (
        _compat.SYNCS_ON_CPU,
        "the function calls a SyncBatchNorm with tensors on the CPU, which torch does not "
        "synchronize between processes",
        "BatchNorm1d(n) under sf.shard, whose batch is that of all ranks",
    ),
    (_compat.READS_GENERATOR, *GENERATOR),
    ("torch.Generator method", *GENERATOR),
    ("of class `Generator`", *GENERATOR),  # of numpy
    ("of class `RandomState`", *GENERATOR),
    (
        _compat.READS_ARGUMENT,
        "the function reads the .grad, an inner tensor or the identity of an argument tensor",
        "pass that tensor as a separate argument; pass each tensor only once",
    ),
    (
        _compat.READS_FLAG,
        "the function reads requires_grad of a computed tensor, but shardfn does not know this "
        "flag in inference mode, or after ops that cannot run a second time",
        "read x.requires_grad of an argument; use torch.no_grad() in place of "
        "torch.inference_mode()",
    ),
    (
        _compat.READS_VERSION,
        "the function reads ._version of a tensor, its number of in-place writes",
        "let the code of the function count its in-place writes to the tensor",
    ),
    (
        _compat.READS_CONTEXT,
        "the function reads a context variable",
        "read the variable outside of the function, and pass the value as an argument",
    ),
    (
        "trace_autograd_ops",
        "the function calls torch.autograd.grad or backward",
        "use sf.grad(loss), sf.value_and_grad(loss) or sf.vjp inside the function",
    ),
    ("Unsupported Tensor.requires_grad_() call", *CHANGED_FLAG),
    ("setattr() on Tensor.requires_grad", *CHANGED_FLAG),
    (
        "Trying to access a forward AD level",
        "the function opens a level of torch.autograd.forward_ad (dual numbers)",
        "sf.jvp(fn, primals, tangents)",
    ),
    (
        "to return a scalar",
        "the function to differentiate does not return a scalar",
        "return loss.sum() or loss.mean()",
    ),
    (
        "<TransformType",  # a KeyError: torch has no rule for it under the transform
        HIGHER_ORDER,
        "shardfn.cond, scan or while_loop",
    ),
    (
        "differentiated Tensors does not require grad",  # a functionalized module is not read
        "a functionalized module calls torch.autograd.grad, and a derivative is taken of it",
        "torch.func.functional_call(module, params, args) in place of functionalize",
    ),
    (
        "floating point dtype can require",
        "the function differentiates an argument that is not a floating-point tensor",
        "set argnums to floating-point arguments",
    ),
    (
        "Thing passed to transform API must be Tensor",
        "the function differentiates a value that is not a tensor",
        "set argnums to arguments whose leaves are all floating-point tensors",
    ),
    (
        "an inplace view on a graph input",
        "the function changes the shape of an argument in place",
        "a new view: x = x.squeeze(0)",
    ),
    (
        "_distributed.Shard(dim",
        "the function calls Shard(x) with an x that is not the number of a tensor dim",
        "Shard(0); a list has one placement for each mesh axis: [Shard(0), Replicate()]",
    ),
    (
        "_distributed.Partial(reduce_op",
        "the function calls Partial(x) with an x that is not the name of a reduction",
        'Partial(), or Partial("avg"), "max" or "min"',
    ),
    ("_distributed.Replicate()", "the function calls Replicate with an argument", "Replicate()"),
    (
        "Shape mismatch with out=",
        "the out= tensor has another shape than the result",
        "give out= the shape of the result, or use the returned result",
    ),
    (
        "with non-contiguous `out=`",
        "the out= tensor is a view with gaps in memory",
        "assign the result: y[:, 1:] = torch.add(a, b)",
    ),
    (
        "Tensor with grad_fn()",
        "the function reads the grad_fn of a tensor, or a module in it has a backward hook",
        "a hook on a tensor: y.register_hook(fn)",
    ),
    (
        "opaque object was created",
        "the function makes an object that is not a tensor, such as a generator",
        "pass random tensors in as arguments",
    ),
    (
        "of class `LeakedTensor`",
        "the function uses a traced value that an earlier call stored",
        "return the value from the function that computes it",
    ),
    (
        "can not return a BatchedTensor when out_dim is None",
        "out_axes is None for a result that differs between the samples of a vmap",
        "out_axes=0 for that result",
    ),
    (
        "modified by an inplace operation",
        "the function writes in place to a tensor that a derivative reads",
        "write to a copy, after y = y.clone(); or compute a new value",
    ),
    (
        "mutate a captured Tensor",
        HELD[0],
        f"return a new value; {BUFFERS}, as aux of a derivative (has_aux=True)",
    ),
    ("accessing `data` under vmap", *DATA),
    ("in extra_args that has more elements", *SHARED),
    (
        "Batch norm got a batched tensor",
        "under vmap, the function writes to a buffer that all samples share",
        BUFFERS,
    ),
    (
        "HOP: Unsafe side effect",
        "the body of a scan, a cond or a checkpointed call changes an object outside of the body",
        f"return the new value from the body; {BUFFERS}",
    ),
    ("a leaf Variable that requires grad is being used in an in-place", *HELD),
    (
        "not support sparse Tensors",
        "the function converts a dense tensor to a sparse one, or uses a layout other than "
        "COO, CSR and CSC",
        DENSE,
    ),
    (
        "Tensor.resize_()",
        "the function resizes a tensor in place",
        "x.reshape(shape), or torch.empty(shape)",
    ),
    (
        "Tensor.resize_as_()",
        "the function resizes a tensor in place",
        "x.reshape(y.shape), or torch.empty_like(y), of a tensor y with the new shape",
    ),
)

# of fake tensors only: torch takes a mask of this dtype
MASK_OF_BYTES = "used as indices must be long, int, byte or bool", "to be bool, got torch.uint8"

# a pattern of Dynamo's text -> the problem, and the suggestion, with what the pattern finds
FOUND = (
    (
        r"example_value type: \w+; op: \w+; target: <Wrapped method <original (\w+)>>",
        "the function takes a Python number from a NumPy array",
        "Python's functions, such as math.prod(shape), in place of NumPy's; or compute the number "
        "outside of the function",
    ),
    (
        r"example_value type: (\w+); op: \w+; target: (?:<(?:[\w-]+ )?(?:method|function) )?(\w+)",
        "the function calls {1}, which returns a {0} that is not known in a capture",
        "call {1} outside of the function, and pass what it returns",
    ),
    (
        r"Missing `as_proxy\(\)`[\s\S]*\((?:Remains|DonatedTensor)\)",
        "the function uses a tensor that was donated to an earlier call, so its memory is gone",
        "use the results of that call, or leave the argument out of its donate_argnums",
    ),
    (
        r"Missing `as_proxy\(\)`[\s\S]*(?:UserDefined|GenericContext)\w+\((\w+)\)",
        "an operation on tensors gets an object of class {0}",
        "a function or a method in place of the operator: obj.scale(x) in place of obj * x; or "
        "pass the tensors and numbers that the object holds",
    ),
    (
        r"(?:AutogradFunction|Tensor)Variable\(\), \w+\)|`callable`|`<unknown module>\.Tensor\.",
        "the function uses a method of torch as a value, such as tensor.add or the apply of an "
        "autograd.Function",
        "a function that calls it: lambda *args: Function.apply(*args)",
    ),
    (
        r"subclasses that define a custom `jvp` method",
        "autograd records a call of an autograd.Function that has a jvp of its own",
        "sf.grad inside of the function; or the call under torch.no_grad()",
    ),
    (
        r"maximum recursion depth exceeded",
        "Python's limit of recursion is met while the function is read",
        "a loop in place of a function that calls itself; or int(index) where a list is indexed by "
        "an IntEnum (torch 2.13)",
    ),
    (
        r"does not know how to enter a `RLock` context",
        "the function enters a lock, or reads a functools.cached_property for the first time",
        "read the property before the call, or use @property; take a lock around the call",
    ),
    (
        r"does not know how to enter a `(\w+)` context",
        "the function enters a {0}, a context manager that cannot be read",
        "make it where it is entered: with {0}(...); or enter it around the call",
    ),
)

# torch's texts of a vmap, for calls that are right on one sample
OF_SAMPLES = (
    ("doesn't match the broadcast shape", *SHARED),
    (
        "doesn't work on out=",
        "under vmap, the function writes to an out= tensor, or calls a view op that torch's vmap "
        "does not support",
        "use the op without out=, which returns the value; or copy the tensor before the view op: "
        "x.conj().resolve_conj().imag",
    ),
)


def capture_error_of(
    error: BaseException, fn: Callable[..., Any], name: str, paths: Sequence[str], read: Any = None
) -> CaptureError:
    """The CaptureError for an error of Dynamo or make_fx in a user's function. Dynamo may have
    traced a wrapper around it.
    """
    text, source = str(error), line_of(error) or _definition(fn)
    got, fix = cause_in_tables(error, paths, read or fn) or _of_unknown_cause(error, text)
    is_of_value = got.startswith(OF_VALUES)
    ranks = (
        rank_numbers.notes_of_error(error)
        if is_of_value and rank_numbers.may_be_rank_number(text)
        else ()
    )
    if ranks:
        got, fix = rank_numbers.OF_RANKS.get(got, (got, fix))
    return CaptureError.of(
        name, got, *ranks, needed="one pure graph of tensor ops", fix=fix, source=source
    )


def module_error_of(error: BaseException, name: str) -> CaptureError | None:
    """The CaptureError for an error in a module that Dynamo does not trace, if a table has its
    cause.
    """
    text = str(error)
    frames = [
        source_at(f.filename, f.lineno)
        for f in traceback.extract_tb(error.__traceback__)
        if is_users(f.filename)
    ]
    source = frames[-1] if frames else None
    known = (
        cause_of_custom_op(text)
        or next(((got, fix) for sign, got, fix in CAUSES if sign in text and "{" not in got), None)
        or data_dependent.cause_of_error(error, text)
    )
    if known is None:
        return None
    got, fix = known
    return CaptureError.of(name, got, needed="one pure graph of tensor ops", fix=fix, source=source)


def is_of_derivative(error: ShardError) -> bool:
    """Return whether an error says that torch has no derivative of an op."""
    return error.fix in NO_DERIVATIVE


def cause_in_tables(
    error: BaseException, paths: Sequence[str], read: Any
) -> tuple[str, str] | None:
    """The problem and the suggestion, if a table has the cause of an error."""
    text = str(error)
    frames = list(getattr(error, "real_stack", None) or ())
    if row := row_of_error(frames, text):
        return row
    if row := cause_in_display([frame.filename for frame in frames], text):
        return row
    files = "\n".join(frame.filename for frame in frames)
    if BRANCHES in text and (row := data_dependent.cause_in_file(files)):
        return row
    if row := cause_of_custom_op(text):
        return row
    for sign, got, fix in CAUSES:
        if sign in text:
            return got.format(places=_changed_objects(text, paths, read)), fix
    return data_dependent.cause_of_error(error, text) or _of_foreign_classes(text)


def _of_unknown_cause(error: BaseException, text: str) -> tuple[str, str]:
    """The problem and the suggestion where no table has the cause of an error."""
    if match := re.search(r"derivative for aten::(\w+) is not implemented", text):
        return f"the function differentiates {match[1]}, of which torch has no derivative", DETACHED
    if any(sign in text for sign in MASK_OF_BYTES):
        got = "the function uses a uint8 tensor as a mask, which torch deprecates"
        return got, "mask.bool() in place of the mask"
    if "BatchedTensor(" in text:
        for sign, got, fix in OF_SAMPLES:
            if sign in text.replace("\\'", "'"):  # torch 2.15 quotes the error
                return got, fix
    for pattern, got, fix in FOUND:
        if match := re.search(pattern, text):
            return got.format(*match.groups()), fix.format(*match.groups())
    raised = _exception_text(text, "got") or _exception_text(text, "raised exception")
    if raised:
        return f"the function raises {raised}", "check that the same call works on plain tensors"
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [
        type(error).__name__
    ]
    why = next(
        (line.removeprefix("Explanation: ") for line in rest if line.startswith("Explanation")), ""
    )
    return (f"{UNREAD}: {first}. {why}".rstrip(), "a pure function of tensors")


def _exception_text(message: str, after: str) -> str | None:
    """The class and text of the exception that Dynamo's message quotes."""
    text = r"\((?:\[ConstantVariable\(str: )?['\"](.*?)['\"]\)"
    match = re.search(rf"{after} (\w+){text}", message)
    return f"{match[1]}: {match[2]}".replace("\\'", "'") if match else None


def _of_foreign_classes(text: str) -> tuple[str, str] | None:
    """The explanation for DTensors and other subclasses, torch's collectives, and DTensor
    methods on an argument.
    """
    if match := re.search(_compat.FOREIGN + r" (\w+);", text):
        return f"the function closes over a {match[1]}", tensor_subclasses.PLAIN
    if match := re.search(_compat.MADE + r" (\w+);", text):
        return f"the function makes a {match[1]}", tensor_subclasses.PLAIN
    if match := re.search(_compat.FOLLOWED + r" (\w+): (\.\w+);", text):
        fix = f"read {match[2]} outside of the transform, and pass it as an argument"
        got = f"a derivative or vmap applies to a {match[1]}, and the function reads its {match[2]}"
        return got, fix
    if match := re.search(_compat.MADE_OF_FOLLOWED + r" (\w+);", text):
        fix = f"pass the {match[1]} as an argument; or use its inner tensors directly"
        return (
            f"the function makes a {match[1]} from tensors that are differentiated or mapped by "
            "vmap",
            fix,
        )
    if match := re.search(_compat.COMMUNICATES + r" (\w+);", text):
        known = row_of(match[1])
        return known or (f"the function calls a collective itself: {match[1]}", ALONE)
    if match := re.search(r"unregistered member [\s\S]*?Member '(\w+)'", text):
        return row_of_attribute(match[1])
    asked = (
        r"'\w*Tensor\w*' object has no attribute '(\w+)'",
        r"Tensor method `(\w+)` is not defined",
    )
    match = re.search(asked[0], text) or re.search(asked[1], text)
    if match and hasattr(DTensor, match[1]):
        got = (
            f"the function reads .{match[1]} of a global tensor, which is not a DTensor inside "
            "sf.shard"
        )
        return got, tensor_subclasses.FIX
    return None


def _changed_objects(text: str, paths: Sequence[str], read: Any) -> str:
    """The user's names of the objects that a function changes, from Dynamo's names."""
    parts = r"((?:\.\w+|\[(?:\d+|'\w+')\])*)"
    matches = re.findall(r"[LG]\[['\"](\w+)['\"]\]" + parts, re.sub(MODULES, r".\1", text))
    roots = list(dict.fromkeys(re.split(r"[\[.]", p)[0] for p in paths))
    places = []
    for name, way in matches:
        position = re.match(r"\[(\d+)\]", way)
        if name == "args" and position:
            number = int(position[1])
            places.append(f"argument {roots[number] if number < len(roots) else number}")
        elif name == "fn":  # the function itself, and its attributes
            places.append(_object_name(read, way))
        elif inside := re.fullmatch(_compat.FUNCTION + r"_(\w*)_\d+_c\w+", name):
            places.append(f"a closed-over or default value of {inside[1]}")
        else:
            places.append(way.lstrip(".") if name.startswith("__import") else name + way)
    return ", ".join(dict.fromkeys(places)) or "a closed-over object"


def _object_name(x: Any, path: str) -> str:
    """The user's name of an object reached from a function: a closed-over variable, or an
    attribute of an object, with what is reached from it.
    """
    last = f"an attribute of {type(x).__name__}"
    try:
        for attribute, position, key in re.findall(r"\.(\w+)|\[(\d+)\]|(\['\w+'\])", path):
            if attribute == "__closure__":
                cell, _, rest = path.partition("__closure__[")[2].partition("]")
                return x.__code__.co_freevars[int(cell)] + rest.removeprefix(".cell_contents")
            if key:
                return last + key
            last = f"{type(x).__name__}.{attribute}"
            x = getattr(x, attribute) if attribute else x[int(position)]
            last = last if attribute else f"an attribute of {type(x).__name__}"
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "a closed-over object"
    return last


def line_of(error: BaseException) -> str | None:
    """The innermost line of user code in an error's traceback or text."""
    frames = [(f.filename, f.lineno) for f in getattr(error, "real_stack", None) or ()]
    frames += [
        (file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))
    ]
    if not frames:
        frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    outside = itertools.takewhile(lambda frame: not is_of_display(frame[0]), frames)
    mine = [source_at(file, line) for file, line in outside if is_users(file)]
    return mine[-1] if mine else None


def _definition(fn: Callable[..., Any]) -> str | None:
    """The line where a function is defined, for errors without a line."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    if code is None or is_ours(code.co_filename):
        return call_site()
    return source_at(code.co_filename, code.co_firstlineno)
