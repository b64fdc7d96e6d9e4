"""A capture is spared the code of graphs, lookups of files, and imports."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback

import pytest
import torch
from torch._dynamo import trace_rules

import shardfn as sf
from shardfn._compat.dynamo.spared import (
    backend_looked_up,
    code_on_demand,
    files_asked_once,
    frames_written_once,
    graph_module,
    own_files_of_torch,
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
    monkeypatch.setattr(
        trace_rules, "check_file", lambda file, inlined=False: asked.append(file)
    )
    with capturing(), files_asked_once():
        for _ in range(3):
            trace_rules.check_file("a.py", True)
        trace_rules.check_file("a.py", False)
        assert asked == ["a.py", "a.py"]
        for _ in range(2):
            other = threading.Thread(
                target=trace_rules.check_file, args=("b.py",)
            )
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


def test_a_first_capture_does_not_import_torch_export() -> None:
    script = (
        "import sys, torch, shardfn as sf\n"
        "sf.jit(lambda x: x + x, backend='aten')(torch.ones(2))\n"
        "assert 'torch.export._trace' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_stack_of_a_node_is_that_of_python(monkeypatch) -> None:
    from torch._dynamo import output_graph

    def inner(depth: int) -> traceback.StackSummary:
        if depth:
            return inner(depth - 1)
        return traceback.StackSummary.extract(traceback.walk_stack(sys._getframe()))

    frames = list(inner(5))
    asked: list[object] = []
    write = traceback.StackSummary.format_frame_summary

    def counted(summary: object, frame: object, **kwargs: object) -> str:
        asked.append(frame)
        return write(summary, frame, **kwargs)

    wanted = traceback.StackSummary.from_list(frames).format()
    with frames_written_once():
        monkeypatch.setattr(traceback.StackSummary, "format_frame_summary", counted)
        stack = output_graph.traceback.StackSummary.from_list(frames)
        assert stack.format() == wanted and any("repeated" in s for s in wanted)
        once = len(asked)
        assert stack.format() == wanted and len(asked) == once
    assert output_graph.traceback is traceback
