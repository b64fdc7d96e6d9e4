"""The form that Inductor gives an op: a formula that it writes into the readers, a loop that
reduces, a part of a larger buffer, or a call of a kernel.
"""

from __future__ import annotations

import math
from operator import getitem

import torch
from torch.fx import Node

from ...capture.checkpoint.recompute import SHAPE_ONLY, is_view
from ...ops.nodes import args_of
from ...ops.placement import AFTER
from ...partition.planner import work
from .copied_inputs import COPY

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FORMULAS = {  # element by element, beside the ops that torch tags so
    aten._to_copy.default,
    aten.arange.default,
    aten.arange.start_step,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.embedding.default,
    aten.empty.memory_format,
    aten.flip.default,
    aten.full.default,
    aten.full_like.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.repeat.default,
    aten.roll.default,
    aten.scalar_tensor.default,
    aten.scatter.value,
    aten.select_backward.default,
    aten.select_scatter.default,
    aten.slice_backward.default,
    aten.slice_scatter.default,
    aten.tril.default,
    aten.triu.default,
    aten.zeros.default,
    aten.zeros_like.default,
}
HEAVY = {  # formulas that are stored if two ops read them
    "exp",
    "gelu_backward",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "mish",
    "sigmoid",
    "silu",
    "silu_backward",
    "softplus",
    "tanh",
}
LENGTHS = {
    "gelu": 9,
    "gelu_backward": 19,
    "random_bits": 60,
    "silu": 3,
    "silu_backward": 8,
}
REDUCTIONS = {
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "cumsum",
    "logsumexp",
    "max",
    "mean",
    "min",
    "prod",
    "std",
    "sum",
    "var",
    "var_mean",
}
ROWWISE = {  # sums over rows, and a formula of them
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "native_group_norm",
    "native_layer_norm",
    "native_layer_norm_backward",
}
GROUPED = "native_group_norm"  # whose weights are multiplied with the sums beforehand
WINDOWS = {  # pools, and the place of the size of a window among the arguments
    "avg_pool2d": 1,
    "avg_pool2d_backward": 2,
    "max_pool2d_with_indices": 1,
    "max_pool2d_with_indices_backward": 2,
}
SCATTERED = {"max_pool2d_with_indices_backward"}  # sums of what several windows give
LARGEST_WINDOW = 25  # of a formula; a larger one is a call
JOINED = {  # written part by part into one buffer
    aten.cat.default,
    aten.stack.default,
    torch.ops.shardfn.pack.default,
}
PRODUCTS = {"addmm", "mm"}  # into memory that they are given
TURNS = {"numpy_T", "permute", "t", "transpose"}
FIXED = {aten.mm.default, aten.convolution_backward.default}  # need an order of strides
IN_PLACE = {c10d.all_reduce.default}
WAIT = work.WAIT


def name(node: Node) -> str:
    """The name of an op, without its overload."""
    return getattr(node.target, "_opname", "")


def is_window(node: Node) -> bool:
    """Whether a pool is computed where its result is read."""
    place = WINDOWS.get(name(node))
    if place is None:
        return False
    sizes = args_of(node)[place]
    window = math.prod(sizes)
    if len(sizes) == 1:
        window = window**2
    return window <= LARGEST_WINDOW


def read_by_formula(node: Node) -> list[Node]:
    """The inputs of which an op reads elements."""
    inputs = list(node.all_input_nodes)
    if node.target in SHAPE_ONLY:
        return []
    if name(node) not in WINDOWS:
        return inputs
    of_shape = args_of(node)[1]
    return [x for x in inputs if x is not of_shape]


def is_alias(node: Node) -> bool:
    """Whether a value lies in the memory of another, and no kernel makes it."""
    is_ordered = node.target in (AFTER, WAIT)
    return is_view(node) and not is_ordered


def is_formula(node: Node) -> bool:
    """Whether an op is computed where its result is read."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_ours = getattr(node.target, "namespace", "") == "shardfn"
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    is_random = is_ours and name(node).startswith("random")
    is_other = node.target in FORMULAS or _is_sum_of_one(node)
    return is_one and (is_pointwise or is_random or is_other)


def _is_sum_of_one(node: Node) -> bool:
    """Whether a reduction is over dims of size 1."""
    if name(node) not in REDUCTIONS or not node.all_input_nodes:
        return False
    x, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    is_one = isinstance(value, torch.Tensor) and isinstance(x, torch.Tensor)
    return is_one and x.shape.numel() == value.shape.numel()


def turned(node: Node) -> Node:
    """The value of which a node is the only reader's transposed view; else the node itself."""
    first = node
    while name(node) in TURNS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node if len(node.users) == 1 else first


def product_of(node: Node) -> Node | None:
    """The product that a sum adds to another value, if one kernel computes both."""
    if node.target is not aten.add.Tensor:
        return None
    products = map(turned, node.all_input_nodes)
    return next((x for x in products if sum_of(x) is node), None)


def sum_of(node: Node) -> Node | None:
    """The sum that is computed by the kernel of a product."""
    if node.target is not aten.mm.default:
        return None
    reader = view = node
    while reader is node or name(reader) in TURNS:
        if len(reader.users) != 1:
            return None
        view = reader
        (reader,) = reader.users
    others = [x for x in reader.all_input_nodes if x is not view]
    is_sum = reader.target is aten.add.Tensor and not reader.kwargs
    if not is_sum or len(others) != 1:
        return None
    is_first = reader.args[0] is view
    if is_first and turned(others[0]).target is aten.mm.default:
        return None  # the second product is the one that a kernel adds to
    shape, given = view.meta["val"].shape, others[0].meta["val"].shape
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape):
        return None
    fits = all(a in (1, b) for a, b in pairs)
    return reader if fits else None


def is_heavy(node: Node) -> bool:
    """Whether a formula is costly to compute twice."""
    is_tanh = node.kwargs.get("approximate") == "tanh"
    return name(node) in HEAVY or is_tanh


def length(node: Node) -> int:
    """How many operations a formula adds, about."""
    return LENGTHS.get(name(node), 1)


def is_view_or_item(node: Node) -> bool:
    """Whether a node is a view, or one of those that an op returns."""
    if node.target is getitem:
        node = node.all_input_nodes[0]
    return is_alias(node)


def readers(node: Node) -> list[Node]:
    """The ops that read a value, also those that read a copy made for them."""
    return [y for x in node.users for y in (x.users if COPY in x.meta else [x])]


def is_call(node: Node) -> bool:
    """Whether an op is a call, which needs its inputs stored."""
    if COPY in node.meta:
        (node,) = node.users
    if node.target in (AFTER, getitem):
        return False
    own = name(node)
    is_sum = own in REDUCTIONS or own in ROWWISE
    is_loop = is_sum or is_window(node)
    is_joined = node.target in JOINED
    is_other = is_formula(node) or is_alias(node)
    return node.op == "call_function" and not (is_loop or is_joined or is_other)
