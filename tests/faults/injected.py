"""Runs the job with a fault in processes of their own, and says what came of it on each rank."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.multiprocessing as mp

from tests.faults.job import Fault, run
from tests.faults.launched import free_port
from tests.support.ranks import _place, _serve

SLACK = 5.0  # seconds after its timeout within which a fault is told
START = 20.0  # seconds for processes to start, and for what they do without a fault


@attrs.frozen
class Outcome:
    """What came of a fault.

    Args:
        fault: it.
        texts: of each rank: "right", "wrong", an error, a signal, or "hung".
        seconds: from the fault to the last error of the other ranks; None if nothing is raised.
        verdict: "named", "right", "raw", "silent", "hung", "late" or "false alarm".
    """

    fault: Fault
    texts: list[str]
    seconds: float | None
    verdict: str


def injected(fault: Fault) -> Outcome:
    """Run the job with this fault."""
    _serve()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        port = str(free_port())
        processes = [
            context.Process(target=_process, args=(rank, fault, folder, port, _place()))
            for rank in range(fault.size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + START + fault.timeout + SLACK
        watched = [
            p
            for rank, p in enumerate(processes)
            if not (fault.what == "SIGSTOP" and rank in fault.ranks)
        ]
        for process in watched:
            process.join(max(deadline - time.monotonic(), 0.01))
        texts = [_text(p, Path(folder, str(r))) for r, p in enumerate(processes)]
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        seconds = _seconds(fault, folder)
        return Outcome(fault, texts, seconds, _verdict(fault, texts, seconds))


def _text(process: Any, file: Path) -> str:
    if process.is_alive():
        return "hung"
    code = process.exitcode or 0
    end = signal.Signals(-code).name if code < 0 else f"exit {code}"
    if not file.exists():
        return end
    return file.read_text() if code >= 0 else f"{file.read_text()}\nand then {end}"


def _seconds(fault: Fault, folder: str) -> float | None:
    """The seconds from the fault to the last error of another rank."""
    faults = [float(x.read_text()) for x in Path(folder).glob("fault *")]
    starts = [float(x.read_text()) for x in Path(folder).glob("start *")]
    raised = {int(x.name.split()[1]): float(x.read_text()) for x in Path(folder).glob("raised *")}
    others = [at for r, at in raised.items() if r not in fault.ranks or fault.told]
    first = min(faults or starts, default=None)
    return None if first is None or not others else max(others) - first


def _verdict(fault: Fault, texts: list[str], seconds: float | None) -> str:
    told = [text for rank, text in enumerate(texts) if rank not in fault.ranks or fault.told]
    if any(text == "hung" for text in told):
        return "hung"
    if fault.expected == "right":
        return "right" if all(x == "right" for x in texts) else "false alarm"
    if any(text in ("right", "wrong") for text in told):
        return "silent"
    named = fault.expected.split(" or ")
    if not all(text.partition(":")[0] in named for text in told):
        return "raw"
    limit = fault.timeout + SLACK
    return "late" if seconds is not None and seconds > limit else "named"


def _process(rank: int, fault: Fault, folder: str, port: str, place: str | None) -> None:
    """One rank: as Python runs a script, with its exit."""
    import shardfn

    assert shardfn.__file__ == place, (shardfn.__file__, place)
    own = fault.own if rank in fault.ranks else {}
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(fault.size),
        "RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
        **fault.variables,
        **own,
    }
    os.environ.update(variables)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    at = Path(folder)
    (at / f"start {rank}").write_text(str(time.monotonic()))

    def write(text: str) -> None:
        (at / f"raised {rank}").write_text(str(time.monotonic()))
        (at / f"{rank}.part").write_text(text)
        (at / f"{rank}.part").rename(at / str(rank))

    sys.excepthook = lambda kind, error, _: write(f"{kind.__name__}: {error}")
    code = 1
    try:
        write(run(rank, fault, folder))
        code = 0
    except SystemExit:
        write("exit 0")
        code = 0
    except BaseException as error:
        write(f"{type(error).__name__}: {error}")
        sys.last_value = error
    atexit._run_exitfuncs()
    os._exit(code)
