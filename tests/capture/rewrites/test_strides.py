"""Memory layout: tensors without strides are refused, and as_strided reads one dense value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.rewrites.strides import (
    kind_without_strides,
    refuse_unstrided,
    refuse_view,
    settle,
)
from tests.support.stages.graphs import calls, graph_of

X = torch.arange(12.0).view(3, 4)


def test_layouts_without_strides_are_named() -> None:
    assert kind_without_strides(X) is None
    assert kind_without_strides(X.to_sparse()) == "torch.sparse_coo"
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    assert kind_without_strides(quantized) == "quantized, torch.qint8"


def test_every_such_argument_is_listed() -> None:
    leaves, paths = [X, X.to_sparse(), 3, X.to_sparse_csr()], ["a", "b", "c", "d"]
    with pytest.raises(sf.CaptureError) as caught:
        refuse_unstrided("f", leaves, paths)
    text = str(caught.value)
    assert "b is torch.sparse_coo" in text and "d is torch.sparse_csr" in text
    assert caught.value.arg_path == "b"
    refuse_unstrided("f", [X, 3], ["a", "c"])


def settled(fn: Any, x: torch.Tensor = X, inside: bool = False) -> Any:
    graph = graph_of(fn, x)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    read = settle(module, "f", ["x"], inside=inside)
    (node,) = calls(graph, "as_strided")
    return read, node


def test_it_reads_the_base_of_its_views_from_their_offset() -> None:
    read, node = settled(lambda x: x[1].as_strided((2, 2), (1, 2)))
    assert read == {0: False} and str(node.args[0]) == "x_1"
    assert node.args[1:] == ([2, 2], [1, 2], 4), "row 1 starts at element 4"


def test_an_offset_that_is_given_is_absolute() -> None:
    read, node = settled(lambda x: x[1].as_strided((2,), (1,), 3))
    assert read == {0: True} and node.args[-1] == 3


def test_a_value_that_is_computed_is_its_own_base() -> None:
    read, node = settled(lambda x: (x + 1).as_strided((2,), (1,)))
    assert read == {} and str(node.args[0]) == "add"


REFUSED = {
    "beyond the end": (
        lambda x: x.as_strided((5, 5), (4, 1)),
        "it reads up to element 20 of a tensor that has 12",
    ),
    "another dtype": (
        lambda x: x.view(torch.int32).as_strided((2,), (1,)),
        "it reads memory of torch.float32 as torch.int32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_is_not_of_one_dense_value_is_refused(name: str) -> None:
    fn, text = REFUSED[name]
    with pytest.raises(sf.CaptureError) as caught:
        settled(fn)
    assert text in str(caught.value) and caught.value.arg_path == "x"


def test_gaps_and_bodies_of_loops_are_refused() -> None:
    with pytest.raises(sf.CaptureError, match="with gaps or overlaps"):
        settled(lambda x: x.as_strided((2,), (1,)), X.expand(2, 3, 4))
    with pytest.raises(sf.CaptureError, match="in a loop or branch"):
        settled(lambda x: x.as_strided((2,), (1,)), inside=True)


def test_a_view_as_argument_is_refused_where_it_starts_elsewhere() -> None:
    refuse_view("f", X, "x")
    with pytest.raises(sf.CaptureError) as caught:
        refuse_view("f", X[1], "x")
    assert "x.clone(), or slicing" in str(caught.value)
