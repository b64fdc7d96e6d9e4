"""The path of the submodule whose code runs, in notes of nodes and in warnings."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import shardfn as sf
from shardfn import P
from shardfn.capture.annotations import module_of
from shardfn.capture.modules.submodule_paths import Paths


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


MODEL = nn.Sequential(Layer(), Layer())


def modules_of(program: Any) -> dict[str, set[str]]:
    """The paths of the modules that each op was in, by phase."""
    found: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for node in program.graph.graph.nodes:
        noted = node.meta.get("custom") or {}
        if "module" in noted:
            found[node.meta["phase"]].add(noted["module"])
    return found


def test_nodes_know_the_module_that_they_were_in() -> None:
    """Backward too: of a layer's input, of the second layer."""
    fn, params, buffers = sf.functionalize(MODEL)
    loss = lambda params, x: fn(params, buffers, x)[0].sum()
    program = sf.jit(sf.grad(loss)).trace(params, torch.randn(2, 3)).program
    found = modules_of(program)
    layers = {f"{k}.{name}" for k in (0, 1) for name in ("up", "down")}
    assert layers <= found["forward"]
    assert {"0", "1"} <= found["forward"]
    assert layers <= found["backward"]


def test_a_stack_trace_may_name_a_module() -> None:
    line = '  File "a.py", line 3, in forward'
    assert module_of(f"{line} of module a.0.b\n") == "a.0.b"
    assert module_of(f"{line}\n") is None
    path_in = Paths().path_in
    assert path_in(MODEL, MODEL[1].up) == "1.up"
    assert path_in(MODEL, MODEL) == path_in(MODEL, None) == ""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(self.q_proj(x), -1).values


def test_a_warning_names_the_module() -> None:
    """Features are sharded, and sorted in the second of two layers."""
    width = 4096
    with torch.device("meta"):
        model = nn.Sequential(Attention(width), Attention(width))
    fn, params, buffers = sf.functionalize(model)
    run = lambda params, x: fn(params, buffers, x)[0]
    x = sf.ShapeDtype((32768, width), torch.float32)
    with sf.fake_world(4, numerics=False), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mesh = sf.make_mesh((4,), ("tp",))
        sf.shard(run, mesh, (P(), P(None, "tp"))).lower(params, x)
    texts = [str(warning.message) for warning in seen]
    assert any("\n  at: 0.q_proj (" in t or "\n  at: 0 (" in t for t in texts), texts
