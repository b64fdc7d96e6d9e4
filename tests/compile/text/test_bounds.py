"""A view by strides in a file stays inside of its tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.compile.text import graph_of, text_of

X = torch.arange(12.0).view(3, 4)
HONEST: dict[str, Callable[[torch.Tensor], Any]] = {
    "a whole": lambda x: x.as_strided((12,), (1,)) * 2,
    "windows": lambda x: x.as_strided((5, 4), (2, 1), 0) * 2,
    "of a view": lambda x: x[1:].as_strided((2, 3), (4, 1), 5) * 2,
    "of a result": lambda x: (x + 1).t().as_strided((4,), (3,)) * 2,
    "none": lambda x: x.as_strided((0, 3), (3, 1), 12) * 2,
    "written": lambda x: x.as_strided_scatter(torch.ones(2), (2,), (5,), 1),
    "diagonal": lambda x: x.diagonal() * 2,
}


def rows_of(fn: Callable[[torch.Tensor], Any]) -> Any:
    graph = sf.jit(fn, backend="aten").lower(X).program.graph
    return json.loads(json.dumps(text_of(graph)))


@pytest.mark.parametrize("name", HONEST)
def test_a_view_inside_of_its_tensor_comes_back(name: str) -> None:
    graph = graph_of(rows_of(HONEST[name]))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    (found,) = module(X)
    assert torch.equal(found, HONEST[name](X))


@pytest.mark.parametrize("sizes", [([3], [1], 10), ([3], [6], 0), ([3], [1], 10**9)], ids=str)
def test_elements_outside_of_it_are_refused(sizes: Any) -> None:
    rows = rows_of(HONEST["windows"])
    (row,) = (x for x in rows if "as_strided" in x.get("op", ""))
    row["args"] = [row["args"][0], *sizes]
    with pytest.raises(ValueError, match="elements outside of its tensor"):
        graph_of(rows)
