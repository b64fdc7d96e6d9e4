"""A plan divided between forward and backward: what each half runs, saves and repeats."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn import P

F64 = torch.float64
X = torch.randn(7, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
W = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().square().sum()


def split_backward(fn: Any, *args: torch.Tensor) -> tuple[Any, Any]:
    lowered = sf.jit(fn, backend="aten").lower(*args)
    return lowered, lowered.backward


def ops(lowered: Any) -> list[str]:
    nodes = lowered.program.graph.find_nodes
    calls = [n for n in lowered.program.graph.nodes if n.op == "call_function"]
    assert nodes(op="output")
    return [n.target.__name__.split(".")[0] for n in calls]


def test_a_program_is_divided_where_the_backward_begins() -> None:
    forward, backward = split_backward(loss, W.clone().requires_grad_(), X)
    assert ops(forward) == ["mm", "tanh", "pow", "sum"]
    assert forward.program.out_paths == ("result", "saved 0")
    assert backward.program.in_paths == ("x", "saved 0", "cotangent of result")
    assert backward.program.out_paths == ("gradient of w",)
    assert forward.halves.residuals == (("input", 1), ("saved", 0))


def test_views_and_constants_are_repeated_and_not_saved() -> None:
    def viewed(w: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(15, dtype=F64)
        return (w.T.reshape(-1).exp() * scale).sum()

    forward, backward = split_backward(viewed, W.clone().requires_grad_())
    assert "arange" in ops(forward) and "arange" in ops(backward)
    assert forward.program.out_paths == ("result", "saved 0")  # exp alone


def test_a_result_that_the_backward_reads_is_not_returned_twice() -> None:
    forward, _ = split_backward(torch.exp, W.clone().requires_grad_())
    assert forward.halves.residuals == (("result", 0),)
    assert forward.program.out_paths == ("result",)


def test_the_state_of_random_calls_is_saved_by_value() -> None:
    def dropped(w: torch.Tensor) -> torch.Tensor:
        fn = lambda w: torch.nn.functional.dropout(w, 0.5).square()
        return sf.checkpoint(fn)(w).sum()

    w = W.clone().requires_grad_()
    call = sf.jit(dropped, backend="aten")
    first, second = call(w), call(w)
    for value in (second, first):
        w.grad = None
        value.backward()
        assert w.grad is not None
        kept = w.grad != 0
        torch.testing.assert_close(w.grad[kept], (8 * W)[kept])
        torch.testing.assert_close(value.detach(), (4 * W**2)[kept].sum())


def test_gathered_parameters_are_gathered_again_and_not_saved() -> None:
    def two(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return ((x @ w["a"]).tanh() @ w["b"]).square().sum()

    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        w = sf.distribute({"a": W, "b": W.T.contiguous()}, mesh, P("dp"))
        w = {name: x.requires_grad_() for name, x in w.items()}
        lowered = sf.shard(two, mesh, (P("dp"), P("dp"))).lower(w, X)
        kinds = [c.kind for c in lowered.backward.collectives]
        assert kinds.count("all_gather") == 1 and "reduce_scatter" in kinds
        outs = lowered.partition.outs[1:]
        assert {tuple(slot.value.shape) for slot in outs} == {(7, 3), (7, 5)}


def test_each_half_prints_and_the_whole_prints_both() -> None:
    lowered = sf.jit(loss, backend="aten").lower(W.clone().requires_grad_(), X)
    text = str(lowered)
    assert text == f"{lowered.program}\n{lowered.backward}"
    assert "saved_0 = %tanh" in text and "in    %cotangent_of_result: f64[]" in text
