"""Results in memory of their own, in text and by running the graph."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.compile.separate import separate
from tests.support.stages.graphs import graph_of, shown

X = torch.arange(12.0).view(3, 4)


def separated(fn: Any, *args: torch.Tensor, donated: Any = ()) -> torch.fx.GraphModule:
    graph = graph_of(fn, *(args or (X,)))
    return separate(torch.fx.GraphModule(torch.nn.Module(), graph), donated)


def text(module: torch.fx.GraphModule) -> str:
    return shown(module.graph)


def test_an_input_that_is_returned_is_copied() -> None:
    module = separated(lambda x: [x, x.t()])
    assert (
        text(module)
        == (
            "clone_default_1 = clone(x_1)\nt = t(x_1)\nclone_default = clone(t)\n"
            "return [clone_default, clone_default_1]"
        )
        or text(module).count("clone(") == 2
    )
    first, second = module(X)
    assert first.data_ptr() != X.data_ptr() != second.data_ptr()


def test_a_computed_value_is_returned_once_as_it_is() -> None:
    assert "clone" not in text(separated(lambda x: [x + 1]))

    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        return [y, y, y.t()]

    module = separated(twice)
    assert text(module).count("clone(") == 2
    assert len({r.untyped_storage().data_ptr() for r in module(X)}) == 3


def test_disjoint_parts_of_one_buffer_are_returned_as_they_are() -> None:
    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x + 1).view(12)
        return [y[:6], y[6:]]

    assert "clone" not in text(separated(parts))

    def overlapping(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x + 1).view(12)
        return [y[:7], y[6:]]

    assert text(separated(overlapping)).count("clone(") == 1


def test_one_result_may_lie_in_a_donated_input() -> None:
    fn = lambda x: [x.t(), x]
    assert text(separated(fn)).count("clone(") == 2
    assert text(separated(fn, donated=[0])).count("clone(") == 1


def test_as_strided_reads_memory_of_its_own_where_a_copy_was_removed() -> None:
    fn = lambda x: [x.t().as_strided((2,), (1,)) + 1]
    module = separated(fn)
    assert "as_strided(clone_default" in text(module)


def test_empty_results_take_no_memory() -> None:
    def empty(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x + 1).view(12)
        return [y[3:3], y]

    assert "clone" not in text(separated(empty))
