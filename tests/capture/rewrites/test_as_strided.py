"""Memory layout: as_strided reads one dense value, and what is none is refused by its argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf

X = torch.arange(12.0).view(3, 4)
FIRST = lambda x: x.as_strided((2,), (1,))
REFUSED = {
    "beyond the end": (
        lambda x: x.as_strided((5, 5), (4, 1)),
        X,
        "the view reads up to element 20 of a tensor with 12 elements",
    ),
    "another dtype": (
        lambda x: x.view(torch.int32).as_strided((2,), (1,)),
        X,
        "the view reads memory of torch.float32 as torch.int32",
    ),
    "gaps": (FIRST, X.expand(2, 3, 4), "has gaps or overlaps"),
    "a view": (lambda x: x.as_strided((2,), (1,), 0), X[1], "x.clone(), or slicing"),
    "in a loop": (lambda x: sf.map(FIRST, x), X, "inside a loop or branch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_is_not_of_one_dense_value_is_refused(name: str) -> None:
    fn, x, text = REFUSED[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(x)
    assert text in str(caught.value), caught.value


@pytest.mark.parametrize("kind", ["to_sparse_bsr", "to_sparse_bsc"])
def test_a_tensor_without_strides_is_refused_by_its_path(kind: str) -> None:
    x: Any = getattr(torch.eye(4), kind)((2, 2))
    with pytest.raises(sf.CaptureError, match=str(x.layout)) as caught:
        sf.jit(lambda a, b: a + b, backend="aten")(X, x)
    assert caught.value.arg_path == "b"
