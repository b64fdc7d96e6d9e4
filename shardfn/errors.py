"""The error class `ShardError`, its subclasses, and the function `problem`, which formats error
messages.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any, Self

import torch

from .source_text import located

SHOWN_RANKS = 16
_CELL = re.compile(r"ipython-input-(\d+)-")  # in the name that IPython gives a cell's code
_HERE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = (
    "/optree/",
    "/shardfn/kernels/",
    "/shardfn_pytest/",
    "/torchinductor_",
    "<string>",
    "<frozen",
    "<eval_with_key>",
    "<attrs",
    "importlib/",
    "contextlib.py",
    "typing_extensions.py",
)


def require_distributed() -> None:
    """Check that torch has torch.distributed, which every part needs.

    Raises:
        ImportError: a build of torch without it.
    """
    if not torch.distributed.is_available():
        raise ImportError(
            "shardfn: this build of torch has no torch.distributed\n  needed: a build of "
            "torch with torch.distributed, such as PyPI's builds for Linux\n  try: pip "
            "install torch; or set USE_DISTRIBUTED=1 when you build torch from source"
        )


require_distributed()  # before the imports that fail without it


class ShardError(Exception):
    """The base class of shardfn's errors.

    Args:
        message: the full text of the error, with the problem, what was needed and what to try.
        arg_path: the path of the argument (or output) of the function, such as `params['w']`.
        mesh: the device mesh.
        placements: the requested placements.
        dim: the tensor dim.
        source: the place in the user's code, as `file:line`.
        fix: the suggested change.
        module: the path of the submodule that runs the op at the source line of the error.

    Example:
        >>> import torch, shardfn as sf
        >>> try:
        ...     sf.jit(lambda x: x[x > 0])(torch.ones(3))
        ... except sf.ShardError as error:
        ...     print(error.fix)
        torch.where(mask, x, 0), x * mask, or torch.nonzero_static(...
    """

    def __init__(
        self,
        message: str,
        *,
        arg_path: str | None = None,
        mesh: Any = None,
        placements: Any = None,
        dim: int | None = None,
        source: str | None = None,
        fix: str | None = None,
        module: str | None = None,
    ) -> None:
        super().__init__(message)
        self.arg_path = arg_path
        self.mesh = mesh
        self.placements = placements
        self.dim = dim
        self.source = source
        self.fix = fix
        self.module = module

    @classmethod
    def of(
        cls,
        where: str,
        *lines: str,
        needed: str | None = None,
        fix: str | None = None,
        source: str | None = None,
        module: str | None = None,
        **fields: Any,
    ) -> Self:
        """Create an error whose text is built from the arguments.

        Args:
            where: the function and the argument that the error is about.
            lines: the problem, with one line for each mismatch.
            needed: a description of the allowed values.
            fix: the suggested change.
            source: `file:line` in the user's code.
            module: the path of the submodule that runs the op at the source line of the error.
            fields: other fields of the error, such as arg_path.

        Returns:
            The error.

        Example:
            >>> print(TreeError.of("shard(f)", "got 1", needed="2", fix="add 1"))
            shard(f): got 1
              needed: 2
              try: add 1
        """
        text = problem(where, *lines, needed=needed, fix=fix, source=source, module=module)
        return cls(text, fix=fix, source=source, module=module, **fields)

    def locate(self, source: str | None, module: str | None = None) -> None:
        """Add the user's source line to an error that has no source line.

        Args:
            source: the source line as `file:line`, or None if the line is not known.
            module: the path of the submodule that runs the op at the source line of the error.
        """
        if self.source is not None or source is None:
            return
        head, *lines = str(self).split("\n")
        advice = [i for i, line in enumerate(lines) if line.startswith(("  needed: ", "  try: "))]
        lines.insert(
            advice[0] if advice else len(lines), f"  at: {located(source, module, full=True)}"
        )
        self.args = ("\n".join([head, *lines]),)
        self.source = source
        self.module = module


class PlacementError(ShardError):
    """Raised if a placement does not fit its tensor or its mesh, or differs from the declared
    placement.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     sf.distribute(torch.ones(4), mesh, sf.P("tp"))
        Traceback (most recent call last):
        shardfn.errors.PlacementError: distribute: the tensor: P('tp') names axis 'tp'; ...
    """


class TreeError(ShardError):
    """Raised if a tree of placements or arguments has a wrong structure.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     sf.distribute({"w": torch.ones(4)}, mesh, {"v": sf.P()})
        Traceback (most recent call last):
        shardfn.errors.TreeError: distribute: the placements do not match the given tree...
    """


class CaptureError(ShardError):
    """Raised if a function cannot be captured as one pure program.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.jit(lambda x: x[x > 0])(torch.ones(3))
        Traceback (most recent call last):
        shardfn.errors.CaptureError: jit(<lambda>): the shape of x[mask]...
    """


class TorchVersionError(ShardError):
    """Raised if a torch version is not supported, or lacks a function that shardfn patches.

    Example:
        >>> import torch, shardfn as sf
        >>> try:
        ...     y = sf.jit(torch.neg, backend="aten")(torch.ones(2))
        ... except sf.TorchVersionError as error:
        ...     print(error.fix)  # such as: pip install 'torch>=2.13,<2.16'
        >>> y
        tensor([-1., -1.])
    """


class RuleError(ShardError):
    """Raised if the sharding rule of an operator raises an error, or allows no placement for a
    call.

    Example:
        >>> import torch, shardfn as sf
        >>> sf.rule(torch.ops.aten.cumsum.default, "i j -> i j", example=[torch.ones(4, 3), 0])
        Traceback (most recent call last):
        shardfn.errors.RuleError: rule(aten.cumsum.default): the strategy (0,) -> (0,) ...
    """


class DivergenceError(ShardError):
    """Raised if ranks differ in a value, a program or the next collective, or if they deadlock.

    Example:
        >>> import torch, shardfn as sf
        >>> def step(x):
        ...     if torch.distributed.get_rank() == 0:
        ...         torch.distributed.all_reduce(x)
        ...     return x
        >>> sf.audit(step, lambda x: x, torch.ones(4), world=2)
        Traceback (most recent call last):
        shardfn.errors.DivergenceError: audit(step): all ranks wait for each other...
    """


SAME_COLLECTIVES = (  # what to do where ranks differ in them
    "the same collectives with the same shapes on every rank (pad tensors to one size, or use "
    "DTensor.from_local(x, mesh, placements, shape=, stride=))"
)


class RendezvousError(ShardError):
    """Raised if the processes of a job cannot connect.

    Example:
        >>> from unittest import mock
        >>> import shardfn as sf
        >>> with mock.patch.dict("os.environ", TORCHELASTIC_RUN_ID="job", RANK=""):
        ...     sf.make_mesh((1,), ("dp",))
        Traceback (most recent call last):
        shardfn.errors.RendezvousError: make_mesh, environment: ...RANK...
    """


class ScheduleError(ShardError):
    """Raised if a pipeline schedule is incomplete, deadlocks, or needs more memory than allowed.

    Example:
        >>> import shardfn as sf
        >>> backward_first = [[("BW", 0, 0), ("F", 0, 0)]]
        >>> sf.Schedule("mine", backward_first).check(1)
        Traceback (most recent call last):
        shardfn.errors.ScheduleError: Schedule.check, mine: too early: pipeline rank 0 ...
    """


class RankLostError(ShardError):
    """Raised if a rank has ended, has stopped, has left after an error, or does not answer.

    Args:
        message: the full text of the error.
        rank: the lost rank.
        host: the host of the lost rank.
        heard: the seconds since the last heartbeat of the lost rank.
        doing: the call or the phase (such as capture), and the source line, that the lost rank
            reported in its last heartbeat.
        fields: the fields of the base class ShardError, such as arg_path.

    Example:
        >>> error = RankLostError("step: rank 3 on host b has ended", rank=3, host="b")
        >>> error.rank, error.host
        (3, 'b')
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        heard: float | None = None,
        doing: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.rank = rank
        self.host = host
        self.heard = heard
        self.doing = doing


class CapacityError(ShardError):
    """Raised if a rank would receive more rows than its buffer holds. The CapacityError is raised
    before any rank sends or drops a row.

    Args:
        message: the full text of the error.
        rank: the index, along the mesh axis, of the rank that would receive the most rows.
        received: the number of rows that the rank with the most rows would receive.
        bound: the number of rows that the buffer of a rank holds.
        fields: the fields of the base class ShardError, such as arg_path.

    Example:
        >>> import torch, shardfn as sf
        >>> def send(x, counts):
        ...     return sf.ragged_all_to_all(x, counts, "ep", rows=2)[0]
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("ep",))
        ...     to_first = torch.tensor([3, 0])
        ...     sf.shard_map(send, mesh, (sf.P("ep"), sf.P()), sf.P("ep"))(
        ...         torch.ones(6, 1), to_first
        ...     )
        Traceback (most recent call last):
        shardfn.errors.CapacityError: ...
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        received: int | None = None,
        bound: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.rank = rank
        self.received = received
        self.bound = bound


class BudgetError(ShardError):
    """Raised if a program costs more than allowed, or if its cost differs from its lock file.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     mean = sf.shard(torch.mean, mesh, sf.P("dp"))
        ...     sf.assert_comms(mean, torch.ones(4), counts={"all_reduce": 0})
        Traceback (most recent call last):
        shardfn.errors.BudgetError: shard(mean): 1 all_reduce, and 0 in the budget: ...
    """


class FakeValueError(ShardError):
    """Raised if a value is read in a simulated world that computes no values (`numerics=False`).

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2, numerics=False):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     sf.full(sf.distribute(torch.ones(4), mesh, sf.P("dp"))).sum().item()
        Traceback (most recent call last):
        shardfn.errors.FakeValueError: ...
    """


class CheckpointError(ShardError):
    """Raised if a checkpoint cannot be written, is damaged, or holds a different tree than
    requested.

    Example:
        >>> import tempfile, torch, shardfn as sf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sf.save(folder, {"w": torch.ones(2)})
        ...     sf.load(folder, {"v": torch.ones(2)})
        Traceback (most recent call last):
        shardfn.errors.CheckpointError: load: ...
    """


class ArtefactError(ShardError):
    """Raised if a compiled program cannot be saved, is damaged, or was saved for another
    environment.

    Example:
        >>> import os, tempfile, shardfn as sf
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "step.sf")
        ...     with open(path, "w") as file:
        ...         _ = file.write("text")
        ...     sf.load_compiled(path)
        Traceback (most recent call last):
        shardfn.errors.ArtefactError: load_compiled, path: ...
    """


def listed(ranks: Iterable[int]) -> str:
    """Ranks as short text.

    Example:
        >>> listed([3]), listed([0, 2]), listed([])
        ('rank 3', 'ranks 0, 2', 'none')
    """
    first = list(itertools.islice(ranks, SHOWN_RANKS + 1))
    more = ", ..." if len(first) > SHOWN_RANKS else ""
    word = "rank" if len(first) == 1 else "ranks"
    shown = ", ".join(map(str, first[:SHOWN_RANKS]))
    return f"{word} {shown}{more}" if first else "none"


@functools.lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Return whether a file belongs to torch, to shardfn or to a library, rather than
    to the user.
    """
    library = any(part in file for part in _LIBRARIES) or file.startswith(_TORCH)
    return library or is_inside(file)


def is_users(file: str) -> bool:
    """Return whether a file belongs to the user: neither to a library nor to Python itself."""
    return not is_ours(file) and ("-packages" in file or not file.startswith(_PYTHON))


def is_inside(file: str) -> bool:
    """Return whether a file belongs to shardfn itself."""
    return file.startswith(_HERE)


def warn(text: str) -> None:
    """Warn at the line of user code that called into shardfn."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def user_frame() -> types.FrameType | None:
    """Return the innermost frame of user code that called into shardfn."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def call_site() -> str | None:
    """Return the `file:line` of user code that called into shardfn."""
    frame = user_frame()
    return source_at(frame.f_code.co_filename, frame.f_lineno) if frame else None


def source_at(file: str, line: int | str | None) -> str:
    """Format a source line as errors and programs name it; of a notebook, its cell and the line.

    Example:
        >>> source_at("train.py", 3), source_at("<ipython-input-10-5e1f7>", 2)
        ('train.py:3', 'Cell In[10], line 2')
    """
    cell = _notebook_cell(file)
    return f"{file}:{line}" if cell is None else f"Cell {cell}, line {line}"


def _notebook_cell(file: str) -> str | None:
    """Return the cell of a notebook that a file stands for, such as In[10], or None."""
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    code_name = getattr(getattr(ipython, "compile", None), "format_code_name", lambda _: None)(file)
    if code_name:  # ("Cell", "In[10]")
        return code_name[1]
    number = _CELL.search(file)
    return f"In[{number[1]}]" if number else None


def problem(
    where: str,
    *lines: str,
    needed: str | None = None,
    fix: str | None = None,
    source: str | None = None,
    module: str | None = None,
) -> str:
    """Format the text of an error: function and argument, problem, needed, suggestion.

    Args:
        where: the function and argument, such as `shard(step), argument params['w']`.
        lines: the problem, one line for each mismatch.
        needed: a description of a right value.
        fix: the suggestion.
        source: `file:line` in the user's code.
        module: the path of the submodule whose op is at that line.

    Returns:
        The text of the message.

    Example:
        >>> print(problem("shard(f)", "got 1", needed="2", fix="add 1"))
        shard(f): got 1
          needed: 2
          try: add 1
    """
    head, *more = lines
    text = [f"{where}: {head}", *(f"  {line}" for line in more)]
    place = located(source, module, full=True)
    text += [
        f"  {label}: {value}"
        for label, value in (("at", place), ("needed", needed), ("try", fix))
        if value
    ]
    return "\n".join(text)
