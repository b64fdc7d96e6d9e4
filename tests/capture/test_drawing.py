"""Which nodes draw random numbers."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.drawing import draws, refuse_state, use_of
from shardfn.ops.random_bits import AMBIENT, DRAW, RANDOM_BITS

aten = torch.ops.aten
Q = torch.ones(1, 1, 2, 2)


def node(target: object, *args: object, **kwargs: object) -> torch.fx.Node:
    graph = torch.fx.Graph()
    return graph.call_function(target, args, kwargs)


def test_torchs_random_ops_draw_and_others_do_not() -> None:
    assert draws(node(aten.rand.default, [2])) and draws(node(aten.bernoulli.p, Q, 0.5))
    assert not draws(node(aten.exp.default, Q))


def test_attention_draws_only_with_dropout() -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws(node(attention, Q, Q, Q))
    assert draws(node(attention, Q, Q, Q, 0.1))
    assert draws(node(attention, Q, Q, Q, dropout_p=0.1))


def bits(use: int) -> torch.fx.Node:
    drawn = node(RANDOM_BITS, None, None, [2], [1], use, 0, torch.float32)
    drawn.meta["source"] = "model.py:7"
    return drawn


def test_the_use_of_random_bits() -> None:
    assert use_of(bits(DRAW)) == DRAW
    assert use_of(node(aten.exp.default, Q)) is None


def test_with_required_keys_a_draw_from_the_state_is_refused_with_its_line() -> None:
    refuse_state(bits(DRAW).graph, "f")
    with pytest.raises(sf.ShardError) as caught:
        refuse_state(bits(AMBIENT).graph, "f")
    assert "torch draws random numbers from sf.random.state" in str(caught.value)
    assert caught.value.source == "model.py:7"
