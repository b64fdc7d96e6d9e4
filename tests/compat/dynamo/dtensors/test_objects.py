"""Meshes and process groups that Dynamo meets: methods of ours, texts, and what they have."""

from __future__ import annotations

from typing import Any

import shardfn as sf

X = sf.random.normal(sf.random.key(0), (2,))


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
