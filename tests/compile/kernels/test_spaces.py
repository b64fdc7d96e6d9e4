"""The loops of kernels."""

from __future__ import annotations

import torch

from shardfn.compile.kernels import spaces
from shardfn.compile.kernels.op_kinds import CHANNELS_LAST, COPY
from tests.support.stages.graphs import graph_of

aten = torch.ops.aten


def test_a_sum_over_the_last_dims_is_a_sum_of_rows() -> None:
    graph = graph_of(lambda x: [x.sum(1), x.sum(0)], torch.ones(3, 4))
    rows, columns = (x for x in graph.nodes if "sum" in str(x.target))
    assert spaces.reduced(rows) == (3, 12, True, False)
    assert spaces.reduced(columns) == (4, 12, False, False)


def test_channels_last_are_another_loop_where_they_differ() -> None:
    graph = graph_of(lambda x: [x.clone()], torch.ones(2, 3, 4, 5))
    (copy,) = (x for x in graph.nodes if "clone" in str(x.target))
    assert spaces.flat(copy) == (120, 120, True, False)
    copy.meta[COPY] = CHANNELS_LAST
    assert spaces.flat(copy) == (120, 120, True, True)
    assert not spaces.is_image(torch.ones(2, 1, 4, 5))
    assert not spaces.is_image(torch.ones(2, 3, 1, 1))
