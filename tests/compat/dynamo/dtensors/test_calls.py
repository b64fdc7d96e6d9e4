"""Methods and functions of DTensors that Dynamo meets: ours are read in their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shardfn._compat.dynamo.dtensors import calls

NODE = torch.fx.Graph().placeholder("x")
TENSOR = SimpleNamespace(as_proxy=lambda: SimpleNamespace(node=NODE))
TX = SimpleNamespace(output=SimpleNamespace(current_tracer=None))


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


def torchs(*args: Any) -> Any:
    return "torch's"


def test_methods_have_the_tensor_and_its_placements() -> None:
    method = lambda name: calls.method_called(Ours(), torchs, TENSOR, TX, name, ["a"], {"k": 1})
    placed = "placed for to_local"
    assert method("to_local") == ("our to_local", [TENSOR, placed, "a"], {"k": 1})
    assert method("view") == "torch's"


def test_attributes_are_read_from_placements() -> None:
    read = lambda name: calls.attribute_read(Ours(), torchs, TENSOR, TX, name)
    placed = "placed for placements"
    assert read("placements") == ("our placements", [placed], {})
    assert read("device_mesh") == ("variable", "mesh")
    local = [TENSOR, "placed for _local_tensor"]
    assert read("_local_tensor") == ("our to_local", local, {})
    assert read("shape") == "torch's"


def test_functions_of_the_table_are_replaced_and_others_called() -> None:
    call = lambda fn: calls.function_called(Ours(), torchs, SimpleNamespace(fn=fn), TX, [1], {})
    assert call(distribute_tensor) == ("our distribute", [1], {})
    assert call(torch.sin) == "torch's" and call([]) == "torch's"
    by_value = SimpleNamespace(value=distribute_tensor)
    found = calls.function_called(Ours(), torchs, by_value, TX, [], {})
    assert found[0] == "our distribute"
    with pytest.raises(torch._dynamo.exc.UserError):
        call(DTensor)


def test_collectives_without_a_row_are_refused() -> None:
    call = lambda fn: calls.collective_called(Ours(), torchs, SimpleNamespace(fn=fn), TX, [1], {})
    assert call(distribute_tensor) == ("our distribute", [1], {})
    with pytest.raises(torch._dynamo.exc.UserError, match="all_reduce"):
        call(dist.all_reduce)


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
