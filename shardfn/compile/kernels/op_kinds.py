"""The form that Inductor gives an op: a formula that it writes into the readers, a loop that
reduces, a part of a larger buffer, or a call of a kernel.
"""

from __future__ import annotations

import math
from operator import getitem

import torch
from torch.fx import Node

from ..._compat.cpp_kernels import products
from ...capture.checkpoint.recompute import SHAPE_ONLY, is_view
from ...ops.nodes import args_of
from ...ops.placement import AFTER
from ...partition.planner import work

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FORMULAS = {  # element by element, beside the ops that torch tags so
    aten._to_copy.default,
    aten._unsafe_index.Tensor,
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
    torch.ops.prims.iota.default,
}
MOVED = {  # formulas, and the first argument that they do not read in order
    "_unsafe_index": 0,
    "constant_pad_nd": 0,
    "embedding": 0,
    "flip": 0,
    "gather": 0,
    "index": 0,
    "index_select": 0,
    "repeat": 0,
    "roll": 0,
    "select_backward": 0,
    "select_scatter": 1,
    "slice_backward": 0,
    "slice_scatter": 1,
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
LENGTHS = {"gelu": 9, "gelu_backward": 19, "random_bits": 182, "silu": 3, "silu_backward": 8}
REDUCTIONS = {
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
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
WINDOWS = {  # pools, and the place of the size of a window among the arguments
    "avg_pool2d": 1,
    "avg_pool2d_backward": 2,
    "avg_pool3d": 1,
    "avg_pool3d_backward": 2,
    "max_pool2d_with_indices": 1,
    "max_pool2d_with_indices_backward": 2,
    "upsample_nearest2d_backward": 2,
}
SCATTERED = {"max_pool2d_with_indices_backward"}  # sums of what several windows give
COMPARED = {"max_pool2d_with_indices"}  # a loop over the window, if that is not written out
SMALL_IMAGE = 128  # height and width together, up to which torch interpolates channels last
LARGEST_WINDOW = 25  # of a formula; a larger one is a call
WRITTEN_OUT = 8  # elements of a window that a formula compares one by one
JOINED = {  # written part by part into one buffer
    aten.cat.default,
    aten.stack.default,
    torch.ops.shardfn.pack.default,
}
PRODUCTS = {"addmm", "mm"}  # into memory that they are given
SINGLE = {"addmm", "baddbmm", "bmm", "convolution", "mm"}  # calls that are scheduled as one op
SUMS = {"std": 2, "var": 2, "var_mean": 3}  # sums and means that are scheduled one by one
TURNS = {"numpy_T", "permute", "t", "transpose"}
FIXED = {aten.mm.default, aten.convolution_backward.default}  # need an order of strides
SCATTERS = {  # write elements into a copy of their first argument
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "as_strided_scatter",
    "diagonal_scatter",
    "index_put",
    "scatter",
    "scatter_add",
    "scatter_reduce",
}
REPLACED = {  # scatters into a value that nothing reads later
    "_unsafe_index_put",
    "as_strided_scatter",
    "diagonal_scatter",
    "index_put",
}
WHOLE = {torch.int64, torch.bool}  # dtypes that no loop adds to, as it would have to be atomic
COPY = "shardfn: a copy for one reader"  # in the meta of a node, one of these
CHANNELS_LAST = "channels last"
IN_DIMS = "in the order of its dims"
INSIDE = "shardfn: memory that a kernel takes while it runs"
IF_FORMULA = "of a formula"
OF_STORED = "of a stored value"
IN_PLACE = {c10d.all_reduce.default}
WAIT = work.WAIT


def name(node: Node) -> str:
    """The name of an op, without its overload."""
    return getattr(node.target, "_opname", "")


def is_window(node: Node) -> bool:
    """Whether a pool is computed where its result is read."""
    return 0 < window_of(node) <= LARGEST_WINDOW


def window_of(node: Node) -> int:
    """The number of elements from which a pool computes one; 0 for other ops."""
    place = WINDOWS.get(name(node))
    if place is None:
        return 0
    args = args_of(node)
    sizes = args[place]
    if name(node) == "upsample_nearest2d_backward":
        pairs = zip(args[1], sizes[2:], strict=True)
        return math.prod(-(-n // size) for n, size in pairs)
    dims = int(name(node).partition("pool")[2][0])
    sizes = list(sizes) * (dims if len(sizes) == 1 else 1)
    if place == 1 or name(node) in SCATTERED:
        return math.prod(sizes)
    strides = args[3] or sizes
    strides = list(strides) * (dims if len(strides) == 1 else 1)
    return math.prod(-(-n // step) for n, step in zip(sizes, strides, strict=True))


def read_by_formula(node: Node) -> list[Node]:
    """The inputs of which an op reads elements."""
    inputs = list(node.all_input_nodes)
    if node.target in SHAPE_ONLY:
        return []
    if name(node) not in WINDOWS or len(inputs) == 1:
        return inputs
    of_shape = args_of(node)[1]
    return [x for x in inputs if x is not of_shape]


def moved_by(node: Node) -> list[Node]:
    """The inputs that a formula reads at other places than those of its own elements."""
    place = MOVED.get(name(node))
    return [] if place is None else [args_of(node)[place]]


def places_of(node: Node) -> tuple[object, str]:
    """The places at which a formula reads another value's elements, as its other arguments say."""
    moved = moved_by(node)
    args = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: None if x in moved else x)
    return node.target, repr(args)


def is_alias(node: Node) -> bool:
    """Whether a value lies in the memory of another, and no kernel makes it."""
    is_ordered = node.target in (AFTER, WAIT)
    return is_view(node) and not is_ordered


def is_formula(node: Node) -> bool:
    """Whether an op is computed where its result is read."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    is_other = node.target in FORMULAS or _is_sum_of_one(node)
    return is_one and (is_pointwise or is_random(node) or is_other)


def is_random(node: Node) -> bool:
    """Whether an op computes random numbers from a key."""
    is_ours = getattr(node.target, "namespace", "") == "shardfn"
    return is_ours and name(node).startswith("random")


def _is_sum_of_one(node: Node) -> bool:
    """Whether a reduction is over dims of size 1."""
    if name(node) not in REDUCTIONS or not node.all_input_nodes:
        return False
    x, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    is_one = isinstance(value, torch.Tensor) and isinstance(x, torch.Tensor)
    return is_one and x.shape.numel() == value.shape.numel()


def allocates(node: Node) -> bool:
    """Whether the kernel of a product allocates its result."""
    operands = node.all_input_nodes
    if name(node) not in PRODUCTS or len(operands) != len(args_of(node)):
        return False
    is_given = products.is_faster() and torch.backends.mkldnn.enabled
    return is_given and products.is_large(*(x.meta["val"] for x in operands))


def is_single(node: Node) -> bool:
    """Whether Inductor schedules a call as one op, without one for each result."""
    is_collective = "collective" in node.meta or node.target is WAIT
    is_sum = node.target is aten.add.Tensor  # computed with a product
    return name(node) in SINGLE or is_collective or is_sum


def is_scatter(node: Node) -> bool:
    """Whether an op writes elements into a copy of its first argument."""
    return name(node) in SCATTERS and node.target not in FORMULAS


def source_of(node: Node) -> Node:
    """The tensor of which a scatter writes every element; of the indices, if that is a number."""
    return [x for x in node.all_input_nodes if x is not args_of(node)[0]][-1]


def is_scattered_by_call(node: Node) -> bool:
    """Whether no loop scatters, but a kernel of torch."""
    own = name(node)
    args = list(args_of(node))
    indices = args[1] if own.endswith("index_put") else ()
    if any(x is not None and x.meta["val"].dtype == torch.bool for x in indices):
        return True
    is_added = own in ("scatter_add", "scatter_reduce") or "accumulate" in own
    if own.endswith("index_put"):
        is_added = len(args) > 3 and bool(args[3])
    if not is_added:
        return False
    is_other = own == "scatter_reduce" and args[4] != "sum"
    is_shared = own.startswith("scatter") and torch.get_num_threads() > 1
    return is_other or is_shared or node.meta["val"].dtype in WHOLE


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
    own = name(node)
    if own.startswith("avg_pool") and own.endswith("_backward"):
        dims = int(own.partition("pool")[2][0])
        return 8 * dims + (4 + 2 * dims) * window_of(node)
    return LENGTHS.get(own, 1)


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
    is_loop = own in REDUCTIONS or is_window(node)
    is_joined = node.target in JOINED
    if is_scatter(node):
        return is_scattered_by_call(node)
    is_other = is_formula(node) or is_alias(node)
    return node.op == "call_function" and not (is_loop or is_joined or is_other)
