"""Scripts for torchrun, run as they are on n ranks of this process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing.process  # noqa: F401, where a script starts processes
import subprocess  # noqa: F401
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ..errors import CaptureError, call_site
from .process_state import ProcessState

# What one process cannot run for n ranks: the place, the words, and what to do.
OTHER_PROCESSES = (
    ("multiprocessing.process", "BaseProcess.start", "starts a process", "a script for torchrun"),
    (
        "subprocess",
        "Popen.__init__",
        "starts a subprocess",
        "start the subprocess outside of the script",
    ),
    ("torch.distributed.rpc", "init_rpc", "uses RPC", "collectives and messages"),
    (
        "shardfn.mesh",
        "join_world",
        "calls sf.make_mesh, which sets up a process group of torch.distributed",
        "run it by torchrun, which compares the programs of ranks; or use sf.check(fn, *args)",
    ),
)
OF_DEVICES = ("CUDA", "dummy base class", "NVIDIA")  # in torch's errors of a CPU build


@attrs.frozen
class LoaderUse:
    """A data loader that shares samples among ranks.

    Args:
        replicas: the number of ranks.
        batch_size: of each rank.
    """

    replicas: int
    batch_size: int | None


OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")


class Script:
    """A script, and the arguments of its command line.

    Args:
        path: of the script.
        arguments: of its command line.
        whole: the data loaders of a run on many ranks, whose batches are made whole on one rank.
    """

    def __init__(
        self, path: str, arguments: Sequence[str], whole: Sequence[LoaderUse] = ()
    ) -> None:
        self.path = Path(path).resolve()
        self.arguments, self.whole = [*arguments], whole
        self.loaders: dict[int, list[LoaderUse]] = {}  # by rank
        self.name = f"audit({self.path.name})"
        if not self.path.is_file():
            raise self._error(f"does not exist: no file {path}", "the path of a file")
        self.code = compile(self.path.read_bytes(), str(self.path), "exec")

    def __call__(self) -> None:
        """Run the script on the calling rank, in the context of `installed`."""
        module: Any = types.ModuleType("__main__")
        module.__file__ = str(self.path)
        sys.modules["__main__"] = module
        try:
            exec(self.code, vars(module))
        except SystemExit as end:
            if end.code not in (None, 0):
                raise self._error(
                    f"ends with code {end.code}", "a script that ends with exit code 0"
                ) from end
        except (AssertionError, RuntimeError) as error:
            if any(words in str(error) for words in OF_DEVICES):
                raise self._error(f"uses a GPU: {error}", "a device of the CPU") from error
            raise

    def _error(self, words: str, fix: str) -> CaptureError:
        return CaptureError.of(
            self.name,
            f"the script {words}",
            needed="a script that torchrun can start, on the CPU",
            fix=fix,
            source=call_site(),
        )

    def state(self, environment: Any, states: Any) -> ProcessState:
        """Make the state of a rank, which imports modules of the script's folder for itself."""
        state = ProcessState(environment, states, str(self.path.parent))
        state.modules["__main__"] = None
        return state

    @contextlib.contextmanager
    def installed(self, rank: Callable[[], int | None]) -> Iterator[None]:
        """Give the process the script's command line, and watch what one process cannot run.

        Args:
            rank: returns the rank of the calling thread; None for other threads.
        """
        refuse = functools.partial(self._refused, rank)
        with contextlib.ExitStack() as stack:
            arguments = [str(self.path), *self.arguments]
            stack.enter_context(mock.patch.object(sys, "argv", arguments))
            stack.enter_context(mock.patch.object(sys, "path", [str(self.path.parent), *sys.path]))
            for module, name, words, fix in OTHER_PROCESSES:
                if module in sys.modules:
                    *path, name = name.split(".")
                    owner = functools.reduce(getattr, path, sys.modules[module])
                    patched = refuse(getattr(owner, name), words, fix)
                    stack.enter_context(mock.patch.object(owner, name, patched))
            original = DataLoader.__init__

            def init(loader: Any, *args: Any, **kwargs: Any) -> None:
                self._load(original, rank(), loader, *args, **kwargs)

            stack.enter_context(mock.patch.object(DataLoader, "__init__", init))
            yield

    def _refused(self, rank: Any, original: Any, words: str, fix: str) -> Any:
        """Refuse a call by a rank."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if rank() is None:
                return original(*args, **kwargs)
            raise self._error(f"{words}, which simulated ranks in one process cannot do", fix)

        return call

    def _load(self, original: Any, rank: int | None, *args: Any, **kwargs: Any) -> None:
        """Make a data loader without processes of its own. On one rank its batches are those of
        all ranks.
        """
        call = inspect.signature(original).bind(*args, **kwargs)
        options = call.arguments
        if rank is not None:
            for name in OF_WORKERS:
                options.pop(name, None)
            batches = options.get("batch_sampler")
            sampler = options.get("sampler") or getattr(batches, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                mine = self.loaders.setdefault(rank, [])
                size = getattr(batches, "batch_size", None) or options.get("batch_size", 1)
                if len(mine) < len(self.whole):
                    use = self.whole[len(mine)]
                    size = (use.batch_size or 1) * use.replicas
                    if batches is None:
                        options["batch_size"] = size
                    else:
                        batches.batch_size = size
                mine.append(LoaderUse(sampler.num_replicas, size))
        original(*call.args, **call.kwargs)
