"""The line of the user and the collective that another thread waits in are read from its stack."""

from __future__ import annotations

import sys
import threading

import torch

from shardfn.jobs import activity


def test_a_thread_in_a_program_shows_its_line_and_its_collective() -> None:
    arrived, leave = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arrived.set()
            leave.wait(20)
            return x

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    wait = graph.call_module("wait", (x,))
    graph.output(wait)
    program = torch.fx.GraphModule({"wait": Waits()}, graph)

    def run() -> None:
        program(torch.ones(1))

    thread = threading.Thread(target=run)
    thread.start()
    arrived.wait(20)
    line, sends = activity.running(run.__code__, {"wait": "all_reduce over dp"})
    leave.set()
    thread.join()
    assert sends == "all_reduce over dp"
    assert line and line.startswith(__file__)


def test_no_thread_is_in_a_call() -> None:
    assert activity.running((lambda: 0).__code__, {}) == (None, None)


def test_an_instruction_without_a_line_names_the_function_of_the_user() -> None:
    arrived, leave = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        leave.wait(20)

    units = len(wait.__code__.co_code) // 2
    no_line = bytes([0xFF]) * (units // 8 + 1)  # 8 instructions each, of no place
    wait.__code__ = wait.__code__.replace(co_linetable=no_line)

    def run() -> None:
        wait()

    thread = threading.Thread(target=run)
    thread.start()
    arrived.wait(20)
    frame = sys._current_frames()[thread.ident or 0]
    while frame.f_back and frame.f_code is not wait.__code__:
        frame = frame.f_back
    assert frame.f_lineno is None
    of_caller = activity.running(run.__code__, {"all_reduce": "all_reduce over dp"})
    of_function = activity.running(wait.__code__, {})
    leave.set()
    thread.join()
    assert of_caller == (f"{__file__}:{run.__code__.co_firstlineno + 1}", None)
    assert of_function == (f"{__file__}:{wait.__code__.co_firstlineno}", None)
