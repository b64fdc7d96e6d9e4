"""The environment variables by which the launcher of a job gives a process its place."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from ..errors import RendezvousError
from ..extensions import LAUNCHER


@attrs.frozen
class Launch:
    """The place of a process in its job."""

    host: str
    port: int
    rank: int
    size: int
    is_server: bool  # whether this process serves the store; else the launcher, or rank 0
    attempt: str  # number of the restart

    @property
    def address(self) -> str:
        """The address of the store, as text."""
        return f"{self.host}:{self.port}"


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The place that torchrun, or another launcher with torch's four variables, has given this
    process. None if it was started alone.

    Raises:
        RendezvousError: a variable is missing under torchrun, or is not a number in range.
    """
    missing = [name for name in LAUNCHER if not environment.get(name)]
    is_torchruns = environment.get("TORCHELASTIC_RUN_ID") is not None
    if missing and not is_torchruns:
        return None
    if missing:
        raise _refused(f"{', '.join(missing)} missing", "all four of torch's")
    port = _number(environment, "MASTER_PORT", 0, 65_535)
    size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, size - 1)
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        environment["MASTER_ADDR"],
        port,
        rank,
        size,
        is_server=rank == 0 and not has_agent,
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment[name]
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        upper = "more" if most is None else str(most)
        between = f"{least} or more" if most is None else f"{least} to {upper}"
        raise _refused(f"{name} is {text!r}", f"an int, {between}")
    return number


def _refused(got: str, needed: str) -> RendezvousError:
    fix = "torchrun --nproc-per-node=2 script.py, which sets these variables"
    where = "make_mesh, environment"
    return RendezvousError.of(where, got, needed=needed, fix=fix)
