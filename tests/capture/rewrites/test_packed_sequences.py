"""Packed sequences whose lengths are numbers: torch's values, in a function and in a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import shardfn as sf
from shardfn import P

G = torch.Generator().manual_seed(3)
X = torch.randn(3, 4, 2, generator=G, dtype=torch.float64)  # (batch, time, features)
KINDS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(2, 3, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(2, 3, bias=False, batch_first=True),
    "rnn": lambda: nn.RNN(2, 3, nonlinearity="relu", batch_first=True),
}


class Encoder(nn.Module):
    """Packs its batch, and returns all that a packed sequence has."""

    def __init__(self, recurrent: nn.Module, lengths: Any) -> None:
        super().__init__()
        self.recurrent, self.lengths = recurrent.double(), lengths

    def forward(self, x: torch.Tensor) -> Any:
        lengths = self.lengths() if callable(self.lengths) else self.lengths
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, last = self.recurrent(packed)
        out, lengths = rnn.pad_packed_sequence(y, batch_first=True, total_length=5)
        last = last[1] if isinstance(last, tuple) else last
        return out, lengths, last, y.data, y.batch_sizes


def loss_of(results: Any) -> torch.Tensor:
    return results[0].sin().sum() + results[2].cos().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_of_known_lengths_are_torchs(kind: str) -> None:
    encoder = Encoder(KINDS[kind](), [2, 4, 1])
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss_of(encoder(x)), x)
    torch.testing.assert_close(sf.jit(lambda x: encoder(x), backend="aten")(X), encoder(X))
    torch.testing.assert_close(sf.grad(lambda x: loss_of(encoder(x)))(X), wanted)


@pytest.mark.parametrize("lengths", [[2, 4, 1], lambda: torch.tensor([2, 4, 1])])
def test_a_functionalized_module_packs_its_batch(lengths: Any) -> None:
    encoder = Encoder(nn.LSTM(2, 3, batch_first=True), lengths)
    fn, params, buffers = sf.functionalize(encoder)
    call = lambda params, x: fn(params, buffers, x)[0]
    torch.testing.assert_close(sf.jit(call, backend="aten")(params, X), encoder(X))
    gradients = sf.grad(lambda params, x: loss_of(call(params, x)))(params, X)
    loss_of(encoder(X)).backward()
    torch.testing.assert_close(gradients, {k: p.grad for k, p in encoder.named_parameters()})


def test_packed_rows_are_sharded() -> None:
    encoder = Encoder(nn.GRU(2, 3, batch_first=True), (2, 4, 1))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        step = sf.shard(lambda x: encoder(x)[:3], mesh, P("a"), backend="aten")
        torch.testing.assert_close(tuple(map(sf.full, step(X))), encoder(X)[:3])


def test_lengths_among_the_arguments_may_be_numbers() -> None:
    pack = lambda x, n: rnn.pack_padded_sequence(x, n, batch_first=True).data * 2
    ours = sf.jit(pack, backend="aten")
    for lengths in ([4, 2, 2], [3, 2, 1]):
        torch.testing.assert_close(ours(X, lengths), pack(X, lengths))


def test_sequences_are_packed() -> None:
    pack = lambda x: rnn.pack_sequence([x, x[:2], 2 * x[:1]]).data
    torch.testing.assert_close(sf.jit(pack, backend="aten")(X), pack(X))


REFUSED: dict[str, tuple[Any, str]] = {
    "too few": ([4, 2], "2 lengths, for a batch of 3"),
    "too long": ([5, 4, 2], "lengths are (5, 4, 2), but must be from 1 to 4"),
    "empty": ([4, 2, 0], "lengths are (4, 2, 0), but must be from 1 to 4"),
    "unsorted": ([2, 4, 1], "lengths are (2, 4, 1), but must decrease unless enforce_sorted=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_lengths_that_torch_refuses_are_an_error(case: str) -> None:
    lengths, text = REFUSED[case]
    pack = lambda x: rnn.pack_padded_sequence(x, lengths, batch_first=True).data
    if case != "too long":  # where torch reads what is not there
        with pytest.raises(RuntimeError):
            pack(X)
    with pytest.raises((sf.CaptureError, RuntimeError)) as caught:
        sf.jit(pack, backend="aten")(X)
    assert text in str(caught.value) or "lengths" in str(caught.value)


def test_a_total_length_that_is_too_short_is_an_error() -> None:
    def padded(x: torch.Tensor) -> Any:
        packed = rnn.pack_padded_sequence(x, [4, 2, 1], batch_first=True)
        return rnn.pad_packed_sequence(packed, total_length=3)[0]

    with pytest.raises((sf.CaptureError, ValueError), match="total_length"):
        sf.jit(padded, backend="aten")(X)


def test_lengths_that_depend_on_values_are_refused_with_a_fix() -> None:
    pack = lambda x, n: rnn.pack_padded_sequence(x, n, batch_first=True).data
    with pytest.raises(sf.CaptureError, match="the size of a packed sequence depends on values"):
        sf.jit(pack, backend="aten")(X, torch.tensor([4, 2, 1]))
    with pytest.raises(
        sf.CaptureError, match=r"pass lengths.tolist\(\), made outside of the function"
    ):
        sf.jit(pack, backend="aten")(X, torch.tensor([4, 2, 1]))
