"""Functions whose result shape or control flow depends on values, with alternatives that keep
one program for all ranks.
"""

from __future__ import annotations

import re

import torch

from ... import _compat

SHAPE = "the shape of {what}'s result depends on the values of tensors"
READ = "{what} reads a tensor's value while the function is traced"
FIXED = "compute a result of fixed size: torch.where, topk, or a mask"
KEEP = "keep the value a tensor: no .item(), bool() or int()"
STATIC = "torch.nonzero_static(x, size=n), which pads to a size that you choose"

PACKED = (
    "the size of a packed sequence depends on values, the lengths",
    "pass lengths.tolist(), made outside of the function; or run the RNN on the padded batch, "
    "y, _ = rnn(x), and then mask the outputs, torch.where(mask, y, 0), or read the last ones, "
    "y[torch.arange(n), lengths - 1]",
)
# Files of torch whose code reads values, and what it reads them for.
DRAWN = "draw the sample outside of the function, and pass it as an argument"
FILES = {
    "torch/nn/utils/rnn.py": PACKED,
    "nn/modules/rnn.py": PACKED,
    "nn/modules/adaptive.py": (
        "AdaptiveLogSoftmaxWithLoss selects the rows of each cluster of classes, whose number "
        "depends on values",
        "module.log_prob(x).gather(1, target[:, None]).squeeze(1), whose negative mean is the "
        "loss; module.log_prob(x).argmax(1) in place of module.predict(x)",
    ),
    "torch/distributions/von_mises.py": (
        "the number of draws of VonMises depends on values: it draws again until enough are "
        "accepted",
        DRAWN,
    ),
    "torch/distributions/wishart.py": (
        "the number of draws of Wishart depends on values: it draws again until the matrix is "
        "valid",
        DRAWN,
    ),
}

# Name of a function -> the problem, how the user wrote it, what to write instead.
FUNCTIONS: dict[str, tuple[str, str, str]] = {
    "nonzero": (SHAPE, "nonzero", STATIC),
    "argwhere": (SHAPE, "argwhere", STATIC),
    "where": (SHAPE, "torch.where(condition)", f"torch.where(condition, a, b), or {STATIC}"),
    "getitem": (SHAPE, "x[mask]", f"torch.where(mask, x, 0), x * mask, or {STATIC}"),
    "masked_select": (SHAPE, "masked_select", "torch.where(mask, x, 0), or x * mask"),
    "unique": (
        SHAPE,
        "unique",
        "s = torch.sort(x).values; s[1:] != s[:-1] marks where a new value begins",
    ),
    "unique_consecutive": (
        SHAPE,
        "unique_consecutive",
        "x[1:] != x[:-1], which marks where a new run begins",
    ),
    "bincount": (
        SHAPE,
        "bincount",
        "torch.bincount(x, minlength=n), where all numbers are below n",
    ),
    "repeat_interleave": (
        SHAPE,
        "repeat_interleave",
        "repeat_interleave(x, repeats, dim, output_size=n)",
    ),
    "tensor_split": (
        SHAPE,
        "tensor_split",
        "pass a number of sections or a tuple of numbers in place of a tensor of indices",
    ),
    "one_hot": (SHAPE, "one_hot", "one_hot(x, num_classes=n)"),
    "_pack_padded_sequence": (PACKED[0], "", PACKED[1]),
    "_ctc_loss": (SHAPE, "ctc_loss", "torch.nn.functional.ctc_loss"),
    "item": (READ, ".item()", KEEP),
    "tolist": (READ, ".tolist()", "keep the value a tensor, or pass the list as an argument"),
    "Tensor": (READ, "torch.Tensor([x, y])", "torch.stack([x, y])"),
    "equal": (READ, "torch.equal", "(a == b).all(), which stays a tensor"),
    "allclose": (READ, "allclose", "torch.isclose(a, b).all(), which stays a tensor"),
}
SAME = {
    "_unique2": "unique",
    "unique_dim": "unique",
    "_local_scalar_dense": "item",
    "boolean mask": "getitem",
    "gathered": "getitem",
    "wrapped_item": "item",
}  # texts of torch's errors
READERS = {
    "__bool__": "branch",
    "__int__": "number",
    "__float__": "float",
    "__index__": "number",
    "item": "item",
    "tolist": "tolist",
}
BRANCH = ("the function branches on a tensor's value", "torch.where(condition, a, b)")
NUMBER = (
    "the function uses a tensor's value as a Python number: an index, a size or a count",
    "x.index_select(dim, i.reshape(1)) or torch.gather; or pass the number as an argument",
)
FLOAT = (
    "the function uses a tensor's value as a Python number, as float(x), math.exp(x) and "
    "torch.Tensor([x, y]) do",
    "keep the value a tensor: torch.exp(x) in place of math.exp(x), torch.stack([x, y]) in place "
    "of torch.Tensor([x, y])",
)
VALUES = (
    "the function uses values of tensors, which are not known while it is traced",
    "compute with the tensors themselves: torch.stack([x, y]) of tensors x and y, torch.where, "
    "or a mask",
)
KEY = (
    "the function uses a tensor as a key of a dict",
    "torch.stack(values).index_select(0, i.reshape(1)).squeeze(0), with the values in a list",
)

# Texts of torch's errors for an op that needs a value, where torch has no exception class, and
# the problem if the op has no row above.
SIGNS: tuple[tuple[str, tuple[str, str] | None], ...] = (
    ("Data dependent operator", None),
    ("Dynamic shape operator", None),
    ("data-dependent output shape", None),
    ("tolist()` on non-integer", None),
    ("calling .item() on a Tensor", None),
    ("operators that can output dynamic shape", None),
    ("operators that can support dynamic shape", None),
    ("Attempted to vmap over `mask` in torch.masked_select", None),
    ("Batching rule not implemented for aten::equal", None),
    ("data is not allocated yet", VALUES),
    ("Cannot access data pointer of Tensor that doesn't have storage", VALUES),
    ("(Size-like symbols: u", None),  # the size of a result
    ("Could not guard on data-dependent expression", BRANCH),
    ("Could not extract specialized integer", NUMBER),
    ("raised exception KeyError(Tensor(", KEY),
    ("operator `range` with argument types ['Tensor'", NUMBER),
    # the same in torch 2.15
    ("Pending unbacked symbols", None),
    ("DelayGraphBreakVariable() does not implement python_type()", NUMBER),
)
# Patterns for the name of the call in torch's texts: the Python function, the operator, the
# batched operator.
NAMED = (
    r"While executing %\S+ : .*?call_\w+\[target=(?:\w+\.)*(\w+)\]",
    r"Operator `aten\.(\w+)",
    r"Attempted to use `(?:\w+\.)*(\w+)`",
    r"vmap over aten::(\w+)",
    r"Attempted to vmap over `mask` in torch\.(\w+)",
    r"not implemented for aten::(\w+)",
    r"indexing with a (boolean mask)",
    r"`(tolist)\(\)`",
    r"call_function <class 'torch\.(Tensor)'>",
    r"calling \.(item)\(\)",
    r"Caused by: return aten\.(\w+)\(",  # in a function of ours that stands for torch's
)


def cause_in_method(method: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if a tensor method reads a value. None otherwise."""
    kind = READERS.get(method)
    row = {"branch": BRANCH, "number": NUMBER, "float": FLOAT}.get(kind or "")
    return row or cause_in_function(kind or "")


def cause_in_function(function: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if a function reads a value or its result shape depends
    on values.
    """
    row = FUNCTIONS.get(function) or FUNCTIONS.get(function.strip("_"))
    return (row[0].format(what=row[1]), row[2]) if row else None


def cause_in_math(text: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if a text names a function of `math` that takes a tensor."""
    match = re.search(_compat.OF_MATH + r"\.(\w+);", text)
    if match is None:
        return None
    name = match[1]
    instead = f"torch.{name} of the tensor itself, without .item(), in place of math.{name}"
    return READ.format(what=f"math.{name}"), instead if hasattr(torch, name) else KEEP


def cause_in_file(text: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if a text names a file of torch whose code reads values."""
    return next((row for file, row in FILES.items() if file in text), None)


def cause_of_error(error: BaseException, text: str) -> tuple[str, str] | None:
    """The problem and the suggestion, if an error is about a value, which is unknown during a
    trace. None for any other error.

    Args:
        error: the error of Dynamo or make_fx.
        text: its text.
    """
    if row := cause_in_math(text):
        return row
    reads, grows = (
        isinstance(error, _compat.DATA_DEPENDENT),
        isinstance(error, _compat.DYNAMIC_SHAPE),
    )
    sign = next((pair for pair in SIGNS if pair[0] in text), None)
    if not (reads or grows or sign):
        return None
    if row := cause_in_file(text):
        return row
    name = _call_in_text(text) or _call_in_text(f"Operator `{getattr(error, 'func', '')}")
    if row := cause_in_function(name):
        return row
    if sign and sign[1]:
        return sign[1]
    return (
        (NUMBER[0].replace("the function", name or "the function"), NUMBER[1])
        if reads
        else (SHAPE.format(what=name or "an op"), FIXED)
    )


def _call_in_text(text: str) -> str:
    name = next((m[1] for m in (re.search(pattern, text) for pattern in NAMED) if m), "")
    return SAME.get(name, name)
