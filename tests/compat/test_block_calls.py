"""Calls of blocks enter Inductor's trace as they are in the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
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


ZONE = 64  # elements before and after each buffer


def test_no_buffer_is_written_past_its_end_where_a_result_is_a_part_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[torch.Tensor, int]] = []

    def zoned(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        rows = zip(size, stride, strict=True)
        count = 1 + sum((n - 1) * step for n, step in rows) if all(size) else 0
        memory = torch.full((count + 2 * ZONE,), 123, dtype=dtype)
        made.append((memory, count))
        return memory.as_strided(size, stride, ZONE)

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", zoned)
    # its code has calls of a block with a result that starts in the middle of a buffer
    module = torch.nn.GRU(3, 4, 2, bidirectional=True, dtype=torch.float64)
    call, parameters, buffers = sf.functionalize(module)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    loss = lambda p: call(p, buffers, x)[0][0].sin().sum()
    found = sf.jit(sf.grad(loss), backend="inductor")(parameters)
    assert len(made) > 100
    for memory, count in made:
        zones = torch.cat([memory[:ZONE], memory[ZONE + count :]])
        assert bool((zones == 123).all())
    for name, expected in sf.jit(sf.grad(loss), backend="aten")(parameters).items():
        torch.testing.assert_close(found[name], expected)
