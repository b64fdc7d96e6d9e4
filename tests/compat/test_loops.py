"""torch's own higher-order functions: ops that have all derivatives, and substitutes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from shardfn import _compat
from shardfn._compat.loops import (
    _name_of,
    _standard_basis,
    differentiable_index,
    fake_inputs,
    substitutes,
)

X = torch.arange(6.0).view(2, 3)


def test_the_basis_of_a_jacobian_is_an_identity_in_the_shapes_of_the_tensors() -> None:
    tensors = [torch.ones(2), torch.ones(1, 3)]
    ((a, b),) = _standard_basis(tensors, [2, 3])
    assert torch.equal(torch.cat([a, b.view(5, 3)], 1), torch.eye(5))
    chunks = _standard_basis(tensors, [2, 3], chunk_size=2)
    assert [x.shape[0] for x, _ in chunks] == [2, 2, 1]
    assert torch.equal(torch.cat([x for x, _ in chunks]), a)


def test_an_element_is_indexed_by_an_op_under_a_transform_only() -> None:
    calls: list[object] = []
    call = lambda x, i: (calls.append(x), x[i[0], i[1]])[1]
    index = [torch.tensor(1), torch.tensor(2)]
    assert float(differentiable_index(call, X, index)) == 5.0 and len(calls) == 1
    grad = torch.func.grad(lambda x: differentiable_index(call, x, index))(X)
    assert len(calls) == 1 and grad.nonzero().tolist() == [[1, 2]]


def test_fakes_are_found_inside_of_tensors_that_a_transform_follows() -> None:
    mode = _compat.FakeTensorMode()
    fake = mode.from_tensor(X)
    found: list[object] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        node = SimpleNamespace(meta={"example_value": x})
        plain = SimpleNamespace(meta={"example_value": fake})
        found.extend(fake_inputs(lambda xs: [xs[0].meta["example_value"]], [node, plain]))
        return x.sum()

    with mode:
        torch.func.grad(look)(fake)
    assert len(found) == 2 and all(not _compat.is_wrapped(x) for x in found)


def test_names_and_the_table_of_substitutes() -> None:
    assert _name_of(test_names_and_the_table_of_substitutes).startswith("test_names")
    assert _name_of(3) == "a function"
    assert substitutes() and all(map(callable, substitutes().values()))
