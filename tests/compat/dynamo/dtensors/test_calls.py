"""Methods and functions of DTensors that Dynamo meets: ours are read in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from shardfn._compat.dynamo.dtensors import calls

NODE = torch.fx.Graph().placeholder("x")


class Proxy:
    def __init__(self, node: torch.fx.Node) -> None:
        self.node = node


class Ours:
    """Functions of ours, by name, and what is asked of the tensors."""

    def __init__(self) -> None:
        self.methods = {"to_local": "our to_local"}
        self.attributes = {"placements": "our placements"}
        self.of_meshes = {"get_rank": "our rank"}
        self.of_groups = {"rank": "our group rank"}
        self.functions = {distribute_tensor: "our distribute", DeviceMesh.__enter__: "in_mesh"}
        self.of_losses: dict[Any, Any] = {}
        self.checked: list[Any] = []

    def placed(self, name: str, node: Any, outer: Any) -> str:
        assert node is NODE
        return f"placed for {name}"

    def check(self, node: Any, outer: Any) -> None:
        self.checked.append((node, outer()))

    def mesh(self, node: Any, outer: Any) -> str:
        return "mesh"

    def asked_for(self, node: Any, outer: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def _reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo would read, as a tuple."""
    monkeypatch.setattr(calls, "read_ours", lambda tx, fn, args, kw: (fn, args, kw))
    monkeypatch.setattr(calls.arguments, "check", lambda *args, **kw: None)
    monkeypatch.setattr(calls, "mesh_variable", lambda tx, mesh: ("variable", mesh))


def test_new_calls_are_checked_with_the_values_outside() -> None:
    graph = torch.fx.Graph()
    outside, inside, middle = (graph.placeholder(name) for name in "oim")
    root = SimpleNamespace(lifted_freevars={}, parent=None)
    one = SimpleNamespace(lifted_freevars={Proxy(outside): Proxy(middle)}, parent=root)
    two = SimpleNamespace(lifted_freevars={Proxy(middle): Proxy(inside)}, parent=one)
    two.create_node = None
    ours = Ours()
    made = graph.call_function(torch.neg, (inside,))
    create = lambda tracer, node: node
    assert calls.node_created(ours, create, two, made) is made
    assert ours.checked == [(made, {middle: outside, inside: middle})]
    calls.node_created(ours, create, two, inside)
    assert len(ours.checked) == 1, "an input is no call"
