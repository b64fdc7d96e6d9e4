"""Decompositions of capture: equal to torch's ops, and sums where a Partial sum may pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfn.capture.rewrites.decompositions import KEPT, OWN, table
from tests.support.stages.graphs import graph_of, op_of

aten = torch.ops.aten
G = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, generator=G, dtype=torch.float64)
A, B = (torch.randn(*s, generator=G, dtype=torch.float64) for s in ((3, 2), (2, 5)))
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mean.default, (X,), {}),
    (aten.mean.dim, (X, [-1], True), {}),
    (aten.mean.dim, (X.half(), [0]), {"dtype": torch.float32}),
    (aten.var.correction, (X, [1]), {"correction": 0}),
    (aten.var_mean.correction, (X, None), {}),
    (aten.var_mean.correction, (X, [0]), {"keepdim": True}),
    (aten.max.default, (X,), {}),
    (aten.min.default, (X,), {}),
    (aten.addmm.default, (X, A, B), {"beta": 0.5, "alpha": 2}),
    (aten.addmm.default, (X * float("nan"), A, B), {"beta": 0}),
    (aten.addmv.default, (X[:, 0], A, B[:, 0]), {}),
    (aten.baddbmm.default, (X[None], A[None], B[None]), {"alpha": 3}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=lambda x: str(x)[:24])
def test_a_decomposition_equals_its_op(op: Any, args: Any, kwargs: Any) -> None:
    got, wanted = OWN[op](*args, **kwargs), op(*args, **kwargs)
    torch.testing.assert_close(got, wanted)
    same = got if isinstance(got, torch.Tensor) else got[0]
    like = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
    assert same.dtype == like.dtype


UNDEFINED = [
    (aten.mean.dim, (torch.ones(0, 3), [0])),
    (aten.var.correction, (torch.ones(1, 3), [0])),
    (aten.var_mean.correction, (torch.ones(2, dtype=torch.complex64),)),
    (aten.max.default, (torch.ones(0),)),
]


@pytest.mark.parametrize(("op", "args"), UNDEFINED, ids=lambda x: str(x)[:24])
def test_what_it_cannot_say_is_left_to_torch(op: Any, args: Any) -> None:
    assert OWN[op](*args) is NotImplemented


def test_a_product_is_reduced_before_the_bias_is_added() -> None:
    fn = lambda x, a, b: OWN[aten.addmm.default](x, a, b)
    calls = [op_of(n) for n in graph_of(fn, X, A, B).nodes if n.op == "call_function"]
    assert calls == ["mm", "add"]


def test_ops_that_are_kept_and_ops_with_rules_are_not_decomposed() -> None:
    every = table()
    kept = {getattr(p, name) for p in KEPT for name in p.overloads()}
    assert not kept & every.keys() - OWN.keys()
    assert aten.mean.dim in every
    assert aten.mean.dim not in table(frozenset({aten.mean.dim}))
    assert aten.mean.dim in table(), "the table itself is as before"
