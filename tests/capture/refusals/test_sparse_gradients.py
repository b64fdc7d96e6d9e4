"""An embedding whose gradient would be a sparse tensor is refused by name where it is
differentiated, and runs elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import shardfn as sf

AT = torch.tensor([[1, 2], [2, 4]])
MODULES: dict[str, Any] = {
    "embedding": nn.Embedding(6, 3, sparse=True),
    "embedding_bag": nn.EmbeddingBag(6, 3, sparse=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_sparse_gradient_is_refused_by_name(name: str, backend: str) -> None:
    module = MODULES[name]
    with pytest.raises(sf.CaptureError, match=f"op {name}: with sparse=True") as caught:
        sf.jit(lambda i: module(i).sum(), backend=backend)(AT).backward()
    assert "try: sparse=False" in str(caught.value) and f"at: {__file__}" in str(caught.value)


@pytest.mark.parametrize("name", MODULES)
def test_a_derivative_of_it_is_refused_with_what_to_write(name: str) -> None:
    fn, params, buffers = sf.functionalize(MODULES[name])
    with pytest.raises(sf.CaptureError, match="sparse=False"):
        sf.grad(lambda p: fn(p, buffers, AT)[0].sum())(params)


@pytest.mark.parametrize("name", MODULES)
def test_it_runs_where_nothing_is_differentiated(name: str) -> None:
    module = MODULES[name]
    with torch.no_grad():
        assert_close(sf.jit(lambda i: module(i), backend="aten")(AT), module(AT))
    weight = module.weight.detach()
    grad = sf.grad(lambda x: (F.embedding(AT, weight, sparse=True) * x).sum())
    assert_close(grad(torch.ones(3)), F.embedding(AT, weight).sum((0, 1)))
