"""The kernels of one generated module, compiled together: a few translation units, as many as
there are compiler threads. A kernel that this machine has compiled before is loaded.

Inductor compiles a file for each kernel. Most of that time the compiler reads one header.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import threads
from .source import Kernel, can_join, name_of, unit

Function = Callable[..., None]

_kernels: dict[str, Function] = {}  # key -> compiled function
FOLDER = "shardfn-kernels"  # in Inductor's cache: the unit and the name of each kernel
UNREADABLE = (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError, RecursionError)
PLACE = "shardfn_batch"  # the attribute of Inductor's AsyncCompile


@contextlib.contextmanager
def kernels_joined() -> Iterator[None]:
    """A context in which this thread compiles the C++ kernels of a module together."""
    from torch._inductor.async_compile import AsyncCompile

    mine = threads.only_here()

    with (
        threads.overridden(AsyncCompile, "cpp_pybinding", _noted, mine),
        threads.overridden(AsyncCompile, "wait", _filled, mine),
    ):
        yield


def _noted(original: Any, compiler: Any, types: Sequence[str], text: str) -> Any:
    """Note a kernel that the module asks for, in place of compiling it."""
    from torch._inductor.codecache import LambdaFuture

    kernel = Kernel(tuple(types), text)
    if not can_join(kernel):
        return original(compiler, types, text)
    batch = compiler.__dict__.setdefault(PLACE, Batch())
    alone = lambda: _resolved(original(compiler, types, text))
    place = batch.add(kernel, alone)
    return LambdaFuture(lambda: batch.functions()[place])


def _filled(original: Any, compiler: Any, scope: dict[str, Any]) -> Any:
    """Put the compiled kernels into a module: with one compiler thread Inductor waits for none."""
    if PLACE in compiler.__dict__:
        futures = {name: x for name, x in scope.items() if _is_future(x)}
        scope.update((name, x.result()) for name, x in futures.items())
    return original(compiler, scope)


def _is_future(x: Any) -> bool:
    from torch._inductor.codecache import LambdaFuture

    return isinstance(x, LambdaFuture)


def _resolved(x: Any) -> Function:
    return x.result() if _is_future(x) else x


class Batch:
    """The kernels of one module, and the compiled function of each."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.alone: list[Callable[[], Function]] = []
        self.compiled: list[Function] | None = None

    def add(self, kernel: Kernel, alone: Callable[[], Function]) -> int:
        """Note a kernel, and how Inductor compiles it by itself. Returns its place."""
        self.kernels.append(kernel)
        self.alone.append(alone)
        return len(self.kernels) - 1

    def functions(self) -> list[Function]:
        """The compiled functions, in the order of the kernels."""
        if self.compiled is None:
            keys = keys_of(self.kernels)
            _compile(missing(self.kernels))
            self.compiled = [
                _kernels[key] if key in _kernels else alone()
                for key, alone in zip(keys, self.alone, strict=True)
            ]
        return self.compiled


def _compile(kernels: dict[str, Kernel]) -> None:
    """Compile kernels, in as many units as there are compiler threads, and load them. The kernels
    of a unit that the compiler refuses are left out.
    """
    divided = _divided(kernels)
    with ThreadPoolExecutor(max(1, len(divided))) as pool:
        started = [(keys, _start([kernels[key] for key in keys], pool)) for keys in divided]
        for keys, load in started:
            _take(keys, load)


def _start(kernels: list[Kernel], pool: ThreadPoolExecutor) -> Callable[[], Any]:
    """Compile kernels as one unit, in a thread of a pool. Returns what waits for its module."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_async(unit(kernels), submit_fn=pool.submit)


def _take(keys: list[str], load: Callable[[], Any]) -> None:
    """Load a unit, when it is compiled."""
    from torch._inductor.exc import CppCompileError

    with contextlib.suppress(CppCompileError):
        module = load()
        for i, key in enumerate(keys):
            _kernels[key] = getattr(module, name_of(i))
            _remember(key, module, name_of(i))


def missing(kernels: Sequence[Kernel]) -> dict[str, Kernel]:
    """Those of some kernels that this machine has not compiled before, by key."""
    return {
        key: kernel
        for key, kernel in zip(keys_of(kernels), kernels, strict=True)
        if key not in _kernels and not _load(key)
    }


def _divided(kernels: dict[str, Kernel]) -> list[list[str]]:
    """The keys of the kernels of each unit, of about equal lengths of text. As many units as
    there are compiler threads.
    """
    from torch._inductor.async_compile import get_compile_threads

    count = min(max(1, get_compile_threads()), len(kernels))
    units: list[list[str]] = [[] for _ in range(count)]
    lengths = [0] * count
    for key in sorted(kernels, key=lambda key: (-len(kernels[key].text), key)):
        shortest = lengths.index(min(lengths))
        units[shortest].append(key)
        lengths[shortest] += len(kernels[key].text)
    return units


def compiler_facts() -> str:
    """The compiler, its version and options, and the processor: what kernels depend on.

    Torch finds the instruction set by compiling programs, which takes seconds. These facts
    determine what it finds.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    compiler = get_cpp_compiler()
    version = get_compiler_version_info(compiler)
    options = config.save_config_portable(ignore_private_configs=False)
    cpp = [row for row in sorted(options.items()) if row[0].startswith("cpp")]
    wanted = os.environ.get("ATEN_CPU_CAPABILITY")
    return repr((compiler, version, cpp, _processor(), wanted, torch.__file__))


@functools.cache
def _processor() -> str:
    """The features of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("flags", "Features")
    known = {line for line in lines if line.startswith(kinds)}
    found = [torch.backends.cpu.get_cpu_capability(), *sorted(known)]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    return f"{platform.machine()} {digest}"


def keys_of(kernels: Sequence[Kernel]) -> list[str]:
    """Names for the texts of kernels, with the compiler, its options and torch."""
    same = torch.__version__, compiler_facts()
    said = [repr((same, kernel.types, kernel.text)) for kernel in kernels]
    return [hashlib.sha256(text.encode()).hexdigest() for text in said]


def _load(key: str) -> bool:
    """Load a kernel that has been compiled on this machine. False if there is none."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        found = json.loads(_record(key).read_text())
        path = Path(cache_dir(), found["unit"]).resolve()
        path.relative_to(Path(cache_dir()).resolve())  # no library from elsewhere
        module = CppPythonBindingsCodeCache._load_library(str(path), found["key"])
        _kernels[key] = getattr(module, found["name"])
    except UNREADABLE:
        return False
    return True


def _remember(key: str, module: Any, name: str) -> None:
    """Write down which unit has a kernel, for other processes."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    unit_path = os.path.relpath(module.__file__, cache_dir())
    found = {"unit": unit_path, "key": module.key, "name": name}
    path = _record(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(found, file)
        os.replace(partial, path)


def _record(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), FOLDER, key[:2], f"{key}.json")
