"""A capture is spared the code of graphs, lookups of files, and imports."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import trace_rules

import shardfn as sf
from shardfn._compat.dynamo.spared import (
    LOCAL_MAP,
    arguments_not_searched,
    asked_where_unread,
    backend_looked_up,
    code_on_demand,
    files_asked_once,
    graph_module,
    local_map_met,
    own_files_of_torch,
    stacks_written_once,
)
from shardfn._compat.threads import capturing


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


def test_a_file_is_asked_about_once_in_the_capturing_thread(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(trace_rules, "check_file", lambda file, inlined=False: asked.append(file))
    with capturing(), files_asked_once():
        for _ in range(3):
            trace_rules.check_file("a.py", True)
        trace_rules.check_file("a.py", False)
        assert asked == ["a.py", "a.py"]
        for _ in range(2):
            other = threading.Thread(target=trace_rules.check_file, args=("b.py",))
            other.start()
            other.join()
    assert asked[2:] == ["b.py", "b.py"]


def test_a_program_prints_and_runs_its_graph() -> None:
    program = sf.jit(lambda x: x + x, backend="aten").trace(torch.ones(2)).program
    assert "add" in str(program) and "torch.ops.aten.add" in program.graph.code


def test_a_capture_imports_no_backend_to_see_whether_it_is_the_one_named_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.backends import registry

    asked: list[str] = []
    look_up = lambda name: asked.append(name) or name
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    assert backend_looked_up(look_up, "eager") is None and not asked
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", look_up)
    assert backend_looked_up(look_up, "eager") == "eager"
    assert backend_looked_up(look_up, "inductor") == "inductor"


def test_torch_export_is_named_where_it_is_not_imported() -> None:
    from torch.fx.experimental.symbolic_shapes import uninteresting_files

    assert own_files_of_torch(None) == uninteresting_files()


UNNEEDED = (
    "torch.export._trace",
    "torch._inductor.codecache",
    "torch.distributed.tensor.experimental._func_map",
)


def test_a_first_capture_does_not_import_what_it_does_not_need() -> None:
    script = (
        "import sys, torch, shardfn as sf\n"
        "sf.jit(lambda x: (lambda y: y + y)(x), backend='aten')(torch.ones(2))\n"
        f"assert not {{*{UNNEEDED}}} & {{*sys.modules}}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_local_map_is_still_met_once_it_is_imported(monkeypatch) -> None:
    met: list[object] = []
    meet = lambda fn: met.append(fn) or True
    monkeypatch.delitem(sys.modules, LOCAL_MAP, raising=False)
    assert not local_map_met(meet, len) and not met
    monkeypatch.setitem(sys.modules, LOCAL_MAP, torch)
    assert local_map_met(meet, len) and met == [len]


NORM = torch.nn.LayerNorm(3)


def deep(x: torch.Tensor, depth: int) -> torch.Tensor:
    """x, doubled and halved in a deeper frame."""
    if depth:
        return deep(x + x, depth - 1) / 2
    return NORM(x) + x


def stepped(x: torch.Tensor) -> torch.Tensor:
    """Lines that are read once and lines that are read often, a deep stack and one of torch.nn."""
    for _ in range(3):
        x = deep(x, 5)
        x, y = x * 2, x * 3
    return sum([x, y])


def stacks(fn: Callable[..., Any]) -> list[tuple[str, str | None]]:
    """The nodes that Dynamo makes of a function, and their stacks."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with capturing():
        graph = dynamo_graph_capture_for_export(fn)(torch.ones(2, 3)).graph
    return [(node.name, node.stack_trace) for node in graph.nodes]


def test_a_node_has_the_stack_that_torch_writes() -> None:
    torch._dynamo.reset()
    wanted = stacks(stepped)
    torch._dynamo.reset()
    with stacks_written_once():
        found = stacks(stepped)
    assert found == wanted and len(wanted) > 30
    assert any("deep" in str(text) for _, text in wanted)


def test_a_stack_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Reader

    written: list[object] = []
    ask = Reader.is_co_filename_from_nn_modules
    asked = lambda reader: written.append(reader) or ask(reader)
    monkeypatch.setattr(Reader, "is_co_filename_from_nn_modules", asked)
    torch._dynamo.reset()
    with stacks_written_once():
        nodes = stacks(lambda x: [x := x + 1 for _ in range(50)][-1])
    assert len(nodes) > 50 and 0 < len(written) < 10


def test_dead_nodes_are_removed_and_torch_is_asked_of_the_unread() -> None:
    graph = doubling()
    (node,) = graph.find_nodes(op="call_function", target=torch.add)
    with graph.inserting_after(node):
        graph.call_function(torch.mul, (node, node))
    asked: list[torch.fx.Node] = []
    is_impure = lambda node: asked.append(node) or node.is_impure()
    assert asked_where_unread(torch.fx.Graph.eliminate_dead_code, graph, is_impure)
    assert [node.target for node in graph.nodes][1:-1] == [torch.add]
    assert node not in asked and len(asked) == 2
    assert not asked_where_unread(torch.fx.Graph.eliminate_dead_code, graph)


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


def test_arguments_are_searched_for_symbolic_numbers_by_others_than_a_capture() -> None:
    tree = ([1, 2], {"a": 3})
    with arguments_not_searched():
        assert list(torch.fx.graph.pytree.tree_iter(tree)) == [1, 2, 3]
        with capturing():
            assert not list(torch.fx.graph.pytree.tree_iter(tree))
    assert torch.fx.graph.pytree is torch.utils._pytree
