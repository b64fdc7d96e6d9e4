"""Calls of blocks enter Inductor's trace as they are in the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardfn import _compat
from shardfn._compat.block_calls import WithCalls
from shardfn.compile.repeats import CALL, Kind, outline
from tests.support.outlined import run_calls

D = 5
COPIES = 6


def block(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten ops, in which the operands are not alike, and two results."""
    z = torch.tanh(x @ y) * 2 - y
    w = torch.sin(z) + torch.exp(-z.square()) - torch.cos(x)
    return w, z


def repeated(x: torch.Tensor, *state: torch.Tensor) -> list[torch.Tensor]:
    """Blocks one after the other, which write to a part of the state."""
    new = []
    for k, w in enumerate(state):
        x, z = block(w, x) if k % 2 else block(x, w)
        new.append(z)
    for w, z in zip(state, new, strict=True):
        w.copy_(z)
    return [x, x.t()]


def program() -> tuple[torch.fx.Graph, Mapping[int, Kind], _compat.FakeTensorMode]:
    """The program with calls, its kinds, and the mode of its fake tensors."""
    mode = _compat.fake_mode()
    values = [mode.from_tensor(torch.empty(D, D)) for _ in range(COPIES + 1)]
    with mode:
        graph = make_fx(repeated)(*values).graph
    return *outline(graph), mode


def traced(graph: torch.fx.Graph, mode: _compat.FakeTensorMode) -> torch.fx.GraphModule:
    """The trace of a program with calls."""
    run = WithCalls(torch.fx.GraphModule(torch.nn.Module(), graph)).run
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    with mode:
        return make_fx(run)(*inputs)


def test_a_trace_has_the_calls_of_the_program_and_computes_its_values() -> None:
    graph, kinds, mode = program()
    found = traced(graph, mode).graph
    calls = [node for node in found.nodes if node.target is CALL]
    assert len(calls) == COPIES
    assert any(node.args[1] for node in calls)  # some write
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(D, D, generator=generator, dtype=torch.float64) for _ in range(COPIES + 1)]
    own = [x.clone() for x in given]
    wanted = repeated(*given)
    got = run_calls(found, kinds, own)
    torch.testing.assert_close([*got, *own], [*wanted, *given], rtol=0, atol=0)


def test_results_of_calls_have_layouts_and_memory_of_their_own() -> None:
    graph, kinds, mode = program()
    found = traced(graph, mode).graph
    results = [user.meta["val"] for n in found.nodes if n.target is CALL for user in n.users]
    assert len({x.untyped_storage()._cdata for x in results}) == len(results)
    for node in found.nodes:
        for user in node.users if node.target is CALL else ():
            like = kinds[node.args[2]].results[user.args[1]]
            value = user.meta["val"]
            assert (value.shape, value.stride(), value.dtype) == (
                like.shape,
                like.stride(),
                like.dtype,
            )


def test_an_operand_that_the_trace_does_not_know_is_an_error() -> None:
    graph, _, mode = program()
    with mode:
        strange = torch.empty(D, D)

    class Strange(WithCalls):
        def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
            args, kwargs = super().fetch_args_kwargs_from_env(n)
            if n.target is CALL:
                args = ([strange, *args[0][1:]], *args[1:])
            return args, kwargs

    run = Strange(torch.fx.GraphModule(torch.nn.Module(), graph)).run
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    with mode, pytest.raises(AssertionError, match="an operand"):
        make_fx(run)(*inputs)
