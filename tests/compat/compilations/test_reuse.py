"""How often Inductor's code allocates memory, counted in the code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import shardfn as sf
from shardfn._compat.compilations.reuse import in_place_decided
from tests.support.stages.allocations import allocations

R = torch.randn
Weights = list[torch.Tensor]


def loss(w: Weights, x: torch.Tensor) -> torch.Tensor:
    for layer in w:
        x = torch.relu(x @ layer)
    return x.square().mean()


@pytest.mark.parametrize("layers", [2, 4, 8])
def test_memory_that_was_freed_is_taken_again(layers: int) -> None:
    lowered = sf.jit(sf.grad(loss)).lower([R(64, 64)] * layers, R(256, 64))
    # the gradients, what the backward reads of each layer, and one more
    assert allocations(lowered) == 2 * layers + 1


def test_what_only_runs_later_is_no_reader_of_a_value() -> None:
    # the peak of such a program: a step of AdamW in tests/compile/test_memory.py
    later, alias = (
        SimpleNamespace(used_or_aliased_buffer_names=lambda names=names: names)
        for names in ({"w"}, {"w", "y"})
    )
    reader = SimpleNamespace(is_weak=False, node=None)
    waits, keeps = (SimpleNamespace(is_weak=True, node=x) for x in (later, alias))
    users = [reader, waits, keeps]
    value = SimpleNamespace(get_name=lambda: "y", users=users)
    loop = SimpleNamespace(
        scheduler=SimpleNamespace(name_to_buf={"y": value}),
        read_writes=SimpleNamespace(reads=[SimpleNamespace(name=x) for x in "xy"]),
    )
    seen = []
    in_place_decided(lambda _: seen.extend(value.users), loop)
    assert seen == [reader, keeps] and value.users is users
