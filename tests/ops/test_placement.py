"""Prims that carry placements: identities whose derivatives keep or undo the placements."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfn.ops import placement
from tests.support.stages.graphs import calls, graph_of

X = torch.arange(6.0, dtype=torch.float64).view(3, 2)


def specs(graph: torch.fx.Graph) -> list[object]:
    """The placements of each redistribution, in order."""
    return [node.args[1] for node in calls(graph, "prim_redistribute")]


def test_every_prim_returns_the_value_in_memory_of_its_own() -> None:
    for prim in (
        lambda x: placement.redistribute(x, "a;"),
        lambda x: placement.named(x, "h"),
        lambda x: placement.align([x], [X], [""])[0],
        lambda x: placement.cotangent(x, 0),
    ):
        y = prim(X)
        assert torch.equal(y, X) and y.data_ptr() != X.data_ptr()


def test_the_gradient_and_the_tangent_of_a_redistribution_are_placed_alike() -> None:
    placed = lambda x: placement.redistribute(x * 2, "a;b").sin().sum()
    backward = graph_of(torch.func.grad(placed), X)
    assert specs(backward) == ["a;b", "a;b"]
    tangent = lambda x, t: torch.func.jvp(placed, (x,), (t,))
    assert specs(graph_of(tangent, X, X)) == ["a;b", "a;b"]


def test_a_batch_dim_keeps_its_placement() -> None:
    mapped = torch.func.vmap(lambda x: placement.redistribute(x, "a;"), in_dims=1)
    graph = graph_of(mapped, torch.ones(3, 5, 2))
    assert specs(graph) == ["*;a;"]
    (node,) = calls(graph, "prim_redistribute")
    assert node.meta["val"].shape == (5, 3, 2)


def test_the_gradient_of_a_moved_dtensor_goes_back() -> None:
    moved = lambda before: lambda x: placement.moved(x, "a=S0", before).sum()
    assert specs(graph_of(torch.func.grad(moved("a=S1")), X)) == ["a;", ";a"]
    unknown = graph_of(torch.func.grad(moved("a=Psum")), X)
    assert specs(unknown) == ["a;"], "a Partial sum is not a place to go back to"


HALF, SINGLE = torch.bfloat16, torch.float32


def retyped(x: Tensor) -> Tensor:
    return placement.moved(x, "a=S0", "a=S1", HALF, SINGLE)


def test_a_moved_dtensor_is_cast_before_and_its_gradient_before_and_after() -> None:
    loss = lambda x: (retyped(x) / 3).sum()
    gradient = graph_of(torch.func.grad(loss), X)
    casts = [n.kwargs["dtype"] for n in calls(gradient, "_to_copy")]
    assert casts == [HALF, SINGLE, X.dtype]
    assert specs(gradient) == ["a;", ";a"]
    third = torch.tensor(1 / 3, dtype=HALF).to(X.dtype)
    assert torch.equal(torch.func.grad(loss)(X), third.expand_as(X))


def test_derivatives_and_batches_of_a_cast_dtensor() -> None:
    assert torch.equal(torch.func.jvp(retyped, (X,), (X,))[1], X.to(HALF))
    mapped = torch.func.vmap(retyped, in_dims=1)
    assert torch.equal(mapped(X.view(3, 2, 1)), X.view(3, 2, 1).movedim(1, 0).to(HALF))
    assert specs(graph_of(mapped, X.view(3, 2, 1))) == ["*;a;"]
    first = torch.func.grad(lambda x: retyped(x).pow(2).sum())
    second = torch.func.grad(lambda x: first(x).sum())
    assert torch.equal(second(X), torch.full_like(X, 2.0))
    kept = placement.moved(X, "a=S0", "a=S1", X.dtype)
    assert kept.dtype == X.dtype
    partial = placement.moved(X, "a=Psum", "a=Psum", HALF)
    assert torch.equal(partial, X.to(HALF))


def test_a_dtensor_that_is_partial_stays_where_it_is() -> None:
    assert placement.placed(X, "a=Psum,b=S0") is X
    assert placement.placed(X, "a=?") is X
    assert specs(graph_of(lambda x: placement.placed(x, "a=S1,b=S1"), X)) == [";a,b"]
    assert specs(graph_of(lambda x: placement.placed(x, "a=R"), X)) == [";"]


def test_only_the_gradient_itself_has_bucketing_options() -> None:
    def aligned(x: Tensor, like: Tensor) -> Tensor:
        (y,) = placement.align([x], [like], ["options"])
        return y.sin().sum()

    graph = graph_of(torch.func.grad(aligned), X, X)
    assert [n.args[2] for n in calls(graph, "prim_align")] == ["options", ""]


def test_a_batch_of_gradients_is_aligned_with_one_parameter() -> None:
    aligned = lambda x, like: placement.align([x], [like], ["w"])[0]
    graph = graph_of(torch.func.vmap(aligned, in_dims=(0, None)), torch.ones(5, 3, 2), X)
    (node,) = calls(graph, "prim_align")
    x, like = (arg.meta["val"].shape for arg in node.args[:2])
    assert (x, like) == ((5, 3, 2), (1, 3, 2))


def test_cotangents_have_no_name() -> None:
    graph = graph_of(torch.func.grad(lambda x: placement.named(x, "h").sum()), X)
    assert [n.args[1] for n in calls(graph, "prim_name")] == ["h"]


def test_after_is_the_value_itself() -> None:
    y = placement.AFTER(X, torch.zeros(()))
    assert torch.equal(y, X) and y.data_ptr() == X.data_ptr()
