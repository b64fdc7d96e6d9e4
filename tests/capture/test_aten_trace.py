"""Tracing into ATen graphs: constants become inputs, and loops ops with graphs."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture import aten_trace
from tests.support.stages.graphs import calls

X = torch.ones(3)


def test_constants_of_the_function_become_its_last_inputs() -> None:
    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    module.c = X + 1
    x = module.graph.placeholder("x")
    module.graph.output([module.graph.call_function(torch.add, (x, module.graph.get_attr("c")))])
    (constant,) = aten_trace.lifted_constants(module, _compat.FakeTensorMode(), "f")
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
