"""Residuals of scans: what the transpose reads in place of computing it again."""

from __future__ import annotations

from typing import Any

import torch

from shardfn.capture.control_flow.scan import replay_scan
from shardfn.capture.control_flow.scan_residuals import save_residuals, simplify
from shardfn.ops.loops import Scan
from tests.support.stages.bodies import body, loops, lowered
from tests.support.stages.graphs import op_of

C = torch.tensor([0.2, 0.4], dtype=torch.float64)
W = torch.tensor([[0.5, 0.1], [0.3, 0.9]], dtype=torch.float64)
XS = torch.arange(6, dtype=torch.float64).view(3, 2) / 10


def gradients(step: Any) -> torch.fx.GraphModule:
    """The gradients of a scan with respect to its first carry and to a closed-over matrix."""

    def loss(c: torch.Tensor, w: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        carry, ys = replay_scan(body(step, 2, 2, [w]), [c], [xs], len(xs), False)
        return carry.sum() + ys.square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1))
    return lowered(lambda c, w, xs: list(grad(c, w, xs)), C, W, XS)


def step(c: Any, x: Any, w: Any) -> Any:
    new = (c @ w).exp().sin() + x
    return [new, new * c]


def ops(loop: Any) -> list[str]:
    return [op_of(n) for n in loop.graphs[0].nodes if n.op == "call_function"]


def test_a_transpose_reads_what_its_scan_computed() -> None:
    module = gradients(step)
    before = module(C, W, XS)
    assert save_residuals(module.graph)
    module.recompile()
    torch.testing.assert_close(module(C, W, XS), before, rtol=0, atol=0)
    forward, backward = loops(module.graph, Scan)
    assert "exp" not in ops(backward) and "exp" in ops(forward)
    assert backward.transposes is None, "it is done once"
    assert not save_residuals(module.graph)
    module.graph.lint()


def test_stacked_residuals_have_a_row_for_each_step() -> None:
    module = gradients(step)
    simplify(module.graph)
    (first,) = [
        n for n in module.graph.nodes if isinstance(n.target, Scan) and not n.target.reverse
    ]
    added = first.meta["val"][first.target.carries :]
    assert added and all(len(x) == 3 for x in added)
    assert len(first.target.graphs[0].find_nodes(op="output")[0].args[0]) == len(first.meta["val"])


def test_a_residual_with_permuted_dims_keeps_its_values() -> None:
    def turned(c: Any, x: Any, w: Any) -> Any:
        outer = torch.outer(c, x).exp().T  # (2, 2), not contiguous
        return [(outer @ w).sin().sum(0) + x, c]

    module = gradients(turned)
    before = module(C, W, XS)
    assert save_residuals(module.graph)
    module.recompile()
    torch.testing.assert_close(module(C, W, XS), before, rtol=0, atol=0)


def test_several_views_of_a_value_are_saved_as_one() -> None:
    def viewed(c: Any, x: Any, w: Any) -> Any:
        hidden = (c + x).exp()
        rows, columns = hidden.view(1, 2), hidden.view(2, 1)
        return [((rows @ w) * (w @ columns).view(1, 2)).view(2).sin(), x]

    module = gradients(viewed)
    before = module(C, W, XS)
    simplify(module.graph)
    module.recompile()
    torch.testing.assert_close(module(C, W, XS), before, rtol=0, atol=0)
    _, backward = loops(module.graph, Scan)
    kept = [x.name for x in backward.graphs[0].find_nodes(op="placeholder")]
    assert kept.count("kept_exp") == 1
    assert not [name for name in kept if name.startswith("kept_view")]


def test_a_scan_computes_nothing_twice_for_its_transpose() -> None:
    """Not after equal views of one value either: products of queries, keys and values."""

    def branched(c: Any, x: Any, w: Any) -> Any:
        hidden = (c + x).exp()
        several = [(hidden.view(1, 2) @ (w + k)).sin() for k in range(3)]
        return [(several[0] * several[1] * several[2]).view(2), x]

    module = gradients(branched)
    before = module(C, W, XS)
    simplify(module.graph)
    module.recompile()
    torch.testing.assert_close(module(C, W, XS), before, rtol=0, atol=0)
    forward, backward = loops(module.graph, Scan)
    assert ops(forward).count("mm") == 3
    assert ops(forward).count("sin") == 3
    assert "sin" not in ops(backward)


def test_views_alone_are_not_saved() -> None:
    def turned(c: Any, x: Any, w: Any) -> Any:
        return [(c.view(2, 1) * w).sum(0) + x, x]

    module = gradients(turned)
    views = [op for s in loops(module.graph, Scan) for op in ops(s) if op == "view"]
    assert views, "the transpose multiplies by a view of the carry"
    scans = loops(module.graph, Scan)
    assert not save_residuals(module.graph)
    assert loops(module.graph, Scan) == scans


def test_a_scan_of_other_rows_keeps_what_it_has() -> None:
    module = gradients(step)
    (primal,) = [
        n for n in module.graph.nodes if isinstance(n.target, Scan) and not n.target.reverse
    ]
    holder = primal.args[-1]
    with module.graph.inserting_before(primal):
        other = module.graph.call_function(torch.neg, (holder,))
        other.meta = dict(holder.meta)
    primal.args = (*primal.args[:-1], other)
    assert not save_residuals(module.graph)
