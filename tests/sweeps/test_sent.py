"""The bytes that a rank sends, in the rows of plans."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import P
from shardfn.sweeps.table import sent_bytes


def test_a_rank_sends_what_a_ring_sends() -> None:
    """An all-reduce sends its payload twice over, but for a rank's own share."""
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        total = sf.shard(lambda x: x.sum(0), mesh, P("dp"), P())
        low = total.lower(torch.ones(8, 6))
    (only,) = low.collectives
    assert only.nbytes == 24
    assert sent_bytes(low.collectives, low.program.axes) == 2 * 24 * 3 / 4
