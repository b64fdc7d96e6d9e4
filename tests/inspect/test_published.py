"""The model of time and memory against published runs, whose figures stand in bench/published."""

from __future__ import annotations

import pytest

import shardfn as sf
from bench.published import fit, llama, megatron, table
from bench.published.allocator import MIB, Allocator
from bench.published.llama import EIGHT, Run
from shardfn.hardware import H100


@pytest.fixture(scope="module")
def near() -> llama.Line:
    return llama.line_of(Run(EIGHT, 2), (1, 2))


def test_the_power_of_the_card_is_the_only_figure_that_was_fitted(near: llama.Line) -> None:
    tokens = Run(EIGHT, 2).tokens
    assert tokens / near.seconds(table.CARD) == pytest.approx(fit.COMPILED, rel=0.02)
    assert tokens / near.seconds(table.CARD8) == pytest.approx(8532, rel=0.06)
    published = sf.Efficiency(0.65, 0.73, 0.73, 0.35, 0.7, 0.71, 0.71)
    assert table.CARD.efficiency == H100.efficiency == published


def test_more_ranks_are_a_little_slower_as_published(near: llama.Line) -> None:
    run = Run(EIGHT, 2, dp=128)
    far = llama.line_of(run, (1, 2))
    for card, published in ((table.CARD, 6514), (table.CARD8, 8380)):
        rate = run.tokens / far.seconds(card)
        assert rate < run.tokens / near.seconds(card)
        assert rate == pytest.approx(published, rel=0.05)


def test_a_layer_saves_the_bytes_of_the_closed_form() -> None:
    assert megatron.saved_bytes() == pytest.approx(megatron.CLOSED_FORM, rel=0.1)


def test_model_flops_of_llama_3_8b_are_those_that_torchtitan_counts(near: llama.Line) -> None:
    step = near.steps[0].time(table.CARD)
    parameters = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 4096 * 128256
    wanted = Run(EIGHT, 2).tokens * (6 * parameters + 12 * 4096 * 8192)
    assert step.model_flops == pytest.approx(wanted, rel=1e-6)


SLOW = ("405B", "not compiled", "only")  # in the names of rows that take long

QUICK = [x for x in table.MEMORY if "8" in x.name and not any(word in x.name for word in SLOW)]


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_8b_on_8_and_128_ranks_reserves_what_was_published(row: table.Row) -> None:
    text, is_met = row.text()
    assert is_met, text


def test_the_allocator_takes_the_best_block_and_grows_at_its_end() -> None:
    page = 20 * MIB
    allocator = Allocator()
    for name, size in {"a": 2, "b": 3, "c": 5}.items():
        allocator.allocate((name,), size * MIB)
    assert allocator.reserved == page, "one page holds all"
    allocator.release(("a",))
    allocator.release(("c",))  # joins the rest of the page
    allocator.allocate(("d",), 2 * MIB)
    allocator.allocate(("e",), 15 * MIB)
    assert allocator.reserved == page, "d lies where a was, e where c was"
    allocator.allocate(("f",), 2 * MIB)
    assert allocator.reserved == 2 * page
    for name in "bdef":
        allocator.release((name,))
    allocator.allocate(("g",), 41 * MIB)
    assert allocator.reserved == 3 * page, "free memory at the end counts"
    allocator.allocate(("small",), 1)
    assert allocator.reserved == 3 * page + 2 * MIB
    allocator.allocate(("other",), page, "stream")
    assert allocator.reserved == 4 * page + 2 * MIB, "streams share no memory"


def test_the_allocator_takes_the_end_of_a_segment_last() -> None:
    allocator = Allocator()
    for name, size in {"first": 12, "second": 2}.items():
        allocator.allocate((name,), size * MIB)
    allocator.release(("first",))
    allocator.allocate(("small",), 5 * MIB)  # lies in the 12, not in the 6 at the end
    allocator.allocate(("large",), 12 * MIB)
    assert allocator.reserved == 2 * 20 * MIB


@pytest.mark.parametrize(
    "row", [x for x in table.TIME if "70B, FSDP" in x.name], ids=lambda row: row.source
)
def test_large_steps_take_as_long_as_published(row: table.Row) -> None:
    assert row.predicted() == pytest.approx(row.published, rel=row.bound)


def test_405b_in_stages_is_as_fast_as_published_and_interleaved_is_faster() -> None:
    by_name = {row.published: row.predicted() for row in table.TIME if "x PP 8, 1F1B" in row.name}
    (published,), (plain,) = by_name.keys(), by_name.values()
    interleaved = table.rate_of_pipeline(table.INTERLEAVED, table.CARD8, table.HIDDEN)()
    assert plain == pytest.approx(published, rel=0.2)
    assert interleaved == pytest.approx(128, rel=0.2)
    assert interleaved > plain


def test_bridge_8b_at_full_power_is_as_fast_as_published() -> None:
    (row,) = (row for row in table.TIME if row.published == 14451)
    text, is_met = row.text()
    assert is_met, text


def test_long_sequences_are_as_fast_as_published_and_longer_ones_are_slower() -> None:
    rates = [table.rate_of_sequences(cp)() for cp in (1, 2)]
    assert rates[0] > rates[1]
    assert rates == pytest.approx([3890, 2540], rel=0.2)
