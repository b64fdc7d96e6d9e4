"""Tracing into ATen graphs: constants become inputs, and loops ops with graphs."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture import trace
from shardfn.capture.rewrites import decompositions
from shardfn.ops.loops import Branch
from tests.support.stages.graphs import calls, graph_of, shown

X = torch.ones(3)


@pytest.fixture(name="mode")
def _mode():
    mode = _compat.fake_mode()
    with trace.recording("f", decompositions.table(), mode), mode:
        yield mode


def test_a_recording_is_active_inside_alone(mode) -> None:
    assert trace.is_recording() and trace.hooked_values() == {}


def test_outside_nothing_is_recorded() -> None:
    assert not trace.is_recording() and trace.hooked_values() == {}


def test_a_graph_has_no_writes_in_place(mode) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        y.add_(1)
        return [y]

    graph = trace.functional(fn, [mode.from_tensor(X)], "f", ["x"])
    ops = [line.split(" = ")[1].split("(")[0] for line in shown(graph.graph).splitlines()[:-1]]
    assert ops[-1] == "add" and not any(op.endswith("_") for op in ops)


def test_a_write_to_an_argument_is_refused_by_its_path(mode) -> None:
    with pytest.raises(sf.CaptureError, match="f, argument x"):
        trace.functional(lambda x: [x.add_(1)], [mode.from_tensor(X)], "f", ["x"])


def test_a_loop_stands_in_the_graph_with_its_graphs(mode) -> None:
    body = graph_of(lambda x: [x + 1], X)
    branch = Branch((body, body), 1)

    def fn(x: torch.Tensor, truth: torch.Tensor) -> list[torch.Tensor]:
        return trace.emitted(branch, [x, truth])

    inputs = [mode.from_tensor(X), mode.from_tensor(torch.tensor(True))]
    graph = trace.functional(fn, inputs, "f", ["x", "t"]).graph
    assert [n.target for n in graph.nodes if isinstance(n.target, Branch)] == [branch]


def test_constants_of_the_function_become_its_last_inputs() -> None:
    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    module.c = X + 1
    x = module.graph.placeholder("x")
    module.graph.output([module.graph.call_function(torch.add, (x, module.graph.get_attr("c")))])
    (constant,) = trace.lifted_constants(module, _compat.FakeTensorMode(), "f")
    assert constant.tolist() == [2, 2, 2]
    names = [n.name for n in module.graph.find_nodes(op="placeholder")]
    assert names == ["x", "constant_0"] and not module.graph.find_nodes(op="get_attr")
    assert calls(module.graph, "add")[0].args[1].meta["val"].shape == (3,)


class Labelled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("a span"):
            return x * 2


def test_labels_for_the_profiler_are_no_part_of_a_program() -> None:
    fn, params, buffers = sf.functionalize(Labelled())
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        call = sf.shard(lambda x: fn(params, buffers, x)[0], mesh, sf.P("dp"))
        assert torch.equal(sf.full(call(X)), X * 2)
        nodes = call.trace(X).program.graph.graph.nodes
        assert [n.op for n in nodes].count("call_function") == 1
