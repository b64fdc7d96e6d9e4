"""Blocks of elementwise ops as one op of a Program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.ops.elementwise import Elementwise, is_elementwise
from shardfn.partition.rule_api.strategy import OpCall, replicated
from shardfn.partition.rules.pointwise import pointwise
from tests.support.stages.graphs import graph_of

F64 = torch.float64
Params = dict[str, torch.Tensor]
SHAPES = {
    "matrix": (5, 6),
    "second": (5, 6),
    "row": (1, 6),
    "column": (7, 1),
    "vector": (6,),
    "single": (1,),
    "number": (),
    "empty": (0, 3),
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AMSGrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {}),
}


def tensors(scale: float) -> Params:
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: scale * torch.randn(shape, dtype=F64, generator=generator)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def blocks_of(program: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in program.nodes if isinstance(node.target, Elementwise)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_a_step_of_an_optimizer_is_that_of_one_device(name: str, shape: tuple[int, ...]) -> None:
    cls, options = OPTIMIZERS[name]
    opt = sf.optim(cls, **options)
    params, grads = tensors(1.0), tensors(0.1)
    axes = ("dp", "tp")[: len(shape)]
    placed = {x: sf.P(axes[-1]) if size else sf.P() for x, size in SHAPES.items()}
    state = opt.init(params)
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, axes)
        ins = (placed, sf.P(), opt.state_placements(placed, params))
        fn = sf.shard(opt.update, mesh, ins, backend="aten")
        graph = fn.trace(params, grads, state).program.graph.graph
        assert len(blocks_of(graph)) == len(params)
        got = sf.full(fn(*fn(params, grads, state)[:1], grads, fn(params, grads, state)[1]))
    first = opt.update(params, grads, state)
    want = opt.update(first[0], grads, first[1])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_parameters_that_differ_have_blocks_of_their_own() -> None:
    params = {
        "a": torch.ones(2, 3),
        "b": torch.ones(2, 3),
        "other_shape": torch.ones(3, 2),
        "other_dtype": torch.ones(2, 3, dtype=F64),
        "other_group": torch.ones(2, 3),
    }
    opt = sf.optim(torch.optim.SGD, lr=0.5, groups={"other_group": {"lr": 0.25}})
    step = sf.jit(opt.update, backend="aten")
    state = opt.init(params)
    found = blocks_of(step.trace(params, params, state).program.graph.graph)
    kinds = [node.target for node in found]
    assert kinds[0] is kinds[1] and len(set(kinds)) == 4
    torch.testing.assert_close(step(params, params, state), opt.update(params, params, state))


def test_a_block_in_a_loop_under_a_derivative_and_a_vmap_is_plain_torchs() -> None:
    opt = sf.optim(torch.optim.AdamW, lr=0.1)
    params, grads = {"w": torch.linspace(-1, 1, 15, dtype=F64).view(3, 5)}, tensors(1.0)
    state = opt.init(params)
    grad = grads["matrix"][:3, :5].clone()

    def total(g: torch.Tensor) -> torch.Tensor:
        return opt.update(params, {"w": g}, state)[0]["w"].sin().sum()

    def loop(p: Params) -> Any:
        body = lambda carry, _: (opt.update(carry[0], {"w": carry[0]["w"].sin()}, carry[1]), None)
        return sf.scan(body, (p, state), None, length=3)[0]

    torch.testing.assert_close(sf.jit(loop)(params), loop(params))
    torch.testing.assert_close(sf.grad(sf.jit(total))(grad), sf.grad(total)(grad))
    torch.testing.assert_close(sf.jit(sf.grad(total))(grad), sf.grad(total)(grad))
    several = torch.stack([grad, 2 * grad])
    want = torch.stack([total(grad), total(2 * grad)])
    torch.testing.assert_close(sf.vmap(sf.jit(total))(several), want)


ELEMENTWISE: dict[str, Callable[..., list[torch.Tensor]]] = {
    "products": lambda x: [x * 2 + x],
    "a cast": lambda x: [x.double()],
}
NOT_ELEMENTWISE: dict[str, Callable[..., list[torch.Tensor]]] = {
    "a sum": lambda x: [x.sum() * x],
    "a view": lambda x: [x.t() + 1],
    "random numbers": lambda x: [torch.bernoulli(x)],
    "a tensor of its own": lambda x: [torch.ones(2, 2) * x],
    "an input": lambda x: [x],
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *NOT_ELEMENTWISE])
def test_which_graphs_work_element_by_element(name: str) -> None:
    fn = {**ELEMENTWISE, **NOT_ELEMENTWISE}[name]
    graph = graph_of(fn, torch.ones(2, 2))
    assert is_elementwise(graph) == (name in ELEMENTWISE)


def test_results_of_unrelated_shapes_are_replicated() -> None:
    graph = graph_of(lambda x, y, z: [x + 1, y + z], *map(torch.ones, ((1, 1), 5, 1)))
    block = Elementwise(graph, "block")
    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    results: Any = graph.output_node().args[0]
    outs = tuple(node.meta["val"] for node in results)
    call = OpCall(block, (), {}, tuple(fakes), outs)
    assert pointwise(call) == [replicated(call)]
