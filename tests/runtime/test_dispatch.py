"""What runs between two calls: the entry that fits, and a new one for another signature."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn.runtime import cache

X = torch.arange(3.0)


def staged(call) -> dict[str, int]:
    """What a call added to the counts of stages."""
    before = dict(cache.counts)
    call()
    added = {k: n - before.get(k, 0) for k, n in cache.counts.items()}
    return {k: n for k, n in added.items() if n}


def test_a_signature_is_staged_once_in_any_order() -> None:
    fn = sf.jit(lambda x, by=2: x * by, backend="aten")
    assert staged(lambda: fn(X))["captures"] == 1
    assert staged(lambda: fn(X[:2]))["captures"] == 1
    for x in (X, X[:2], X + 1, X[1:]):
        assert staged(lambda x=x: fn(x)) == {}
    assert fn(X).tolist() == [0, 2, 4] and fn(X, 3).tolist() == [0, 3, 6]
    assert fn(X).tolist() == [0, 2, 4], "the earlier constant"


def test_keywords_in_any_order_are_one_signature() -> None:
    fn = sf.jit(lambda *, a, b: a - b, backend="aten")
    fn(a=X, b=X)
    assert staged(lambda: fn(a=X, b=2 * X)) == {}
    assert fn(b=X, a=2 * X).tolist() == X.tolist()


def test_a_call_under_autograd_and_one_without_are_two_signatures() -> None:
    fn = sf.jit(lambda x: (x * x).sum(), backend="aten")
    w = X.clone().requires_grad_()
    fn(w).backward()
    assert w.grad.tolist() == (2 * X).tolist()
    with torch.no_grad():
        assert not fn(w).requires_grad
    assert staged(lambda: fn(w)) == {}
