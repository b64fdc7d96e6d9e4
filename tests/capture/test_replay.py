"""Dynamo's graph run again: tangents of the value's dtype, and checkpoints as annotations."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn.capture.replay import CONTEXTS, Replay, _checkpointed, _of_one_dtype
from tests.support.stages.graphs import graph_of

X = torch.ones(2)


def module() -> torch.fx.GraphModule:
    return torch.fx.GraphModule(
        torch.nn.Module(), graph_of(lambda x: [x.sin() + 1], X)
    )


def test_a_tangent_has_the_dtype_of_its_value() -> None:
    value, tangent = _of_one_dtype(X.half(), X)
    assert tangent is not None and tangent.dtype == torch.float16
    same = X.clone()
    assert _of_one_dtype(X, same)[1] is same and _of_one_dtype(X, None) == (
        X,
        None,
    )
    assert value.dtype == torch.float16


def test_a_checkpointed_call_notes_its_number_on_every_node() -> None:
    first, second = _checkpointed(module()), _checkpointed(module())
    regions = []
    for made in (first, second):
        noted = [n.meta["custom"] for n in made.graph.nodes]
        assert all(list(x.values()) == ["nothing_saveable"] for x in noted)
        regions.append({key for x in noted for key in x})
    assert len(regions[0]) == len(regions[1]) == 1 and regions[0] != regions[1]


def test_the_graph_itself_is_not_noted() -> None:
    called = module()
    _checkpointed(called)
    assert not any(n.meta.get("custom") for n in called.graph.nodes)


def test_a_context_that_chooses_what_to_save_is_refused() -> None:
    called = module()
    called.meta[CONTEXTS] = lambda: None
    with pytest.raises(
        sf.CaptureError, match="torch.utils.checkpoint: it has a context_fn"
    ):
        _checkpointed(called)


def test_a_plain_graph_runs_as_it_is() -> None:
    (got,) = Replay(module()).run(X)
    torch.testing.assert_close(got, X.sin() + 1)
