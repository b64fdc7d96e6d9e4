"""The record of an autograd.Function's forward: what it returned, and what it saved."""

from __future__ import annotations

import torch

from shardfn.capture.rewrites.function_records import Context, Place, Record

X, Y, EXTRA = torch.ones(2), torch.zeros(2), torch.ones(3)


def context(*saved: torch.Tensor) -> Context:
    made = Context()
    made.to_save = saved
    return made


def test_saved_tensors_are_inputs_results_or_further_results() -> None:
    record = Record.of(context(X, Y, EXTRA), [X], Y)
    assert record.saved[0] == (Place(True, 0), Place(False, 0), Place(False, 1))
    assert record.extras == (EXTRA,)
    assert [record.is_extra(p) for p in record.places] == [False, False, True]
    values = {place: place.value([X], [Y, EXTRA]) for place in record.places}
    saved, _, _ = record.filled(values)
    assert all(a is b for a, b in zip(saved, (X, Y, EXTRA), strict=True))


def test_attributes_of_the_context_are_kept_with_tensors_in_them() -> None:
    made = context()
    made.scale, made.mask = 3, Y
    made.materialize_grads = False
    record = Record.of(made, [X, Y], X)
    assert record.saved[2] == {"scale": 3, "mask": Place(True, 1)}
    assert not record.materializes


def test_a_result_is_as_the_forward_returned_it() -> None:
    a, b = torch.ones(1), torch.ones(2)
    single = Record.of(context(), [X], Y)
    assert single.result([a]) is a
    several = Record.of(context(), [X], (Y, "text", X))
    assert several.result([a, b]) == (a, "text", b) and several.count == 2


def test_a_result_without_a_derivative_is_detached() -> None:
    made = context()
    made.non_differentiable = (Y,)
    record = Record.of(made, [X], (X, Y))
    a, b = (torch.ones(1, requires_grad=True) * 2 for _ in range(2))
    first, second = record.result([a, b])
    assert first.requires_grad and not second.requires_grad
    assert record.silent == {1}
