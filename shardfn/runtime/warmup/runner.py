"""A program that runs op by op until it is compiled."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...compile import Runner
from .switch import Switch


class Warming:
    """Runs a program op by op, and from some call on its compiled code. The compilation starts
    after the first call, which need not share the processors with it.

    Args:
        plain: runs the program op by op.
        compile_now: compiles it.
        switch: says from which call on compiled code runs.
    """

    def __init__(
        self, plain: Runner, compile_now: Callable[[], Runner], switch: Switch
    ) -> None:
        self.plain, self.switch = plain, switch
        self.compiled: Runner | None = None
        self.is_warm = False
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run,
            args=(self._compile, compile_now),
            name=f"shardfn compiles {switch.name}",
            daemon=False,  # a process that ends must not end in the middle of the compiler
        )
        self.lock = threading.Lock()  # held by the call that starts it

    def start(self) -> None:
        """Start the compilation, unless it has started."""
        with self.lock:
            if self.thread.ident is None:
                self.thread.start()

    def _compile(self, compile_now: Callable[[], Runner]) -> None:
        try:
            with torch.no_grad():
                self.compiled = compile_now()
            self.switch.compiled()
        except BaseException as error:  # raised by the next call
            self.error = error

    @property
    def source_code(self) -> str:
        """The generated code, once it is there."""
        return getattr(self.compiled, "source_code", "")

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.is_warm and self.compiled is not None:
            return self.compiled(inputs)
        if self.error is not None:
            raise self.error
        if not self.switch.is_compiled():
            out = self.plain(inputs)
            self.start()
            return out
        assert self.compiled is not None, "a switch decides after the compilation"
        self.is_warm = True
        return self.compiled(inputs)
