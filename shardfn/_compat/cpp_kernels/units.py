"""Compilation of a module's C++ kernels: joined in few translation units, in parallel, and cached
on disk.

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
    """Enter a context in which Inductor, in this thread, compiles the C++ kernels of a module
    together.
    """
    from torch._inductor.async_compile import AsyncCompile

    mine = threads.only_here()

    with (
        threads.overridden(AsyncCompile, "cpp_pybinding", _queue_kernel, mine),
        threads.overridden(AsyncCompile, "wait", _resolve_kernels, mine),
    ):
        yield


def _queue_kernel(original: Any, compiler: Any, types: Sequence[str], text: str) -> Any:
    """Patch AsyncCompile.cpp_pybinding: queue a kernel in the module's Batch; return a future."""
    from torch._inductor.codecache import LambdaFuture

    kernel = Kernel(tuple(types), text)
    if not can_join(kernel):
        return original(compiler, types, text)
    batch = compiler.__dict__.setdefault(PLACE, Batch())
    alone = lambda: _resolved(original(compiler, types, text))
    place = batch.add(kernel, alone)
    return LambdaFuture(lambda: batch.functions()[place])


def _resolve_kernels(original: Any, compiler: Any, scope: dict[str, Any]) -> Any:
    """Patch AsyncCompile.wait: resolve the futures of kernels in a generated module's globals,
    which Inductor leaves unresolved with one compiler thread.
    """
    if PLACE in compiler.__dict__:
        futures = {name: x for name, x in scope.items() if _is_future(x)}
        scope.update((name, x.result()) for name, x in futures.items())
    return original(compiler, scope)


def _is_future(x: Any) -> bool:
    """Check whether a value is a future of Inductor's."""
    from torch._inductor.codecache import LambdaFuture

    return isinstance(x, LambdaFuture)


def _resolved(x: Any) -> Function:
    """Return a compiled function, of itself or of its future."""
    return x.result() if _is_future(x) else x


class Batch:
    """The queued kernels of one generated module, and their compiled functions."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.alone: list[Callable[[], Function]] = []
        self.compiled: list[Function] | None = None

    def add(self, kernel: Kernel, alone: Callable[[], Function]) -> int:
        """Queue a kernel, with a function that compiles it alone as a fallback. Returns its
        position.
        """
        self.kernels.append(kernel)
        self.alone.append(alone)
        return len(self.kernels) - 1

    def functions(self) -> list[Function]:
        """Compile the queued kernels once, and return the functions in their order."""
        if self.compiled is None:
            keys = keys_of(self.kernels)
            _compile(missing(self.kernels))
            self.compiled = [
                _kernels[key] if key in _kernels else alone()
                for key, alone in zip(keys, self.alone, strict=True)
            ]
        return self.compiled


def _compile(kernels: dict[str, Kernel]) -> None:
    """Compile kernels in as many translation units as there are compiler threads, and load them.
    Skip the kernels of a unit that the compiler refuses.
    """
    divided = _divided_by_thread(kernels)
    with ThreadPoolExecutor(max(1, len(divided))) as pool:
        started = [(keys, _start_unit([kernels[key] for key in keys], pool)) for keys in divided]
        for keys, load in started:
            _register_unit(keys, load)


def _start_unit(kernels: list[Kernel], pool: ThreadPoolExecutor) -> Callable[[], Any]:
    """Start to compile one translation unit in a thread pool. Returns a function that waits for the
    loaded module.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_async(unit(kernels), submit_fn=pool.submit)


def _register_unit(keys: list[str], load: Callable[[], Any]) -> None:
    """Load a compiled translation unit, and register the function of each key, in memory and on
    disk.
    """
    from torch._inductor.exc import CppCompileError

    with contextlib.suppress(CppCompileError):
        module = load()
        for i, key in enumerate(keys):
            _kernels[key] = getattr(module, name_of(i))
            _write_to_disk(key, module, name_of(i))


def missing(kernels: Sequence[Kernel]) -> dict[str, Kernel]:
    """Filter kernels to those without a compiled function in memory or on disk, by key."""
    return {
        key: kernel
        for key, kernel in zip(keys_of(kernels), kernels, strict=True)
        if key not in _kernels and not _load_from_disk(key)
    }


def _divided_by_thread(kernels: dict[str, Kernel]) -> list[list[str]]:
    """Partition kernels, by key, into one translation unit a compiler thread, of about equal text
    length.
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
    """Describe the compiler, its version and options, and the processor, as part of the key of
    kernels.

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
    """Return the architecture, and a digest of the CPU's feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("flags", "Features")
    features = {line for line in lines if line.startswith(kinds)}
    facts = [torch.backends.cpu.get_cpu_capability(), *sorted(features)]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"{platform.machine()} {digest}"


def keys_of(kernels: Sequence[Kernel]) -> list[str]:
    """Digest each kernel's text, the compiler and torch's version to its cache key."""
    common = torch.__version__, compiler_facts()
    texts = [repr((common, kernel.types, kernel.text)) for kernel in kernels]
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def _load_from_disk(key: str) -> bool:
    """Load a kernel from the disk cache by its key. Returns False if it is not there."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        record = json.loads(_record_path(key).read_text())
        path = Path(cache_dir(), record["unit"]).resolve()
        path.relative_to(Path(cache_dir()).resolve())  # no library from elsewhere
        module = CppPythonBindingsCodeCache._load_library(str(path), record["key"])
        _kernels[key] = getattr(module, record["name"])
    except UNREADABLE:
        return False
    return True


def _write_to_disk(key: str, module: Any, name: str) -> None:
    """Write to the disk cache which compiled module, and which of its functions, has the kernel of
    a key.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    unit_path = os.path.relpath(module.__file__, cache_dir())
    record = {"unit": unit_path, "key": module.key, "name": name}
    path = _record_path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(partial, path)


def _record_path(key: str) -> Path:
    """Return the path of the JSON file that describes a kernel in the disk cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir(), FOLDER, key[:2], f"{key}.json")
