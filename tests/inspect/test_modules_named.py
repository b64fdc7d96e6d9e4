"""Every line of a module's program names its module: in explain, programs, memory and time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import P
from shardfn.ops.loops import inner_nodes

WIDTH = 6


@torch.library.custom_op("test_modules_named::doubled", mutates_args=())
def DOUBLED(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@DOUBLED.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Of the shape of a GPT: an embedding, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(14, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 14)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


torch.manual_seed(0)
MODEL = Model()
PATHS = {name for name, _ in MODEL.named_modules() if name}
FN, PARAMS, BUFFERS = sf.functionalize(MODEL)
TOKENS = torch.randint(14, (4, 3))
Params = dict[str, torch.Tensor]


def functionalized(params: Params, tokens: torch.Tensor) -> torch.Tensor:
    return FN(params, BUFFERS, tokens)[0]


def functional_call(params: Params, tokens: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(MODEL, params, (tokens,))


def scanned(params: Params, tokens: torch.Tensor) -> torch.Tensor:
    def body(total: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = functionalized(params, row[None])
        return total + loss, loss

    return sf.scan(body, torch.zeros(()), tokens)[0]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "functionalize": functionalized,
    "functional_call": functional_call,
    "grad": sf.value_and_grad(functionalized),
    "grad of functional_call": sf.value_and_grad(functional_call),
    "checkpoint": sf.value_and_grad(sf.checkpoint(functionalized)),
    "checkpoint of functional_call": sf.value_and_grad(sf.checkpoint(functional_call)),
    "scan": sf.value_and_grad(scanned),
    "bucketed_grad": sf.bucketed_grad(functionalized, cap="256B", first_cap="64B"),
}
OWN = range(Block.forward.__code__.co_firstlineno, Model.forward.__code__.co_firstlineno + 5)


def lowered(fn: Any, *args: Any, places: Any = None) -> Any:
    """One rank's program of eight."""
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        return sf.shard(fn, mesh, (places, P("dp"))).lower(*args)


def placement(name: str) -> P:
    return P("tp") if "up.weight" in name else P()


def of_model(source: Any) -> bool:
    """Whether a line is one of a submodule of the model. A line of `Model.forward` itself, as the
    outermost module, has no path.
    """
    file, _, line = (source or "").rpartition(":")
    return file == __file__ and int(line) in OWN


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Any:
    places = {name: placement(name) for name in PARAMS}
    return lowered(PROGRAMS[request.param], PARAMS, TOKENS, places=places)


def test_each_op_at_a_line_of_a_block_is_in_a_module_of_the_model(program: Any) -> None:
    """Of the global and the local program, forward and backward, and of loops' bodies."""
    block = range(OWN.start, OWN.start + 2)
    for graph in (program.traced.program.graph.graph, program.program.graph):
        met = set()
        for node in inner_nodes(graph, once=True):
            source: Any = node.meta.get("source")
            module: Any = node.meta.get("module")
            if of_model(source) and int(source.rpartition(":")[2]) in block:
                assert module in PATHS and module.startswith("layers."), (node, source, module)
            assert module is None or module in PATHS, (node, module)
            met.add(module)
        layers = {f"layers.{k}.{name}" for k in range(2) for name in ("norm", "up", "down")}
        assert {*layers, "embedding", "head"} <= met


def test_each_collective_and_tensor_and_time_names_its_module(program: Any) -> None:
    block = range(OWN.start, OWN.start + 2)
    rows = [*program.explain().collectives, *program.memory.alive, *program.time("H100").ops]
    count = 0
    for row in rows:
        if of_model(row.source) and int(row.source.rpartition(":")[2]) in block:
            assert row.module.startswith("layers."), row
            count += 1
    assert count > 3
    text = "\n".join(map(str, (program.explain(), program.memory, program.time("H100"))))
    line = re.compile(rf"{re.escape(__file__.rpartition('/')[2])}:(\d+)")
    for row in text.splitlines():
        found = line.search(row)
        if found and int(found[1]) in block:
            assert re.search(r" layers\.\S+ \(test_modules_named\.py:\d+\)", row), row


def test_the_printed_programs_name_modules(program: Any) -> None:
    assert re.search(r"# layers\.1\.up \(test_modules_named\.py:\d+\)", program.text())
    assert "layers.0.up (test_modules_named.py:" in program.verbose()


def test_the_backward_of_a_layer_is_in_that_layer() -> None:
    """Each parameter's gradient is made in its own module."""
    for fn in (functionalized, functional_call):
        low = lowered(sf.grad(fn), PARAMS, TOKENS)
        (sent,) = {len(low.collectives)}
        modules = [c.module for c in low.collectives]
        assert sent == len(PARAMS)
        assert sorted(map(str, modules)) == sorted(x.rpartition(".")[0] for x in PARAMS)


def test_lists_of_modules_are_called_by_the_name_of_the_list() -> None:
    stages = [Block(), Block()]

    class Trainer:
        def __init__(self) -> None:
            self.blocks = [Block(), Block()]

    trainer = Trainer()

    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x)
        for block in trainer.blocks:
            x = block(x)
        return x

    program = sf.jit(run).trace(torch.randn(2, WIDTH)).program
    modules = {node.meta["module"] for node in program.graph.graph.nodes}
    assert {"0.up", "1.down", "blocks.0.up", "blocks.1"} <= modules


def test_a_method_of_a_module_names_its_submodules() -> None:
    class Trained(Model):
        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[1](self.embedding(tokens))).sum()

    program = sf.jit(Trained().loss).trace(TOKENS).program
    modules = {node.meta["module"] for node in program.graph.graph.nodes}
    assert {"embedding", "layers.1", "layers.1.up", "head"} <= modules


def test_a_plain_function_prints_without_modules() -> None:
    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["up"]) @ params["down"]).square().mean()

    params = {"up": torch.randn(WIDTH, 8), "down": torch.randn(8, WIDTH)}
    places = {"up": P(None, "tp"), "down": P("tp")}
    low = lowered(sf.grad(loss), params, torch.randn(4, WIDTH), places=places)
    line = loss.__code__.co_firstlineno + 1
    for row in low.explain().collectives:
        assert row.source is None or row.module is None
    assert f"  {__file__}:{line}\n" in f"{low.explain()}\n"
    assert f"{__file__}:{line}" in str(low.memory) and f" {__file__}:{line}" in str(low.time())
    texts = [str(x) for x in (low.explain(), low.memory, low.time(), low.text())]
    assert not any(f"({file}" in text for text in texts for file in (__file__, "test_modules"))


def test_explain_of_a_lowered_call_is_that_of_the_function() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((4,), ("dp",))
        total = sf.shard(lambda x: x.sum(), mesh, P("dp"), P())
        x = sf.ShapeDtype((8,))
        assert str(total.lower(x).explain()) == str(sf.explain(total, x))
        assert total.lower(x).explain() == sf.explain(total, x)


def test_errors_of_an_op_name_its_module() -> None:
    places = {name: placement(name) for name in PARAMS}
    with sf.fake_world(8, numerics=False):
        mesh = sf.make_mesh((2, 4), ("dp", "tp"))
        run = sf.shard(functionalized, mesh, (places, P("dp")), implicit_comm="error")
        with pytest.raises(sf.PlacementError) as caught:
            run.lower(PARAMS, TOKENS)
    assert caught.value.module == "layers.0.down"
    file = __file__.rpartition("/")[2]
    assert re.search(rf" at layers\.0\.down \({file}:\d+\): ", str(caught.value))


def test_errors_of_a_rule_name_the_module_with_the_whole_path_of_the_file() -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise ValueError("no")

    class Floor(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return DOUBLED(x)

    fn, params, buffers = sf.functionalize(nn.Sequential(nn.Identity(), nn.Sequential(Floor())))
    sf.rule(DOUBLED)(failing)
    with sf.fake_world(2), pytest.raises(sf.RuleError) as caught:
        mesh = sf.make_mesh((2,), ("dp",))
        run = sf.shard(lambda x: fn(params, buffers, x)[0], mesh, P("dp"))
        run.lower(torch.randn(4, 3))
    line = Floor.forward.__code__.co_firstlineno + 1
    assert caught.value.module == "1.0"
    assert f"\n  at: 1.0 ({__file__}:{line})\n" in str(caught.value)
