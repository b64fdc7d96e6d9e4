"""Attention on a sequence over real gloo processes: as in the simulator to the last bit; compiled,
as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from attention import Case, sharded, value_and_gradients
from equality import close
from ranks import run_ranks
from torch.testing import assert_close

import shardfn as sf

CASES = (
    Case("causal", queries=7, keys=7, heads=4, few=2, causal=True),
    Case("window", queries=7, keys=7, window=3),
    Case("across", queries=4, keys=7),
)
BALANCED = Case("zigzag", queries=12, keys=12, heads=4, few=2, causal=True)
WAYS = ("ring", "gather")


def run(backend: str) -> Any:
    mesh = sf.make_mesh((3,), ("cp",))
    plain = [
        sharded(case, mesh, case.tensors(), "cp", attention={"cp": way}, backend=backend)
        for case in CASES
        for way in WAYS
    ]
    options = {"attention": {"cp": "ring"}, "backend": backend}
    return [*plain, sharded(BALANCED, mesh, BALANCED.tensors(), sf.zigzag("cp"), **options)]


def checked(backend: str) -> list[Any]:
    """What each rank of gloo returns, where all of it equals one device."""
    cases = [*(case for case in CASES for _ in WAYS), BALANCED]
    wanted = [value_and_gradients(case, case.tensors()) for case in cases]
    found = run_ranks(3, run, backend)
    for got in found:
        close(got, wanted)
    return found


def test_gloo_attends_as_the_simulator_does() -> None:
    torch.set_num_threads(1)
    with sf.fake_world(3):
        simulated = run("aten")
    for got in checked("aten"):
        assert_close(got, simulated, rtol=0, atol=0)


def test_compiled_attention_on_gloo() -> None:
    checked("inductor")
