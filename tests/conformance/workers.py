"""Judge many operators in processes that may die: what a crash takes with it is one operator."""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

import attrs
import torch

from conformance import calls, judge
from conformance.judge import Verdict

PATIENCE = 600.0  # seconds for one operator


@attrs.frozen
class Found:
    """Everything about one operator."""

    name: str
    seconds: float
    verdicts: tuple[Verdict, ...]


def judged(name: str, most: int) -> Found:
    """Judge one operator in this process."""
    torch.set_num_threads(1)
    began, op = time.perf_counter(), calls.entries()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = [v for call in calls.calls(name, op, most) for v in judge.verdicts(call)]
        except Exception as error:  # the database itself may need what is not installed
            found = [Verdict(judge.CRASHED, "value", name, judge.said(error))]
    return Found(name, time.perf_counter() - began, tuple(found))


@attrs.define(eq=False)
class Worker:
    """A process that judges one operator after the other."""

    most: int
    pipe: Any = None
    process: Any = None
    name: str = ""
    began: float = 0.0

    def give(self, name: str) -> None:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.most), daemon=True)
            self.process.start()
            theirs.close()
        self.name, self.began = name, time.monotonic()
        self.pipe.send(name)

    def taken(self) -> Found:
        """The answer, or what became of the process instead."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            said = f"the process died of {signal.Signals(-code).name if code < 0 else code}"
            return Found(
                self.name,
                time.monotonic() - self.began,
                (Verdict(judge.CRASHED, "value", self.name, said),),
            )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()


def serve(pipe: Any, most: int) -> None:
    """A worker's life."""
    while True:
        pipe.send(judged(pipe.recv(), most))


def judged_all(names: Sequence[str], most: int, jobs: int) -> Iterator[Found]:
    """Judge operators side by side, in whatever order they finish."""
    left, workers = list(reversed(names)), [Worker(most) for _ in range(jobs)]
    busy: list[Worker] = []
    try:
        while left or busy:
            for worker in workers:
                if left and worker not in busy:
                    worker.give(left.pop())
                    busy.append(worker)
            ready = wait([w.pipe for w in busy], timeout=5.0)
            for worker in [w for w in busy if w.pipe in ready]:
                busy.remove(worker)
                yield worker.taken()
            for worker in [w for w in busy if time.monotonic() - w.began > PATIENCE]:
                worker.process.kill()  # its pipe then says so
    finally:
        for worker in workers:
            worker.stop()
