"""Whether a call ends in a compilation of C++ kernels, for which the compiler is prepared while
the function is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...compile.ahead import prepare_compiler
from ...mesh import current_mesh
from ...types import ShapeDtype
from ...world import current_world
from ..options import Request


def prepare(request: Request, leaves: Sequence[Any]) -> None:
    """Have the compiler prepared, if a call with these leaves waits for kernels of the CPU."""
    mesh = request.mesh or current_mesh()
    is_simulated = mesh is not None and current_world().kind == "simulated"
    is_later = request.warmup is not None
    if request.backend != "inductor" or is_simulated or is_later:
        return
    if any(map(_is_of_cpu, leaves)):
        prepare_compiler()


def _is_of_cpu(x: Any) -> bool:
    is_tensor = isinstance(x, torch.Tensor) and x.device.type == "cpu"
    return is_tensor or isinstance(x, ShapeDtype)
