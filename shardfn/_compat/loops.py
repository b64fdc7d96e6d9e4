"""torch's own loops, which have no public name."""

from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

__all__ = ["torch_map", "torch_scan", "torch_while_loop"]
