"""The execution of a program op by op, until the program is compiled."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..._compat.compilations.undisturbed import SettingsChanged
from ...compile import Runner
from .switch import Switch


class Warming:
    """Runs a program op by op, and from some call on its compiled code. The compilation starts
    after the first call, which need not share the processors with it. If torch's settings are
    others meanwhile, the next call compiles: its settings are those of the program.

    Args:
        plain: runs the program op by op.
        compile_now: compiles it. Raises SettingsChanged if torch's settings are not those of a
            call.
        switch: says from which call on compiled code runs.
    """

    def __init__(self, plain: Runner, compile_now: Callable[[], Runner], switch: Switch) -> None:
        self.plain, self.switch = plain, switch
        self.compiled: Runner | None = None
        self.is_warm = self.is_disturbed = False
        self.compile_now = compile_now
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run,
            args=(self._in_background,),
            name=f"shardfn compiles {switch.name}",
            daemon=False,  # a process that ends must not end in the middle of the compiler
        )
        self.lock = threading.Lock()  # held by the call that starts it

    def start(self) -> None:
        """Start the compilation, unless it has started."""
        with self.lock:
            if self.thread.ident is None:
                self.thread.start()

    def _in_background(self) -> None:
        self._compile()
        if self.compiled is not None:
            self._agree()

    def _compile(self) -> None:
        try:
            with torch.no_grad():
                self.compiled = self.compile_now()
        except SettingsChanged:
            self.is_disturbed = True
        except BaseException as error:  # raised by the next call
            self.error = error

    def _agree(self) -> None:
        try:
            self.switch.compiled()
        except BaseException as error:  # raised by the next call
            self.error = error

    def _in_this_call(self) -> None:
        """Compile now, while the call waits."""
        with self.lock:
            if self.is_disturbed:
                self.is_disturbed = False
                self._compile()
                if self.compiled is not None:
                    self.thread = threading.Thread(target=self._agree)
                    self.thread.start()

    @property
    def source_code(self) -> str:
        """The generated code, once it is there."""
        return getattr(self.compiled, "source_code", "")

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.is_warm and self.compiled is not None:
            return self.compiled(inputs)
        if self.is_disturbed:
            self._in_this_call()
        if self.error is not None:
            raise self.error
        if not self.switch.is_compiled():
            out = self.plain(inputs)
            self.start()
            return out
        assert self.compiled is not None, "the switch to compiled code comes after the compilation"
        self.is_warm = True
        return self.compiled(inputs)
