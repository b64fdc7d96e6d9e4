"""Nodes of Dynamo's graph: bases of views, and what is written in place."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P
from shardfn.capture.dynamo_nodes import root_of, statistics_of, written_by

GRAPH = torch.fx.Graph()
X = GRAPH.placeholder("x")


def function(target: object, *args: object, **kwargs: object) -> torch.fx.Node:
    return GRAPH.call_function(target, args, kwargs)


def method(name: str, *args: object, **kwargs: object) -> torch.fx.Node:
    return GRAPH.call_method(name, args, kwargs)


def test_the_base_of_a_view_is_reached_through_views_and_writes() -> None:
    view = function(operator.getitem, method("transpose", X, 0, 1), 0)
    assert root_of(view) is X
    assert root_of(method("add_", view, 1)) is X
    computed = function(torch.add, view, 1)
    assert root_of(method("view", computed, -1)) is computed


def test_memory_tells_views_from_copies_whatever_their_names() -> None:
    with torch._subclasses.FakeTensorMode():
        value = torch.ones(2, 3)
        X.meta["example_value"] = value
        rows = method("tensor_split", X, 2)
        rows.meta["example_value"] = value.tensor_split(2)
        row = function(operator.getitem, rows, 1)
        row.meta["example_value"] = value.tensor_split(2)[1]
        copied = method("to", X, torch.float64)
        copied.meta["example_value"] = value.to(torch.float64)
        added = function(torch.add, X, 1, out=copied)
        added.meta["example_value"] = copied.meta["example_value"]
    assert root_of(row) is X
    assert root_of(copied) is copied
    assert root_of(added) is copied
    del X.meta["example_value"]


def test_an_op_writes_to_its_first_argument_or_to_out() -> None:
    y = function(torch.exp, X)
    assert written_by(method("mul_", X, y)) == [X]
    assert written_by(function(operator.setitem, X, 0, y)) == [X]
    assert written_by(function(operator.iadd, X, y)) == [X]
    assert written_by(function(torch.relu, X, inplace=True)) == [X]
    assert written_by(function(torch.add, X, y, out=y)) == [y]
    assert written_by(function(torch.add, X, y)) == []
    assert written_by(method("__len__", X)) == [], "no name of an in-place op"
    assert written_by(X) == []


def test_statistics_are_written_in_training_alone() -> None:
    mean, var = (GRAPH.placeholder(name) for name in ("mean", "var"))
    call = lambda *more: function(F.batch_norm, X, mean, var, None, None, *more)
    assert statistics_of(call(True)) == [mean, var]
    assert statistics_of(call(False)) == statistics_of(call()) == []
    assert statistics_of(function(F.instance_norm, X, mean, var)) == [mean, var]
    assert statistics_of(function(F.instance_norm, X)) == []
    assert statistics_of(method("add_", X, 1)) == []


def test_statistics_of_one_rank_are_refused_where_all_have_the_buffer() -> None:
    norm, x = torch.nn.BatchNorm1d(3), torch.ones(4, 3)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = sf.shard_map(lambda x: norm(x), mesh, P("dp"), P("dp"))
        with pytest.raises(sf.CaptureError, match="batch_norm writes one rank's statistics"):
            fn(x)
        assert norm.num_batches_tracked == 0
        norm.eval()
        torch.testing.assert_close(sf.full(fn(x)), norm(x))
