"""Meshes and process groups that Dynamo meets: methods of ours, texts, and what they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf
from shardfn._compat.dynamo.dtensors import objects

TX = SimpleNamespace()
X = sf.random.normal(sf.random.key(0), (2,))


class Ours:
    """Functions of ours, by name."""

    def __init__(self) -> None:
        self.of_meshes = {"get_rank": "our rank"}
        self.of_groups = {"rank": "our group rank"}
        self.functions = {DeviceMesh.__enter__: "in_mesh"}


def torchs(*_: Any) -> str:
    return "torch's"


@pytest.fixture
def _reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo would read, as a tuple."""
    monkeypatch.setattr(objects, "read_ours", lambda tx, fn, args, kw: (fn, args, kw))


@pytest.mark.usefixtures("_reads")
def test_methods_of_meshes_and_groups_may_ask_for_the_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        of_mesh = SimpleNamespace(value=mesh)
        held = SimpleNamespace(value=SimpleNamespace(real_obj=mesh))
        group = SimpleNamespace(value=mesh.get_group("dp"))
        call = lambda owner, name: objects.method_called(Ours(), torchs, owner, TX, name, [], {})
        assert call(of_mesh, "get_rank") == ("our rank", [of_mesh], {})
        assert call(held, "get_rank") == ("our rank", [held], {})
        assert call(group, "rank") == ("our group rank", [group], {})
        assert call(of_mesh, "rank") == call(group, "get_rank") == "torch's"
        assert call(SimpleNamespace(value=3), "rank") == "torch's"


@pytest.mark.usefixtures("_reads")
def test_a_with_may_enter_a_mesh() -> None:
    class Stack:
        def __init__(self, top: Any) -> None:
            self.stack = [top]
            self.push, self.pop = self.stack.append, self.stack.pop

    with sf.fake_world(2):
        tx: Any = Stack(SimpleNamespace(value=sf.make_mesh((2,), ("dp",))))
        top = tx.stack[0]
        assert objects.context_entered(Ours(), torchs, tx) == "torch's"
        assert tx.stack == [("in_mesh", [top], {})]
    tx = Stack(SimpleNamespace(value=3))
    objects.context_entered(Ours(), torchs, tx)
    assert tx.stack[0].value == 3


def told(fn: Any) -> Any:
    return sf.jit(lambda x: (x * 1, fn()), backend="aten")(X)[1]


def test_a_mesh_and_a_group_have_their_own_texts_and_attributes() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        group = mesh.get_group("tp")
        facts = lambda: (
            (repr(mesh), str(mesh), f"{mesh}", f"{mesh!r}"),
            (repr(group), str(group), f"{group}"),
            (hasattr(mesh, "size"), hasattr(mesh, "nothing"), hasattr(group, "rank")),
            (getattr(mesh, "nothing", 3), getattr(mesh, "ndim", 3)),
            str(3),
        )
        assert told(facts) == facts()


def test_the_ranks_of_a_mesh_inside_of_a_derivative() -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        loss = lambda x: (x.sum() * mesh.mesh.sum(), mesh.mesh)
        gradient, ranks = sf.jit(sf.grad(loss, has_aux=True), backend="aten")(X)
        assert sf.full(gradient).tolist() == [6, 6]
        assert sf.full(ranks).tolist() == mesh.mesh.tolist()
        assert sf.full(ranks).dtype == mesh.mesh.dtype
