"""Flat lists of tensors: floating ones apart, and graphs with other inputs."""

from __future__ import annotations

import pytest
import torch

from shardfn.capture.control_flow import flat
from tests.support.stages.graphs import graph_of

X, I = torch.ones(2), torch.arange(2)


def test_floating_tensors_are_taken_apart_and_put_back() -> None:
    like = [X, I, X.half(), torch.ones(1, dtype=torch.complex64)]
    assert [x.dtype for x in flat.floats_of(like)] == [
        torch.float32,
        torch.float16,
        torch.complex64,
    ]
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [x is y for x, y in zip(flat.filled(like, [a, b, c]), [a, I, b, c], strict=True)] == [
        True
    ] * 4
    assert flat.spread(like, [a, b, c]) == [a, None, b, c]


def test_a_list_is_split_into_all_of_its_parts() -> None:
    xs = [torch.tensor(i) for i in range(4)]
    assert [[int(x) for x in part] for part in flat.split(xs, [1, 0, 3])] == [[0], [], [1, 2, 3]]
    with pytest.raises(AssertionError):
        flat.split(xs, [1, 2])
    assert len(flat.split(xs, [1, 2], loose=True)) == 2


def names(graph: torch.fx.Graph) -> list[str]:
    return [n.name for n in graph.find_nodes(op="placeholder")]


def test_constants_move_behind_the_first_inputs() -> None:
    fn = lambda a, b, c, d: [a + b + c + d]
    args = [torch.ones(i + 1)[0] for i in range(4)]
    graph = graph_of(fn, *args)
    flat.move_constants(graph, 1, 1)
    assert names(graph) == ["a_1", "d_1", "b_1", "c_1"]
    graph.lint()
    flat.move_constants(graph, 2, 2)
    assert names(graph) == ["a_1", "d_1", "b_1", "c_1"], "they stand there already"


def test_unread_inputs_stand_where_they_are_asked_for() -> None:
    graph = graph_of(lambda a, b: [a + b], torch.ones(2), torch.ones(2) + 1)
    flat.add_inputs(graph, 1, [X])
    flat.add_inputs(graph, 3, [I])
    assert names(graph) == ["a_1", "unread", "b_1", "unread_1"]
    assert graph.find_nodes(op="placeholder")[3].meta["val"] is I
    graph.lint()
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert module(X, I, X * 2, I)[0].tolist() == [3, 3]


def test_a_batched_body_has_the_batch_first() -> None:
    body = lambda x, y: [x * y, y]
    one, two = flat.mapped(body, (1, None), 3)(torch.ones(2, 3), X * 2)
    assert one.shape == (3, 2) and two.shape == (3, 2)
    (kept,) = flat.mapped(lambda x: [x], (None,), 5)(X)
    assert kept.shape == (5, 2)
