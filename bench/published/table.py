"""The rows of published tables, each with what the model says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

import shardfn as sf
from bench.planner.llama import Sizes
from shardfn.hardware import H100, H100_96GB

from . import llama, megatron, pipelines, sequences
from .llama import EIGHT, FULL, NONE, SEVENTY, Run
from .pipelines import Stages

CARD, CARD8 = H100_96GB, attrs.evolve(H100_96GB, float8=True)
SXM8 = attrs.evolve(H100, float8=True)
TITAN, ASYNC, BRIDGE = "torchtitan 2024-12", "torchtitan 2025-06", "Megatron-Bridge 25.11"
GIB = 2**30
NOT_EXPLAINED = "not explained: fewer tokens a sequence have no such error"


@attrs.frozen
class Row:
    """A published figure.

    Args:
        name: what ran.
        source: who published it.
        published: the figure.
        predicted: computes the same.
        unit: of both.
        bound: the largest error that meets it.
        is_fitted: whether the efficiencies were fitted on it.
        note: why it is missed, or what differs.
    """

    name: str
    source: str
    published: float
    predicted: Callable[[], float]
    unit: str = "tokens/s/GPU"
    bound: float = 0.2
    is_fitted: bool = False
    note: str = ""

    def text(self) -> tuple[str, bool]:
        """Return a line of the table, and whether the figure is met."""
        here = self.predicted()
        error = here / self.published - 1
        is_met = abs(error) <= self.bound
        verdict = "fitted" if self.is_fitted else "met" if is_met else "**missed**"
        cells = self.name, self.source, f"{self.published:,.5g}", f"{here:,.5g}", f"{error:+.1%}"
        return f"| {' | '.join(cells)} | {verdict} | {self.note} |", is_met


@functools.cache
def line_of(run: Run) -> llama.Line:
    """A step of few layers, lowered once for all cards."""
    return llama.line_of(run)


@functools.cache
def pipeline_of(run: Stages) -> Any:
    """A pipeline, lowered once."""
    return pipelines.lowered(run)


@functools.cache
def states(dp: int) -> tuple[float, float]:
    """The bytes of parameters, gradients and optimizer's state of a rank of Llama 3 8B, and its
    peak.
    """
    run = Run(EIGHT, 2, dp=dp, is_stacked=True)
    memory = llama.lowered(attrs.evolve(run, updates=True)).memory
    _, *gradients = llama.lowered(run).program.graph.output_node().args[0]
    nbytes = sum(x.meta["val"].nbytes for x in gradients)
    return memory.of("arguments") + nbytes, memory.peak


def rate(run: Run, hardware: sf.Hardware) -> Callable[[], float]:
    """The tokens a second and GPU of a step."""
    return lambda: run.tokens / line_of(run).seconds(hardware)


def rate_of_pipeline(run: Stages, hardware: sf.Hardware) -> Callable[[], float]:
    """The tokens a second and GPU of a pipeline, on its slowest coordinate."""
    return lambda: run.tokens / pipeline_of(run).time(hardware).total


def rate_of_sequences(cp: int) -> Callable[[], float]:
    """The tokens a second and GPU of long sequences."""

    def predicted() -> float:
        lowered, tokens = sequences.lowered_by(cp)
        return tokens / sequences.RANKS / llama.seconds(lowered, CARD8)

    return predicted


TITAN_405B = Sizes(width=16384, inner=53248, batch=8 * 32, context=8192)
ONE_F_ONE_B = Stages(TITAN_405B, 126, sf.schedules.one_f_one_b(8, 8), dp=8, tp=8)
INTERLEAVED = Stages(TITAN_405B, 126, sf.schedules.interleaved(8, 16, chunks=2), dp=8, tp=8)
EIGHT_NEAR, EIGHT_FAR = Run(EIGHT, 2), Run(EIGHT, 2, dp=128)
EIGHT_TP = Run(EIGHT, 12, tp=8)
SEVENTY_TP = Run(SEVENTY, 16, dp=32, tp=8, policy=FULL)

MEMORY = (
    Row(
        "8B, FSDP on 8 and on 128: parameters, gradients, AdamW's state",
        TITAN,
        15.0,
        lambda: (states(8)[0] - states(128)[0]) / GIB,
        "GiB",
        0.1,
        note="counted in the lowered programs",
    ),
    Row(
        "the same, peaks of the step",
        TITAN,
        15.0,
        lambda: (states(8)[1] - states(128)[1]) / GIB,
        "GiB",
        0.1,
        note="at this peak there are no gradients yet; torchtitan reports reserved memory",
    ),
    Row(
        "405B, 1F1B over interleaved, peaks",
        TITAN,
        9.8,
        lambda: (pipeline_of(ONE_F_ONE_B).memory.peak - pipeline_of(INTERLEAVED).memory.peak) / GIB,
        "GiB",
        0.1,
    ),
    Row(
        "saved bytes of a layer, 22B, tensor and sequence parallel over 8",
        "Korthikanti, eq. 6",
        megatron.CLOSED_FORM / 2**20,
        lambda: megatron.saved_bytes() / 2**20,
        "MiB",
        0.1,
        note="the closed form 34 sbh/t",
    ),
)
TIME = (
    Row("8B, FSDP 8, compiled", TITAN, 6667, rate(EIGHT_NEAR, CARD), is_fitted=True),
    Row("the same, float8", TITAN, 8532, rate(EIGHT_NEAR, CARD8), is_fitted=True),
    Row(
        "the same, not compiled",
        TITAN,
        5762,
        rate(attrs.evolve(EIGHT_NEAR, backend="aten"), CARD),
        note="eager torch has kernels where this program has several ops",
    ),
    Row("8B, FSDP 128, compiled", TITAN, 6514, rate(EIGHT_FAR, CARD)),
    Row("the same, float8", TITAN, 8380, rate(EIGHT_FAR, CARD8)),
    Row("8B, FSDP 8 x TP 8", ASYNC, 4378, rate(EIGHT_TP, CARD)),
    Row("the same, float8", ASYNC, 5078.1, rate(EIGHT_TP, CARD8)),
    Row("70B, FSDP 32 x TP 8", ASYNC, 597.3, rate(SEVENTY_TP, CARD)),
    Row(
        "the same, float8",
        TITAN,
        829,
        rate(SEVENTY_TP, CARD8),
        note="torchtitan gathers activations in float8; this program in 16 bits",
    ),
    *(
        Row(
            f"8B, FSDP {8 // cp} x CP {cp}, float8, {sequences.CONTEXTS[cp]:,} tokens",
            TITAN,
            tokens,
            rate_of_sequences(cp),
            note=NOT_EXPLAINED if cp == 1 else "",
        )
        for cp, tokens in {1: 3890, 2: 2540, 4: 1071, 8: 548}.items()
    ),
    Row(
        "405B, FSDP 8 x TP 8 x PP 8, 1F1B, float8", TITAN, 100, rate_of_pipeline(ONE_F_ONE_B, CARD8)
    ),
    Row("the same, interleaved", TITAN, 128, rate_of_pipeline(INTERLEAVED, CARD8)),
    Row(
        "8B, FSDP 8, float8, H100 SXM",
        BRIDGE,
        14451,
        rate(Run(EIGHT, 1, policy=NONE), SXM8),
        note="Transformer Engine and cuDNN have other kernels than those that were fitted",
    ),
)
TABLES = {"memory": MEMORY, "time": TIME}
