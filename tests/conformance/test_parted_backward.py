"""The backward of an op as a pipeline runs it, gradients of activations (B) and of parameters (W)
apart, returns the gradients of torch's autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import shardfn as sf
from conformance.calls import Call, calls, entries
from shardfn.errors import ShardError

MICROBATCHES = 2
REFUSED = {  # and why an op has no gradient in a captured program, with a pipeline or without
    "masked_select": "the shape of its result depends on values",
    "sparse.mm.reduce": "its samples are sparse",
    "sparse.sampled_addmm": "its samples are sparse",
    "tensor_split": "its last sample splits at the values of a tensor",
    "to_sparse": "its result is sparse",
}
DIFFERENTIABLE = sorted(
    name
    for name, op in entries().items()
    if op.supports_autograd
    and torch.float64 in op.supported_backward_dtypes("cpu")
    and name not in REFUSED
)


def weighted_sum(outs: list[torch.Tensor]) -> torch.Tensor:
    """A sum of all results in which each element has its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if out.is_complex():
            out = torch.view_as_real(out.resolve_conj())
        if out.is_floating_point():
            weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64)
            total = total + (out * weights.reshape(out.shape)).sum()
    return total


def active_call(name: str) -> Call | None:
    """The first sample call of an op that has a tensor to differentiate."""
    found = [c for c in calls(name, entries()[name], 2, torch.float64) if c.active]
    return found[0] if found else None


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_an_op_between_two_stages_are_those_of_autograd(name: str) -> None:
    call = active_call(name)
    if call is None:
        pytest.skip("no sample call of the op has a tensor to differentiate")
    first, *rest = call.active
    params = {
        "first": call.tensors[first].clone(),
        "rest": [call.tensors[i].clone() for i in rest],
        "scale": torch.tensor(1.0, dtype=torch.float64),
    }
    batch = torch.linspace(0, 1, 4, dtype=torch.float64)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        tensors = list(call.tensors)
        tensors[first] = params["first"] * (1 + 1e-3 * batch.mean()) * params["scale"]
        for i, x in zip(rest, params["rest"], strict=True):
            tensors[i] = x
        return weighted_sum(call.fn(*tensors))

    def by_torch() -> list[torch.Tensor]:
        own = sf.tree_map(lambda x: x.clone().requires_grad_(), params)
        values = [loss(own, batch[i::MICROBATCHES]) for i in range(MICROBATCHES)]
        value = torch.stack(values).mean()
        grads = torch.autograd.grad(value, tree_leaves(own), materialize_grads=True)
        return [value.detach(), *grads]

    expected = by_torch()
    if any(not torch.equal(x, y) for x, y in zip(expected, by_torch(), strict=True)):
        expected = seeded(sf.accumulate(sf.value_and_grad(loss), MICROBATCHES), params, batch)
    stages = {"first": sf.P(pp=0), "rest": [sf.P(pp=1)] * len(rest), "scale": sf.P(pp=1)}
    with sf.fake_world(2):
        step = sf.shard(
            sf.pipelined_grad(loss, MICROBATCHES, schedule="zero_bubble"),
            sf.make_mesh((2,), ("pp",)),
            in_placements=(stages, None),
            backend="aten",
        )
        got = seeded(lambda *args: sf.full(step(*args)), params, batch)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def seeded(function: Any, *args: Any) -> list[torch.Tensor]:
    """The results of a function that draws the same random numbers each time."""
    sf.random.state.seed(7)
    return tree_leaves(function(*args))


@pytest.mark.parametrize("name", REFUSED)
def test_an_op_without_a_gradient_in_a_program_is_refused(name: str) -> None:
    call = active_call(name)
    if call is None:
        pytest.skip("no sample call of the op has a tensor to differentiate")
    x = call.tensors[call.active[0]]

    def loss(x: torch.Tensor) -> torch.Tensor:
        tensors = list(call.tensors)
        tensors[call.active[0]] = x
        return weighted_sum(call.fn(*tensors))

    with pytest.raises(ShardError):
        sf.grad(loss)(x)
