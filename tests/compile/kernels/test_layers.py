"""The memory that is stated for single layers and ops is that of the code that Inductor writes."""

from __future__ import annotations

import pytest
import torch

from tests.support.stages import layers
from tests.support.stages.allocations import allocated

CLOSE = 0.05
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# programs whose memory is stated more than 5% off, or is refused, in one of the dtypes
OPEN = {
    "fft, gradient",
    "logcumsumexp, gradient",
    "pad circular, gradient",
    "dropout, gradient",
    "grid sample, gradient",
    "gru, forward",
    "gumbel softmax, forward",
    "gumbel softmax, gradient",
    "local response norm, gradient",
    "multi margin, gradient",
    "rnn, gradient",
    "scatter_reduce, gradient",
    "softmax attention, forward",
    "softmax attention, gradient",
    "transformer layer with dropout, gradient",
    "triplet, gradient",
}
APART = "bilinear"  # torch's kernel takes memory of its own, which the code does not say
SLOW = {"cumprod"}  # to capture: its gradient is written out
CASES = [
    f"{group}, {name}, {kind}, {dtype}"
    for group, programs in layers.KINDS.items()
    for name in programs
    for kind in ("forward", "gradient")
    for dtype in DTYPES
    if name not in SLOW and APART not in name
]


@pytest.mark.parametrize("case", CASES)
def test_the_stated_peak_of_a_layer_is_that_of_inductors_code(case: str) -> None:
    group, name, kind, dtype = case.split(", ")
    if f"{name}, {kind}" in OPEN:
        pytest.xfail("stated more than 5% off")
    torch.manual_seed(0)
    make = layers.KINDS[group][name]
    step, args = layers.program(make(), kind, DTYPES[dtype])
    lowered = step.lower(*args)
    assert lowered.memory.peak == pytest.approx(allocated(lowered), rel=CLOSE)
