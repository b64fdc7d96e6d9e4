"""A compilation of Inductor as text: the Python module that it generated, which is run again in
place of compiling.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..patches import patched


class Generated(NamedTuple):
    """The Python module that Inductor generated for a program, as text.

    Args:
        code: the text of a Python module with a function `call`.
        to_align: the inputs that may have to be copied to an aligned address.
        written: the inputs that it writes to.
        constants: the tensors that the module reads by name.
    """

    code: str
    to_align: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    constants: Mapping[str, torch.Tensor] = types.MappingProxyType({})


# A compilation may hold this beside its text (torch 2.12 to 2.15).
BESIDE = (
    "torchbind_constants",
    "opaque_value_type_classes",
    "frozen_param_names",
    "guards_expr",
    "cudagraph_info",
    "_original_gm",
)


def generated(runner: Any) -> Generated | None:
    """Extract the generated module of a compiled function; None if text cannot hold it."""
    code = getattr(runner, "source_code", None)
    if not code or any(getattr(runner, name, None) for name in BESIDE):
        return None
    constants = dict(runner.constants or {})
    if not all(type(x) is torch.Tensor for x in constants.values()):
        return None
    to_align = tuple(getattr(runner, "inputs_to_check", ()))
    written = tuple(sorted(runner.mutated_input_idxs))
    return Generated(code, to_align, written, constants)


# Names in the text of a complex number, of which Inductor's modules import nanj alone.
NUMBERS = {"infj": complex(0, math.inf)}


def know_numbers(compiled: Any) -> None:
    """Have the module that Inductor generated for a program know the numbers in its text (torch
    2.13 to 2.15).
    """
    code = getattr(compiled, "source_code", None) or ""
    if any(name in code for name in NUMBERS):
        type(compiled.compiled_fn_runner).call.__globals__.update(NUMBERS)


def extend(compiled: Any, code: str) -> None:
    """Append code to the module that Inductor generated for a program, and run it there.

    Args:
        compiled: the program, whose function `call` becomes that of the code.
        code: it defines `call` by the function of that name before.
    """
    module = type(compiled.compiled_fn_runner).call.__globals__
    exec(compile(code, module["__file__"], "exec"), module)
    compiled.source_code += code
    compiled.current_callable = module["call"]


OF_TORCH = ("mm", "addmm", "bmm", "baddbmm", "convolution")


class Kernels:
    """The library functions that generated code calls."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name) if name in OF_TORCH else _of_inductor(name)
        self.__dict__[name] = found
        return found


def _of_inductor(name: str) -> Any:
    from torch._inductor import compile_fx  # noqa: F401  which registers them
    from torch._inductor.select_algorithm import extern_kernels

    return getattr(extern_kernels, name)


def _align(nbytes: Any) -> Any:
    """Round a size up as Inductor aligns a pool of memory."""
    from torch._inductor.utils import _align as align

    return align(nbytes)


# Imports of generated code that take half a second each, for what it may never call.
SLOW_IMPORTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "from torch._inductor.select_algorithm import extern_kernels\n": ("extern_kernels", Kernels),
    "from torch._inductor.codegen.memory_planning import _align as align\n": (
        "align",
        lambda: _align,
    ),
}


class Rerun:
    """Run a generated module again: it takes a list of inputs, empties it, and returns a list."""

    def __init__(self, made: Generated, name: str) -> None:
        self.source_code = made.code
        self.call = _call_of(made, name)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self.call(inputs)


def _call_of(made: Generated, name: str) -> Any:
    module = types.ModuleType(name)
    file = module.__file__ = f"<{name}>"
    module.__dict__.update(made.constants)
    module.__dict__.update(NUMBERS)
    code = made.code
    for line, (imported, make) in SLOW_IMPORTS.items():
        code = code.replace(line, "", 1)
        module.__dict__[imported] = make()
    with patched("loading"), torch.no_grad():
        exec(compile(code, file, "exec"), module.__dict__)
    call = module.__dict__["call"]
    if not made.to_align:
        return call
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    return align_inputs_from_check_idxs(call, made.to_align, OrderedSet(made.written))
