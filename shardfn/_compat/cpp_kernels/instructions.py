"""Detection of the processor's vector instruction sets (AVX2, AVX512) without building programs.

Inductor builds and loads a program for each set and each of its extensions: six, in eight seconds
of a machine's first compilation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import threads

PLACE = "Linux", "x86_64"
# The function of torch's library that vectors of so many bits call, if torch was built for them.
EXP = {256: "Sleef_expf8_u10", 512: "Sleef_expf16_u10"}


@contextlib.contextmanager
def quick_instruction_check() -> Iterator[None]:
    """Enter a context in which Inductor detects instruction sets by compiler flags and torch's
    exported symbols. Where these do not confirm a set, Inductor builds its test program.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    with threads.replaced(VecISA, "check_build", _with_quick_check):
        yield


def _with_quick_check(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap Inductor's check of an instruction set: skip its test program where `is_known` confirms
    the set.
    """
    return lambda isa, code: is_known(isa, code) or original(isa, code)


def is_known(isa: Any, code: str) -> bool:
    """Check that a test program for an instruction set would compile and load, without linking it.

    Args:
        isa: the set, of Inductor.
        code: the program, in C++: one with torch's vectors, or a few intrinsic functions.
    """
    if (platform.system(), platform.machine()) != PLACE:
        return False
    flags = isa.build_arch_flags().split()
    if code != isa._avx_code:
        return _compiles(code, flags)
    exp = EXP.get(isa.bit_width())
    return _is_exported_by_torch(exp) and _compiles("", flags)


def _compiles(code: str, flags: list[str]) -> bool:
    """Check that the C++ compiler accepts code with these flags."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = get_cpp_compiler()
    ends = "-x", "c++", "-S", "-o", os.devnull, "-"
    command = [compiler, *flags, *ends]
    try:
        done = subprocess.run(command, input=code.encode(), capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _is_exported_by_torch(name: str | None) -> bool:
    """Check whether libtorch_cpu.so exports a function."""
    if name is None:
        return False
    folder = Path(torch.__file__).parent / "lib"
    library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    return hasattr(library, name)
