"""The line of the user and the collective that another thread waits in are read from its stack."""

from __future__ import annotations

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
