"""Fake tensors whose sizes are symbols, and graphs that run with other arguments."""

from __future__ import annotations

import torch

from shardfn import _compat
from shardfn._compat.dynamo.symbols import Sized, Symbols
from tests.support.stages.graphs import graph_of


def test_a_tensor_of_symbols_has_its_examples_as_hints() -> None:
    symbols = Symbols([5, 7])
    n, m = symbols.sizes
    x = symbols.empty(torch.ones(1, dtype=torch.float64), (n, m), (m, 1))
    assert all(map(_compat.is_symbol, x.shape)) and x.dtype == torch.float64
    assert (x.numel().node.hint, x.sum(0).shape[0].node.hint) == (35, 7)


def test_conditions_of_the_code_are_kept() -> None:
    symbols = Symbols([6])
    (n,) = symbols.sizes
    x = symbols.empty(torch.ones(1), (n,), (1,))
    assert bool(n % 2 == 0)
    found = symbols.conditions([x])
    layout = lambda size: ((size,), (1,))
    names = {0: "x"}
    fits = [found.misfit({0: layout(k)}, names) for k in (8, 7)]
    assert fits[0] is None and fits[1] is not None


def test_a_graph_runs_with_other_arguments() -> None:
    graph = graph_of(lambda x: x.narrow(0, 0, 2) * 3, torch.ones(4))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    def given(node: torch.fx.Node):
        args = node.args
        if "slice" in node.name or "narrow" in node.name:
            args = (*args[:3], 3, *args[4:])
        return args, dict(node.kwargs)

    assert Sized(module, given).run(torch.arange(4.0)).tolist() == [0, 3, 6]
