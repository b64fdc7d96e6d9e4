"""Large products of float32 matrices by oneDNN, where MKL is slower.

MKL, which torch calls for a product, has its AVX-512 code for processors of Intel alone. On one of
AMD with AVX-512, oneDNN takes 0.83 to 0.95 of its time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

aten = torch.ops.aten
# multiplications of a thread from which the start of a call of oneDNN does not count
LEAST = 1 << 23
PROCESSORS = Path("/proc/cpuinfo")
AMD = "AuthenticAMD"
OP = "torch.ops.mkldnn._linear_pointwise.default"
AS_IT_IS = ("none", [], "")  # nothing is applied to the product


@functools.cache
def is_faster() -> bool:
    """Whether oneDNN multiplies faster than MKL on this processor."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not has_both or platform.system() != "Linux":
        return False
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_wide and AMD in PROCESSORS.read_text()


def product_lowered(
    original: Callable[..., Any], graph: Any, target: Any, args: Any, kwargs: Any
) -> Any:
    """Lower a product to a call of oneDNN if that is faster, any other op as torch does.

    Args:
        original: of torch.
        graph: the graph that Inductor lowers, at one of its nodes.
        target: the op.
        args: its arguments, as Inductor has them.
        kwargs: likewise.
    """
    is_product = target is aten.mm.default or target is aten.addmm.default
    is_allowed = torch.backends.mkldnn.enabled  # by the user
    if is_product and not kwargs and is_allowed and is_faster():
        operands = graph.current_node.args
        fakes = [node.meta["val"] for node in operands]
        if is_large(*fakes):
            return _by_onednn(*args)
    return original(graph, target, args, kwargs)


def is_large(*fakes: torch.Tensor) -> bool:
    """Whether oneDNN takes the operands of a product as they are, and it is worth the call.

    Args:
        fakes: a bias for each column, (N,), or none; a row-major matrix, (M, K); and a dense one,
            (K, N), in either order.
    """
    *bias, left, right = fakes
    rows, inner = left.shape
    _, columns = right.shape
    sizes = (rows, inner, columns)
    if not all(isinstance(n, int) for n in sizes):
        return False
    if any(x.dtype is not torch.float32 or not x.is_cpu for x in fakes):
        return False
    if any(b.shape != (columns,) or not b.is_contiguous() for b in bias):
        return False
    is_row_major = left.is_contiguous()
    is_dense = right.is_contiguous() or right.t().is_contiguous()
    least = LEAST * torch.get_num_threads()
    is_worth_it = rows * inner * columns >= least
    return is_row_major and is_dense and is_worth_it


def _by_onednn(*operands: Any) -> Any:
    """The product in Inductor's program: a kernel of torch that allocates its result."""
    from torch._inductor import ir
    from torch._inductor.lowering import permute

    *bias, left, right = operands
    read = ir.ExternKernel.realize_input
    left = ir.ExternKernel.require_contiguous(read(left))
    weight = read(permute(right, [1, 0]))  # (N, K), as of a linear layer
    size = [left.get_size()[0], weight.get_size()[0]]
    stride = ir.FlexibleLayout.contiguous_strides(size)
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), size, stride)
    inputs = [left, weight, *map(read, bias)]
    constants = AS_IT_IS if bias else (None, *AS_IT_IS)
    kernel = ir.ExternKernelAlloc(layout, inputs, constants, python_kernel_name=OP)
    return ir.TensorBox.create(kernel)
