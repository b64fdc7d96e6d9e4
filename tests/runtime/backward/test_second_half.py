"""The second half of a call that autograd follows: gradients from cotangents and saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import shardfn as sf
from shardfn import P
from shardfn.partition.halves import SAVED
from shardfn.runtime.backward.second_half import Backward

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(2, 3, dtype=torch.float64, generator=GENERATOR)
X = torch.randn(7, 2, dtype=torch.float64, generator=GENERATOR)  # 3, 3, 1 rows
G = torch.randn(7, 3, dtype=torch.float64, generator=GENERATOR)


def fn(w: Any, x: Any) -> Any:
    """Results with and without derivatives, and one that x alone reaches."""
    return (x @ w).tanh(), x.argmax(), w.sin()


def plain(of_first: Any, of_last: Any) -> Any:
    w = W.clone().requires_grad_()
    first, _, last = fn(w, X)
    pairs = [(first, of_first), (last, of_last)]
    pairs = [(y, g) for y, g in pairs if g is not None]
    return torch.autograd.grad([y for y, _ in pairs], [w], [g for _, g in pairs])[0]


Called = tuple[Backward, list[torch.Tensor]]


def called(mesh: Any) -> Called:
    """The second half of a call, and what autograd keeps for it."""
    calls: list[Called] = []
    run = Backward.run

    def noted(self: Backward, saved: Any, cotangents: Any) -> Any:
        calls.append((self, list(saved)))
        return run(self, saved, cotangents)

    w = sf.distribute(W, mesh, P()).requires_grad_()
    x = sf.distribute(X, mesh, P("dp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backward, "run", noted)
        outs = sf.shard(fn, mesh, (P(), P("dp")), backend="aten")(w, x)
        torch.autograd.grad(outs[0], w, torch.ones_like(outs[0].detach()))
    return calls[0]


class TestOneCall:
    @pytest.fixture(scope="class", name="call")
    def _call(self) -> Iterator[Any]:
        with sf.fake_world(3):
            yield called(sf.make_mesh((3,), ("dp",)))

    @pytest.mark.parametrize("placement", [P("dp"), P(), P(None, "dp")], ids=str)
    def test_cotangents_may_have_any_placement(self, call: Called, placement: P) -> None:
        half, saved = call
        assert half.everyone == [(0,), (1,), (2,)] and not half.is_unread
        first = sf.distribute(G, half.placed.mesh, placement)
        last = W.cos()
        of_last = sf.distribute(last, half.placed.mesh, P())
        for g, h in ((first, None), (first, of_last)):
            (grad,) = half.run(saved, [g, None, h])
            assert isinstance(grad, DTensor) and grad.placements == (Replicate(),)
            wanted = plain(G, None if h is None else last)
            torch.testing.assert_close(sf.full(grad), wanted)

    def test_results_of_other_dtypes_have_no_derivative(self, call: Called) -> None:
        half, saved = call
        assert half.has_derivative() == [True, False, True]
        assert half.floating == (0, 2) and len(half.specs) == 1
        kinds = [kind for kind, _ in half.halves.residuals]
        each = sum(3 if kind == SAVED else 1 for kind in kinds)
        assert len(saved) == each, "a saved value has a tensor for each rank"

    def test_arguments_and_results_are_kept_as_they_are(self, call: Called) -> None:
        half, _ = call
        leaves = [object(), object()]
        results = [object(), object(), object()]
        values = [torch.ones(1) for _ in half.halves.residuals]
        kept = half.saved(leaves, results, values)
        for x, (kind, i) in zip(kept, half.halves.residuals, strict=True):
            wanted = {"input": leaves, "result": results}.get(kind, values)[i]
            assert x is wanted
        assert {kind for kind, _ in half.halves.residuals} != {SAVED}


def test_without_values_gradients_have_their_shapes() -> None:
    with sf.fake_world(3, numerics=False):
        half, saved = called(sf.make_mesh((3,), ("dp",)))
        assert half.is_unread and half.everyone == [(0,)]
        (grad,) = half.run(saved, [None, None, W])
        assert grad.shape == W.shape and grad.placements == (Replicate(),)
        assert half.run(saved, [None, None, None]) == [None]


def several(a: Any, b: Any, c: Any) -> Any:
    """Results that depend on a, on a and b, on b with a gradient of zeros, and on c alone."""
    return a.sum(), (a * b).sum(), b.floor().sum(), c.sin().sum()


CALLS: dict[str, Any] = {
    "jit": lambda mesh: sf.jit(several, backend="aten"),
    "shard": lambda mesh: sf.shard(several, mesh, backend="aten"),
    "the code of one rank": lambda mesh: sf.jit(
        lambda a, b, c: (*several(a, b, c), a.to_local()), backend="aten"
    ),
    "closed over": lambda mesh: lambda *held: sf.jit(lambda: several(*held), backend="aten")(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (3,), (0, 3), (0, 1, 2)])
def test_a_gradient_of_a_result_that_does_not_depend_on_it_is_none(
    call: str, chosen: tuple[int, ...]
) -> None:
    values = [torch.randn(6, 2, generator=GENERATOR) for _ in range(3)]
    plain = [x.clone().requires_grad_() for x in values]
    torch.autograd.backward([several(*plain)[k] for k in chosen])
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        given = [sf.distribute(x, mesh, P("dp")).requires_grad_() for x in values]
        outs = CALLS[call](mesh)(*given)
        torch.autograd.backward([outs[k] for k in chosen])
        for x, y in zip(given, plain, strict=True):
            assert (x.grad is None) is (y.grad is None)
            assert x.grad is None or sf.full(x.grad).count_nonzero() == (y.grad.count_nonzero())


def test_a_plain_tensor_has_a_plain_gradient() -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        w = W.clone().requires_grad_()
        x = sf.distribute(X, mesh, P("dp"))
        loss = lambda w, x: (x @ w).tanh().sum()
        step = sf.shard(loss, mesh, (P(), P("dp")), backend="aten")
        (grad,) = torch.autograd.grad(step(w, x), w)
    assert type(grad) is torch.Tensor
    torch.testing.assert_close(grad, plain(torch.ones_like(G), None))
