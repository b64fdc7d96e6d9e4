"""Patches for modules: equal to torch's ops, for the time of a context."""

from __future__ import annotations

import torch

import shardfn as sf
from shardfn import _compat
from shardfn._compat.modules import applied, layers_of_rnn, settle


def test_dropout_stands_between_layers_and_not_after_the_last() -> None:
    seen: list[tuple[int, bool]] = []

    def run(x, hidden, params, biases, layers, p, train, both, first, layer):
        seen.append((layers, bool((x == 0).any())))
        return x, list(hidden)

    x = torch.ones(50, 2, 3)
    options = (True, 3, 0.5, True, False, False)
    out, states = layers_of_rnn(run, x, ["h0", "h1", "h2"], "abc", *options, layer=None)
    assert seen == [(1, False), (1, True), (1, True)] and states == ["h0", "h1", "h2"]
    plain = layers_of_rnn(run, x, ["h"], "a", True, 3, 0.0, True, False, False, layer=None)
    assert seen[-1] == (3, False) and torch.equal(plain[0], x) and out.shape == x.shape


def test_a_conversion_of_a_module_without_values_reaches_tied_parameters() -> None:
    with _compat.FakeTensorMode():
        a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        b.weight = a.weight
    whole = torch.nn.ModuleList([a, b])
    applied(torch.nn.Module._apply, a, lambda x: x.double())
    assert b.weight.dtype == torch.float32
    settle(whole)
    assert a.weight is b.weight and b.weight.dtype == torch.float64
    assert b.bias.dtype == torch.float32


def test_requires_grad_of_a_made_value_is_nothing_under_a_transform() -> None:
    class Marked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).requires_grad_() * x

    fn, params, buffers = sf.functionalize(Marked())
    x = torch.tensor([1.0, 3.0])
    for loss in (
        lambda x: fn(params, buffers, x)[0].sum(),
        lambda x: ((x * 2).requires_grad_(True) * x).sum(),
    ):
        assert torch.equal(sf.grad(loss)(x), 4 * x)
