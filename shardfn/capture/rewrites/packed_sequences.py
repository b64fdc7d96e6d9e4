"""Packed sequences of lengths that are numbers: torch makes a tensor of the lengths, whose values
a graph does not know.

Dynamo reads this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from ... import _compat
from ..dtensors import replaced_calls
from .python_substitutes import misused

Numbers = tuple[int, ...]


class PackedRows(rnn.PackedSequence):
    """A PackedSequence whose batch sizes are known: `counts`, a number for each step."""

    counts: Numbers


def pack_padded_sequence(
    input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Any:
    """torch's pack_padded_sequence, of lengths in a list."""
    if isinstance(lengths, torch.Tensor):
        return _compat.PACK_ROWS(input, lengths, batch_first)  # refused
    numbers: Numbers = tuple(lengths)
    order = None
    if not enforce_sorted:
        places = sorted(range(len(numbers)), key=lambda k: -numbers[k])
        numbers = tuple(numbers[k] for k in places)
        order = torch.tensor(places, device=input.device)
        input = input.index_select(0 if batch_first else 1, order)
    data, counts = rows_of(input, numbers, batch_first)
    return _packed(
        data, counts, order, rnn.invert_permutation(order) if order is not None else None
    )


def _packed(data: torch.Tensor, counts: Numbers, order: Any, inverse: Any) -> PackedRows:
    out = PackedRows(data, torch.tensor(counts), order, inverse)
    out.counts = counts
    return out


def rows_of(x: torch.Tensor, lengths: Numbers, batch_first: bool) -> tuple[torch.Tensor, Numbers]:
    """The rows of a padded batch, step by step, and how many each step has."""
    steps = x.transpose(0, 1) if batch_first else x  # (time, batch, ...)
    where = "pack_padded_sequence"
    if len(lengths) != steps.shape[1]:
        misused(where, f"{len(lengths)} lengths, for a batch of {steps.shape[1]}")
    if min(lengths) < 1 or max(lengths) > steps.shape[0]:
        misused(where, f"lengths are {lengths}, but must be from 1 to {steps.shape[0]}")
    if list(lengths) != sorted(lengths, reverse=True):
        misused(where, f"lengths are {lengths}, but must decrease unless enforce_sorted=False")
    counts = tuple(sum(n > t for n in lengths) for t in range(lengths[0]))
    return torch.cat([steps[t, :n] for t, n in enumerate(counts)]), counts


def padded(
    data: torch.Tensor, counts: Numbers, batch_first: bool, value: float, total: int | None
) -> tuple[torch.Tensor, Numbers]:
    """The padded batch of packed rows, and its lengths."""
    if total is not None and total < len(counts):
        misused(
            "pad_packed_sequence",
            f"total_length is {total}, but the longest sequence has {len(counts)} steps",
        )
    above = [0, 0] * (data.dim() - 1)
    steps = [F.pad(x, (*above, 0, counts[0] - x.shape[0]), value=value) for x in data.split(counts)]
    steps += [data.new_full(steps[0].shape, value)] * ((total or len(counts)) - len(counts))
    lengths = tuple(sum(n > k for n in counts) for k in range(counts[0]))
    return torch.stack(steps, 1 if batch_first else 0), lengths


def pad_packed_sequence(
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> Any:
    """torch's pad_packed_sequence, of rows whose counts are known."""
    if not isinstance(sequence, PackedRows):
        return _compat.PACK_ROWS(sequence.data, sequence.batch_sizes, False)  # refused
    out, numbers = padded(sequence.data, sequence.counts, batch_first, padding_value, total_length)
    lengths = torch.tensor(numbers)
    inverse = sequence.unsorted_indices
    if inverse is None:
        return out, lengths
    return out.index_select(0 if batch_first else 1, inverse), lengths[inverse]


def pack_sequence(sequences: Any, enforce_sorted: bool = True) -> Any:
    """torch's pack_sequence."""
    lengths = [x.shape[0] for x in sequences]
    batch = rnn.pad_sequence(sequences)
    return pack_padded_sequence(batch, lengths, enforce_sorted=enforce_sorted)


def _numbers(x: torch.Tensor) -> Numbers:
    """The values of a tensor that was made from numbers, also under torch.func, which has no
    `tolist`.
    """
    return tuple(int(n) for n in x)


def _rows_packed(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """The op of torch's pack_padded_sequence, in a module that runs."""
    data, counts = rows_of(input, _numbers(lengths), batch_first)
    return data, torch.tensor(counts)


def _rows_padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: int
) -> Any:
    """The op of torch's pad_packed_sequence, in a module that runs."""
    out, lengths = padded(data, _numbers(batch_sizes), batch_first, value, total)
    return out, torch.tensor(lengths)


@_compat.keep_in_graph
def rows_run(
    mode: str, data: torch.Tensor, counts: Numbers, hx: Any, parameters: Any, *options: Any
) -> Any:
    """The packed rows that a module of this mode computes, and its last hidden states; Dynamo
    keeps this call.
    """
    return tuple(_compat.rows_by_step(mode, data, counts, hx, parameters, *options))


@_compat.read_by_dynamo
def forward(module: Any, input: Any, hx: Any = None) -> Any:
    """The forward of an LSTM, a GRU or an RNN, of rows whose counts are known."""
    if not isinstance(input, PackedRows):
        return PLAIN[module.mode](module, input, hx)
    data, _, order, inverse = input
    counts = input.counts
    if hx is None:
        hx = _zeros(module, data, counts[0])
    else:
        hx = module.permute_hidden(hx, order)
    module.check_forward_args(data, hx, counts)
    parameters = tuple(module._flat_weights)
    options = module.bias, module.num_layers, module.dropout, module.training, module.bidirectional
    out, *last = rows_run(module.mode, data, counts, hx, parameters, *options)
    hidden = tuple(last) if module.mode == "LSTM" else last[0]
    return _packed(out, counts, order, inverse), module.permute_hidden(hidden, inverse)


@_compat.read_by_dynamo
def _zeros(module: Any, data: torch.Tensor, batch: int) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    size = module.proj_size if module.proj_size > 0 else module.hidden_size
    h = data.new_zeros(layers, batch, size)
    if module.mode != "LSTM":
        return h
    return h, data.new_zeros(layers, batch, module.hidden_size)


FORWARDS = nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward
LSTM, GRU, RNN = map(_compat.twin, FORWARDS)
PLAIN = {"LSTM": LSTM, "GRU": GRU, "RNN_TANH": RNN, "RNN_RELU": RNN}

TABLE = {
    rnn.pack_padded_sequence: pack_padded_sequence,
    rnn.pad_packed_sequence: pad_packed_sequence,
    rnn.pack_sequence: pack_sequence,
}
replaced_calls.FUNCTIONS.update(dict.fromkeys(FORWARDS, forward))
_compat.MODULE_OPS.update({_compat.PACK_ROWS: _rows_packed, _compat.PAD_ROWS: _rows_padded})
