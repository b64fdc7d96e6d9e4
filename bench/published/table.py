"""The rows of published tables, each with what the model says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

import shardfn as sf
from bench.planner.llama import Sizes
from shardfn.hardware import H100, H100_96GB

from . import fsdp, llama, megatron, pipelines, sequences
from .llama import EIGHT, FULL, NONE, SEVENTY, Llama, Run
from .pipelines import Stages

CARD, CARD8 = H100_96GB, attrs.evolve(H100_96GB, float8=True)
# NVIDIA/cudnn-frontend, benchmark/attention_training, an H200 of 700 W, Llama 3.1, causal, 8,192
# tokens: forward and backward in 13.8 ms, 557 of 989 TF/s. torchtitan's runs have FlashAttention-2.
CUDNN = attrs.evolve(H100.efficiency, attention=0.56)
SXM8 = attrs.evolve(H100, float8=True, efficiency=CUDNN)
TITAN, ASYNC, BRIDGE = "torchtitan 2024-12", "torchtitan 2025-06", "Megatron-Bridge 25.11"
GIB = 2**30
SEVERAL = "with one sequence of 32,768 tokens, 1F1B is predicted within 1%"
SLOWER = "torchtitan's CP 4 takes 2.4 times as long as CP 2, for at most twice the work"
# of asynchronous tensor parallelism: all that it sends is hidden
HIDDEN = {"tp": sf.Link(0.0, float("inf"))}


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
        is_fitted: whether the power of the card was fitted on it.
        note: why it is missed, or what differs.
        capacity: whether both fit in it, or neither, is a part of the verdict.
    """

    name: str
    source: str
    published: float
    predicted: Callable[[], float]
    unit: str = "tokens/s/GPU"
    bound: float = 0.2
    is_fitted: bool = False
    note: str = ""
    capacity: float | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Return the cells before what is predicted, which no other row has."""
        return self.name, self.source, f"{self.published:,.5g}"

    def text(self) -> tuple[str, bool]:
        """Return a line of the table, and whether the figure is met."""
        here = self.predicted()
        error = here / self.published - 1
        fits = [x for x in (self.published, here) if self.capacity and x <= self.capacity]
        is_met = abs(error) <= self.bound and len(fits) != 1
        verdict = "fitted" if self.is_fitted else "met" if is_met else "**missed**"
        if self.capacity:
            verdict += ", fits" if fits else ", over 80 GiB"
        cells = *self.key, f"{here:,.5g}", f"{error:+.1%}"
        return f"| {' | '.join(cells)} | {verdict} | {self.note} |", is_met


@functools.cache
def line_of(run: Run) -> llama.Line:
    """A step of few layers, lowered once for all cards."""
    return llama.line_of(run)


@functools.cache
def pipeline_of(run: Stages) -> Any:
    """A pipeline, lowered once."""
    return pipelines.lowered(run)


def state_bytes(dp: int) -> float:
    """The bytes of parameters, gradients and optimizer's state of a rank of Llama 3 8B."""
    run = Run(EIGHT, 2, dp=dp, is_stacked=True)
    memory = llama.lowered(attrs.evolve(run, updates=True)).memory
    _, *gradients = llama.lowered(run).program.graph.output_node().args[0]
    return memory.of("arguments") + sum(x.meta["val"].nbytes for x in gradients)


@functools.cache
def parts_of(run: Run) -> fsdp.Parts:
    """The parts of a model, lowered once for all numbers of ranks."""
    return fsdp.parts_of(attrs.evolve(run, dp=1))


def reserved(run: Run) -> float:
    """The GiB that a rank reserves."""
    parts = parts_of(attrs.evolve(run, dp=1))
    return fsdp.Steps({0: fsdp.stage_of(parts, run.model.layers)}, run.dp).reserved() / GIB


@functools.cache
def reserved_in_stages(run: Run, schedule: sf.Schedule) -> float:
    """The GiB that a rank of the fullest coordinate reserves."""
    parts, stages = parts_of(attrs.evolve(run, dp=1)), schedule.stages
    layers = pipelines.layers_of_stages(stages, run.model.layers)
    every = {
        s: fsdp.stage_of(parts, n, is_first=s == 0, is_last=s == stages - 1)
        for s, n in enumerate(layers)
    }
    numbers = [dict.fromkeys(x.stage for x in actions) for actions in schedule.table]
    rows = zip(numbers, schedule.table, strict=True)
    steps = [fsdp.Steps({s: every[s] for s in own}, run.dp, actions) for own, actions in rows]
    return max(x.reserved() for x in steps) / GIB


def rate(run: Run, hardware: sf.Hardware, links: llama.Links = None) -> Callable[[], float]:
    """The tokens a second and GPU of a step."""
    return lambda: run.tokens / line_of(run).seconds(hardware, links)


def rate_of_pipeline(
    run: Stages, hardware: sf.Hardware, links: llama.Links = None
) -> Callable[[], float]:
    """The tokens a second and GPU of a pipeline, on its slowest coordinate."""
    return lambda: run.tokens / pipeline_of(run).time(hardware, links).total


def rate_of_chunks(
    run: Stages, chunks: int, hardware: sf.Hardware, links: llama.Links = None
) -> Callable[[], float]:
    """The tokens a second and GPU of a pipeline with so many stages a coordinate, lowered with one:
    its bubble is that many times as long.
    """

    def predicted() -> float:
        time = pipeline_of(run).time(hardware, links)
        return run.tokens / (time.total - time.bubble * (1 - 1 / chunks))

    return predicted


def rate_of_sequences(cp: int) -> Callable[[], float]:
    """The tokens a second and GPU of long sequences."""

    def predicted() -> float:
        lowered, tokens = sequences.lowered_by(cp)
        return tokens / sequences.RANKS / llama.seconds(lowered, CARD8)

    return predicted


TITAN_405B = Sizes(width=16384, inner=53248, batch=8 * 32, context=8192)
ONE_F_ONE_B = Stages(TITAN_405B, 126, sf.schedules.one_f_one_b(8, 8), dp=8, tp=8)
# torchtitan took as many microbatches as coordinates, unless it was told otherwise
INTERLEAVED = Stages(TITAN_405B, 126, sf.schedules.interleaved(8, 8, chunks=2), dp=8, tp=8)
SEVENTY_STAGES = Stages(
    Sizes(width=8192, inner=28672, batch=128, context=8192),
    80,
    sf.schedules.one_f_one_b(8, 64),
    dp=2,
    tp=4,
    remat=False,
)
EIGHT_NEAR, EIGHT_FAR = Run(EIGHT, 2), Run(EIGHT, 2, dp=128)
EIGHT_TP = Run(EIGHT, 12, tp=8)
SEVENTY_TP = Run(SEVENTY, 16, dp=32, tp=8, policy=FULL)

OF_405B = Llama(width=TITAN_405B.width, inner=TITAN_405B.inner, layers=126)
MICROBATCH = Run(OF_405B, 4, dp=8, tp=8, policy=FULL)
LONG_MICROBATCH = attrs.evolve(MICROBATCH, batch=1, context=32768)


def memory_row(name: str, published: float, predicted: Callable[[], float], note: str = "") -> Row:
    """What a run of torchtitan reserved, and whether that fits in 80 GiB."""
    return Row(name, TITAN, published, predicted, "GiB", 0.1, note=note, capacity=80)


MEMORY = (
    memory_row("8B, FSDP 8, compiled", 77.0, lambda: reserved(EIGHT_NEAR)),
    memory_row(
        "8B, FSDP 8, not compiled", 82.4, lambda: reserved(attrs.evolve(EIGHT_NEAR, holds=True))
    ),
    memory_row("8B, FSDP 128, compiled", 62.0, lambda: reserved(EIGHT_FAR)),
    memory_row(
        "8B, FSDP 128, not compiled", 67.0, lambda: reserved(attrs.evolve(EIGHT_FAR, holds=True))
    ),
    Row(
        "8 ranks over 128, compiled",
        TITAN,
        15.0,
        lambda: reserved(EIGHT_NEAR) - reserved(EIGHT_FAR),
        "GiB",
        0.1,
    ),
    Row(
        "8 ranks over 128, only parameters, gradients, AdamW",
        TITAN,
        15.0,
        lambda: (state_bytes(8) - state_bytes(128)) / GIB,
        "GiB",
        0.1,
        note="from the tensors in lowered programs",
    ),
    memory_row(
        "8B, FSDP 8, 32,768 tokens",
        83.9,
        lambda: reserved(Run(EIGHT, 1, context=32768, policy=FULL)),
    ),
    memory_row("70B, FSDP 32 x TP 8", 71.9, lambda: reserved(SEVENTY_TP)),
    memory_row(
        "405B, FSDP 8 x TP 8 x PP 8, 1F1B",
        82.5,
        lambda: reserved_in_stages(MICROBATCH, ONE_F_ONE_B.schedule),
        SEVERAL,
    ),
    memory_row(
        "405B, FSDP 8 x TP 8 x PP 8, interleaved",
        72.7,
        lambda: reserved_in_stages(MICROBATCH, INTERLEAVED.schedule),
    ),
    Row(
        "1F1B over interleaved",
        TITAN,
        9.8,
        lambda: (
            reserved_in_stages(MICROBATCH, ONE_F_ONE_B.schedule)
            - reserved_in_stages(MICROBATCH, INTERLEAVED.schedule)
        ),
        "GiB",
        0.1,
        note=SEVERAL,
    ),
    memory_row(
        "405B, FSDP 8 x TP 8 x PP 8, 1F1B, 32,768 tokens",
        75.3,
        lambda: reserved_in_stages(LONG_MICROBATCH, ONE_F_ONE_B.schedule),
    ),
    Row(
        "22B, saved activations of a layer, TP 8",
        "Korthikanti, eq. 6",
        megatron.CLOSED_FORM / 2**20,
        lambda: megatron.saved_bytes() / 2**20,
        "MiB",
        0.1,
        note="in MiB; the formula of Korthikanti et al. is 34 sbh/t",
    ),
)
# 405B with sequences over cp ranks, eight of them on each group of ranks that shards parameters
LONG_405B = {
    cp: Stages(
        attrs.evolve(TITAN_405B, batch=64 // cp, context=32768 * cp),
        126,
        sf.schedules.one_f_one_b(8, 8),
        dp=8 // cp,
        tp=8,
        cp=cp,
    )
    for cp in (1, 2, 4, 8)
}
TIME = (
    Row("8B, FSDP 8, compiled", TITAN, 6667, rate(EIGHT_NEAR, CARD), is_fitted=True),
    Row("8B, FSDP 8, float8", TITAN, 8532, rate(EIGHT_NEAR, CARD8)),
    Row(
        "8B, FSDP 8, not compiled",
        TITAN,
        5762,
        rate(attrs.evolve(EIGHT_NEAR, backend="aten"), CARD),
        note="eager torch runs one kernel where the captured program runs several ops",
    ),
    Row("8B, FSDP 128, compiled", TITAN, 6514, rate(EIGHT_FAR, CARD)),
    Row("8B, FSDP 128, float8", TITAN, 8380, rate(EIGHT_FAR, CARD8)),
    Row("8B, FSDP 8 x TP 8", ASYNC, 4378, rate(EIGHT_TP, CARD)),
    Row("8B, FSDP 8 x TP 8, asynchronous", ASYNC, 4809.4, rate(EIGHT_TP, CARD, HIDDEN)),
    Row("8B, FSDP 8 x TP 8, float8", ASYNC, 5078.1, rate(EIGHT_TP, CARD8)),
    Row("8B, FSDP 8 x TP 8, float8, asynchronous", ASYNC, 5570.1, rate(EIGHT_TP, CARD8, HIDDEN)),
    Row("70B, FSDP 32 x TP 8", ASYNC, 597.3, rate(SEVENTY_TP, CARD)),
    Row("70B, FSDP 32 x TP 8, asynchronous", ASYNC, 652.4, rate(SEVENTY_TP, CARD, HIDDEN)),
    Row("70B, FSDP 32 x TP 8, float8", TITAN, 829, rate(SEVENTY_TP, CARD8)),
    Row("70B, FSDP 32 x TP 8, float8", ASYNC, 809.8, rate(SEVENTY_TP, CARD8)),
    Row("70B, FSDP 32 x TP 8, float8, asynchronous", TITAN, 876, rate(SEVENTY_TP, CARD8, HIDDEN)),
    Row("70B, FSDP 32 x TP 8, float8, asynchronous", ASYNC, 942.4, rate(SEVENTY_TP, CARD8, HIDDEN)),
    *(
        Row(
            f"8B, FSDP {8 // cp} x CP {cp}, float8, {sequences.CONTEXTS[cp]:,} tokens",
            TITAN,
            tokens,
            rate_of_sequences(cp),
            note=SLOWER if cp in (4, 8) else "",
        )
        for cp, tokens in {1: 3890, 2: 2540, 4: 1071, 8: 548}.items()
    ),
    Row(
        "405B, FSDP 8 x TP 8 x PP 8, 1F1B", TITAN, 100, rate_of_pipeline(ONE_F_ONE_B, CARD8, HIDDEN)
    ),
    Row(
        "405B, FSDP 8 x TP 8 x PP 8, interleaved",
        TITAN,
        128,
        rate_of_pipeline(INTERLEAVED, CARD8, HIDDEN),
    ),
    *(
        Row(
            f"405B, FSDP {8 // cp} x TP 8 x PP 8 x CP {cp}, {32768 * cp:,} tokens",
            TITAN,
            tokens,
            rate_of_pipeline(LONG_405B[cp], CARD8, HIDDEN),
        )
        for cp, tokens in {1: 76, 2: 47, 4: 31, 8: 16}.items()
    ),
    Row("8B, FSDP 8, float8, H100 SXM", BRIDGE, 14451, rate(Run(EIGHT, 1, policy=NONE), SXM8)),
    Row(
        "70B, DP 2 x TP 4 x PP 8, 5 stages each, float8, H100 SXM",
        BRIDGE,
        1602,
        rate_of_chunks(SEVENTY_STAGES, 5, SXM8, HIDDEN),
    ),
)
TABLES = {"memory": MEMORY, "time": TIME}
