"""Stages are spared the code of graphs, and searches of their nodes."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn._compat.dynamo.spared import arguments_not_searched, code_on_demand, graph_module


def doubling() -> torch.fx.Graph:
    """The graph of x + x."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, x)))
    return graph


def test_the_code_of_a_graph_is_written_when_it_is_read_or_run() -> None:
    module = graph_module(torch.nn.Module(), doubling())
    assert module._needs_recompile()
    assert module(torch.tensor(2.0)) == 4 and not module._needs_recompile()
    assert "torch.add(x, x)" in graph_module(module, doubling()).code


def test_what_is_changed_later_is_in_the_code() -> None:
    module = graph_module(torch.nn.Module(), doubling())
    assert module(torch.tensor(3.0)) == 6
    (node,) = module.graph.find_nodes(op="call_function", target=torch.add)
    node.target = torch.mul
    module.recompile()
    assert module(torch.tensor(3.0)) == 9


def test_modules_are_torchs_own_again_afterwards() -> None:
    make = torch.fx._lazy_graph_module._make_graph_module
    with code_on_demand():
        assert make(torch.nn.Module(), doubling())._needs_recompile()
    assert not hasattr(make(torch.nn.Module(), doubling()), "_needs_recompile")


def test_a_program_prints_and_runs_its_graph() -> None:
    program = sf.jit(lambda x: x + x, backend="aten").trace(torch.ones(2)).program
    assert "add" in str(program) and "torch.ops.aten.add" in program.graph.code


NORM = torch.nn.LayerNorm(3)


def deep(x: torch.Tensor, depth: int) -> torch.Tensor:
    """x, doubled and halved in a deeper frame."""
    if depth:
        return deep(x + x, depth - 1) / 2
    return NORM(x) + x


def test_a_capture_writes_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = torch.fx.Graph.python_code
    monkeypatch.setattr(
        torch.fx.Graph,
        "python_code",
        lambda graph, *a, **k: written.append(len(graph.nodes)) or write(graph, *a, **k),
    )
    step = lambda x: deep(x, 2) * 2
    sf.jit(step, backend="aten").trace(torch.ones(2, 3))
    assert not written


def test_arguments_are_searched_for_symbolic_numbers_by_other_threads() -> None:
    tree = ([1, 2], {"a": 3})
    searched = lambda: list(torch.fx.graph.pytree.tree_iter(tree))
    with arguments_not_searched(), concurrent.futures.ThreadPoolExecutor(1) as others:
        assert not searched()
        assert others.submit(searched).result() == [1, 2, 3]
    assert torch.fx.graph.pytree is torch.utils._pytree


def test_later_stages_search_no_arguments_either(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = sf.jit(lambda x: deep(x, 2) * 2, backend="aten").trace(torch.ones(2, 3))
    searched: list[list[int]] = []
    create = torch.fx.Graph.create_node

    def noted(*args: Any, **kwargs: Any) -> torch.fx.Node:
        searched.append(list(torch.fx.graph.pytree.tree_iter([1])))
        return create(*args, **kwargs)

    monkeypatch.setattr(torch.fx.Graph, "create_node", noted)
    traced.lower().compile()
    assert searched and not any(searched)
