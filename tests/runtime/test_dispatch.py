"""What runs between two calls: the entry that fits, and a new one for another signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from stagings import counts

import shardfn as sf
from shardfn import P
from shardfn.runtime import dispatch
from tests.support.ranks import run_ranks

X = torch.arange(3.0)


def staged(call: Callable[[], Any]) -> dict[str, int]:
    """What a call added to the counts of stages."""
    before = dict(counts)
    call()
    added = {k: n - before.get(k, 0) for k, n in counts.items()}
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


def trees(mesh: Any) -> list[dict[str, Any]]:
    """The same tree twice, as DTensors of an uneven shard and of a replicated tensor."""
    tree = {"w": torch.arange(15.0).reshape(5, 3), "b": torch.ones(3)}
    marks = {"w": P("dp"), "b": P()}
    return [sf.distribute(tree, mesh, marks) for _ in range(2)]


def repeated_calls() -> list[int]:
    """Calls of one structure with DTensors. Returns how many leaves were looked at in each."""
    mesh = sf.make_mesh((2,), ("dp",))
    scaled = lambda t, by=2.0: {k: x * by for k, x in t.items()}
    fn = sf.shard(scaled, mesh, backend="aten")
    tree, other = trees(mesh)
    made: list[int] = []

    def call(*args: Any) -> Any:
        with mock.patch.object(dispatch, "_spec", wraps=dispatch._spec) as spec:
            out = fn(*args)
        made.append(spec.call_count)
        assert sf.full(out)["w"].max().item() == 28
        return out

    for _ in range(3):
        call(tree)
    call(other)  # equal specs, which are not the same objects
    call(other)
    with torch.no_grad():
        call(tree)
    call({"w": tree["w"], "b": tree["b"]})
    w = tree["w"].detach().requires_grad_()
    out = call({"w": w, "b": tree["b"]})
    out["w"].full_tensor().sum().backward()
    assert w.grad.full_tensor().eq(2).all(), "autograd records it"
    whole = tree["w"].redistribute(placements=[sf.Replicate()])
    assert call({"w": whole, "b": tree["b"]})["w"].placements == whole.placements
    assert call({"w": sf.full(whole), "b": tree["b"]})["w"].shape == (5, 3)
    assert fn({"w": tree["w"], "b": tree["b"]}, 3.0)["b"].full_tensor().eq(3).all()
    return made


def test_repeated_calls_with_dtensors_look_at_no_leaf_in_python() -> None:
    for made in run_ranks(2, repeated_calls):
        # the second call remembers; other specs and another grad mode are compared again
        assert made[1:7] == [2, 0, 2, 0, 2, 0]


def calls_of_parameters_and_a_batch() -> tuple[list[int], list[Any], list[Any]]:
    """Calls of DTensors and a plain tensor: how many leaves each looks at, and the results."""
    mesh = sf.make_mesh((1,), ("dp",))
    fn = sf.shard(lambda w, x: (x @ w).sum(0), mesh, backend="aten")
    whole = torch.arange(6.0).reshape(2, 3)
    rows, copies = (sf.distribute(whole, mesh, P(p)) for p in ("dp", None))
    batches = [torch.ones(n, 2) * n for n in (4, 4, 4, 5, 4, 4)]
    params = [rows, rows, rows, rows, rows, copies]
    looked, found, wanted = [], [], []
    for w, x in zip(params, batches, strict=True):
        with mock.patch.object(dispatch, "_spec", wraps=dispatch._spec) as spec:
            found.append(sf.full(fn(w, x)))
        looked.append(spec.call_count)
        wanted.append((x @ whole).sum(0))
    return looked, found, wanted


def test_parameters_and_a_batch_are_checked_together_and_told_apart() -> None:
    ((looked, found, wanted),) = run_ranks(1, calls_of_parameters_and_a_batch)
    torch.testing.assert_close(found, wanted)
    # the third call repeats the second one; another placement or batch size is looked at
    assert looked == [1, 1, 0, 1, 1, 1]


def donated_calls() -> None:
    mesh = sf.make_mesh((2,), ("dp",))
    step = lambda t: {k: x + 1 for k, x in t.items()}
    fn = sf.shard(step, mesh, backend="aten", donate_argnums=0)
    first, _ = trees(mesh)
    tree = first
    for _ in range(4):
        before, tree = tree, fn(tree)
        with pytest.raises(sf.ShardError, match="donated"):
            fn(before)
    assert sf.full(tree)["w"].max() == 18


def test_a_donated_tree_of_dtensors_is_refused_in_each_repeated_call() -> None:
    run_ranks(2, donated_calls)
