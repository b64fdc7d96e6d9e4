"""Compilation and loading of the C++ functions that check a call's arguments. They are optional.

They are an option: where there are none, Python functions of the same answers run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

log = logging.getLogger("shardfn")
NAME = "shardfn_calls"
SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared")
SWITCH = "SHARDFN_CPP_CALLS"  # 0: Python's functions alone
SECONDS = 300.0  # the most that the compiler may take


@attrs.define(eq=False)
class Loaded:
    """The loaded module of C++ functions. None where Python's twins run."""

    functions: Any = None


_loaded = Loaded()


def native() -> Any:
    """Return the loaded module of C++ functions. None where Python's twins run."""
    return _loaded.functions


@contextlib.contextmanager
def only_python() -> Iterator[None]:
    """Enter a context in which Python's twins run, in all threads."""
    before, _loaded.functions = _loaded.functions, None
    try:
        yield
    finally:
        _loaded.functions = before


def is_wanted() -> bool:
    """Check that C++ functions may be used: Python has its global lock, and SHARDFN_CPP_CALLS is
    not 0.
    """
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return has_lock and os.environ.get(SWITCH) != "0"


def library_name() -> str:
    """Return the cache name of the compiled library: a digest of its sources, torch, Python and
    flags.
    """
    about = [
        torch.__version__,
        torch.version.git_version,
        sys.version,
        platform.machine(),
        torch.__file__,
        repr(FLAGS),
    ]
    digest = hashlib.sha256("\n".join(about).encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return f"calls-{digest.hexdigest()}"


def compiled_library() -> bytes:
    """Compile the library, and return its bytes.

    Raises:
        OSError: the compiler, or a folder to write to, is missing.
        RuntimeError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(prefix="shardfn-calls-") as folder:
        out = Path(folder, f"{NAME}.so")
        line = _command(out)
        log.info("compiling: %s", " ".join(line))
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"{line[0]}: {done.stderr[-2000:]}")
        return out.read_bytes()


def load_library(binary: bytes) -> bool:
    """Load the library from its bytes. Returns whether it works with this torch."""
    with tempfile.TemporaryDirectory(prefix="shardfn-calls-") as folder:
        path = Path(folder, f"{NAME}.so")  # in a folder of mode 0700
        path.write_bytes(binary)
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_loader(NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    if not _starts(module):
        return False
    _loaded.functions = module
    return True


def _starts(module: Any) -> bool:
    """Initialize the loaded library with torch's classes, and test it on examples."""
    example = torch.empty(2, 3)
    knows = module.start(
        torch.Tensor,
        torch.nn.Parameter,
        DTensor,
        torch._C._swap_tensor_impl,
        example,
        example._cdata,
    )
    record = module.layouts([example]) if knows else None
    if record is None:
        return False
    others = [
        torch.empty(3, 2).t(),
        torch.empty(2, 3, dtype=torch.int32),
        torch.empty(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.empty(2, 3), requires_grad=False),
    ]
    is_same = module.same_tensors(record, [torch.empty(2, 3)])
    return is_same and not any(module.same_tensors(record, [x]) for x in others)


def _sources() -> list[Path]:
    """List the library's C++ files."""
    return sorted(x for x in SOURCES.iterdir() if x.suffix in (".cpp", ".h"))


def _command(out: Path) -> list[str]:
    """Build the compiler's command line for the library."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = shutil.which(get_cpp_compiler())
    if compiler is None:
        raise FileNotFoundError("a C++ compiler")
    home = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    folders = [str(home / "include"), sysconfig.get_paths()["include"]]
    mac = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [
        compiler,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{folder}" for folder in folders),
        str(SOURCES / "calls.cpp"),
        "-o",
        str(out),
        f"-L{home / 'lib'}",
        "-lc10",
        *mac,
    ]
