"""The inputs that Inductor copies for kernels that prescribe strides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardfn.compile.kernels.copied_inputs import is_convolved, with_copies
from shardfn.compile.kernels.op_kinds import COPY, IN_DIMS
from tests.support.stages.graphs import graph_of


def test_convolutions_read_copies_but_for_what_a_convolution_made() -> None:
    fn = lambda x, w: [F.conv2d(F.conv2d(x, w), w)]
    graph = graph_of(fn, torch.ones(1, 3, 9, 9), torch.ones(3, 3, 3, 3))
    found = with_copies(graph)
    copies = [node for node in found.nodes if COPY in node.meta]
    *inputs, result = copies
    assert [x.all_input_nodes[0].op for x in inputs] == ["placeholder"] * 3
    first, second = (x for x in found.nodes if "convolution" in str(x.target))
    assert is_convolved(second.args[0]) and second.args[0] is first
    assert result.all_input_nodes == [second] and result.meta[COPY] == IN_DIMS
    assert not any(COPY in node.meta for node in graph.nodes)


def test_an_image_interpolated_from_that_of_a_convolution_is_returned_as_a_copy() -> None:
    larger = lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")
    args = torch.ones(1, 3, 9, 9), torch.ones(3, 3, 3, 3)

    def copies(fn: Any) -> int:
        nodes = with_copies(graph_of(fn, *args)).nodes
        return sum(node.meta.get(COPY) == IN_DIMS for node in nodes)

    assert copies(lambda x, w: [larger(F.conv2d(x, w).relu()), w + 1]) == 1
    assert copies(lambda x, w: [larger(x), w + 1]) == 0
