"""The compilation of kernels starts while Inductor writes the other kernels of their program.

Inductor writes all of them first, on one core, and has the compiler run after that.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .. import threads
from . import units
from .source import Kernel, can_join

LEAST = 20_000  # characters for which it is worth to start a compiler
MOST = 100_000  # characters of a unit, so that two compilers share those of the end
CALL = "cpp_pybinding"  # of Inductor's AsyncCompile, in the code of a program


@contextlib.contextmanager
def kernels_started() -> Iterator[None]:
    """A context in which kernels that this thread writes are compiled in another one, if the
    compiler may have one to itself.
    """
    from torch._inductor.async_compile import get_compile_threads
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    if get_compile_threads() < 2:
        yield
        return
    mine = threads.only_here()

    with ThreadPoolExecutor(1) as pool:
        early = Early(pool)

        def defined(original: Any, wrapper: Any, name: str, body: str, *a: Any, **k: Any) -> Any:
            early.add(body)
            return original(wrapper, name, body, *a, **k)

        try:
            with threads.overridden(PythonWrapperCodegen, "define_kernel", defined, mine):
                yield
        finally:
            units.started.clear()


class Early:
    """The kernels of a program that have been written, and wait for the compiler."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.waiting: dict[str, Kernel] = {}
        self.running: Future[Any] | None = None

    def add(self, text: str) -> None:
        """Note a kernel by the text that will ask for it. Starts the compiler when enough wait.

        Args:
            text: a call in Python. One that is not of a C++ kernel is left alone.
        """
        kernel = read(text)
        if kernel is None or not can_join(kernel):
            return
        self.waiting.update(units.missing([kernel]))
        is_free = self.running is None or self.running.done()
        if is_free and sum(len(x.text) for x in self.waiting.values()) >= LEAST:
            self._start()

    def _start(self) -> None:
        """Compile the first that wait. Where that fails now, it will say so at the end."""
        first: dict[str, Kernel] = {}
        length = 0
        for key, kernel in self.waiting.items():
            length += len(kernel.text)
            if length > MOST and first:
                break
            first[key] = kernel
        with contextlib.suppress(OSError, RuntimeError):
            units.started.append(units.start(first, self))
        self.waiting = {k: x for k, x in self.waiting.items() if k not in first}

    def submit(self, *work: Any) -> Future[Any]:
        """Have the pool do some work."""
        self.running = self.pool.submit(*work)
        return self.running


def read(text: str) -> Kernel | None:
    """The kernel for which a line of a program asks; None if it asks for something else."""
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr != CALL or call.keywords:
        return None
    types, source = map(ast.literal_eval, call.args)
    return Kernel(tuple(types), source)
