"""Compiled programs whose kernels are recorded once as a CUDA graph, and then launched together."""

from .host_work import refuse_host_work
from .runner import Recorded

__all__ = ["Recorded", "refuse_host_work"]
