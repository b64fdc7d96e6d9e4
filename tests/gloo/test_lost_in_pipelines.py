"""A rank of a pipeline that is killed, or raises, amid a step: the others name its action, and the
action of their own that waits for it, with stages and microbatches.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import shardfn as sf
from shardfn import P
from tests.faults.launched import free_port, outcomes, variables


class Ending:
    """A callback on values of the last stage, which fails in microbatch 2 once it is armed."""

    def __init__(self, how: str) -> None:
        self.how, self.microbatch = how, -1

    def arm(self) -> None:
        self.microbatch = 0

    def __call__(self, _: torch.Tensor) -> None:
        if self.microbatch == 2 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.microbatch == 2:
            self.microbatch = -1
            raise ValueError("a bad batch")
        if self.microbatch >= 0:
            self.microbatch += 1


def job(rank: int, how: str) -> str:
    """Steps of a pipeline of two stages, in the second of which the last one fails."""
    torch.manual_seed(0)
    mesh = sf.make_mesh((2,), ("pp",), device_type="cpu", timeout=5.0)
    params, x = [torch.eye(4), torch.eye(4)], torch.ones(8, 4)
    ending = Ending(how)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(torch.tanh(x @ params[0]) @ params[1])
        sf.debug.callback(ending, h)
        return h.square().mean()

    step = sf.shard(sf.pipelined_grad(loss, 4), mesh, ([P(pp=0), P(pp=1)], None), backend="aten")
    step(params, x)
    ending.arm()
    try:
        step(params, x)
    except ValueError:
        assert rank == 1
    step(params, x)
    return "right"


WAITS = (
    "shard(pipelined_grad(loss)), BW of stage 0, microbatch 2, waiting for %mm_3 of BW of stage 1, "
    "microbatch 2, (2, 4) torch.float32 from coordinate 1 to 0, at "
)


def test_the_peer_of_a_killed_rank_names_what_it_waits_for() -> None:
    first, last = outcomes(variables(2, free_port()), job, "kill")
    assert last == "SIGKILL"
    assert first.startswith(f"RankLostError: {WAITS}")
    assert "test_lost_in_pipelines.py" in first and ": rank 1 is lost: " in first


def test_the_peer_of_a_rank_that_raises_names_the_action_that_raised() -> None:
    first, _ = outcomes(variables(2, free_port()), job, "raise")
    assert first.startswith(f"DivergenceError: {WAITS}")
    assert "F of stage 1, microbatch 2, which raised ValueError: a bad batch" in first
