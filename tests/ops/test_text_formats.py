"""Every text format that travels through Dynamo is read back as it was printed."""

from __future__ import annotations

from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from shardfn.ops import text_formats as texts

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
AXES = st.lists(NAMES, unique=True, max_size=4).map(tuple)
NUMBERS = st.integers(0, 99)
SHARDS = st.lists(st.tuples(NAMES, NUMBERS, st.none() | NUMBERS), max_size=4)
SIZES = st.none() | st.tuples(NUMBERS, NUMBERS)
CUTS = st.lists(st.tuples(NAMES, NUMBERS, st.none() | NUMBERS, SIZES), max_size=4)
PLACED = st.lists(
    st.tuples(NAMES, st.sampled_from(["R", "S0", "S12", "Psum", "Pavg"])), max_size=4
).map(tuple)
HELD = st.lists(PLACED.filter(len).map(texts.print_placed), max_size=3).map(tuple)
PARTS = st.tuples(PLACED.map(texts.print_placed), st.lists(NUMBERS, max_size=3).map(tuple))
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple)
SPECS = st.lists(AXES | st.just((texts.KEEP,)), min_size=2, max_size=4).map(tuple)
STAGES = st.lists(st.tuples(NAMES, st.sampled_from(["@0", "@12", "@3.1"])), max_size=2).map(tuple)
PLAIN = st.none() | st.booleans() | NUMBERS | st.text(max_size=4)
RECORDS = st.lists(st.recursive(PLAIN, lambda x: st.lists(x).map(tuple))).map(tuple)
FORMATS: dict[str, tuple[Any, Any, Any]] = {
    "axes": (AXES, texts.print_axes, texts.parse_axes),
    "shards": (SHARDS, texts.print_shards, texts.parse_shards),
    "sized_shards": (CUTS, texts.print_sized_shards, texts.parse_sized_shards),
    "placed": (PLACED, texts.print_placed, texts.parse_placed),
    "placed_list": (HELD, texts.print_placed_list, texts.parse_placed_list),
    "part": (PARTS, lambda part: texts.print_part(*part), texts.parse_part),
    "pairs": (PAIRS, texts.print_pairs, texts.parse_pairs),
    "spec": (
        st.tuples(SPECS, STAGES),
        lambda spec: texts.print_spec(*spec),
        lambda text: (texts.parse_spec(text), texts.parse_stages(text)),
    ),
    "record": (RECORDS, texts.print_record, texts.parse_record),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_printed_text_is_parsed_to_the_same_value(name: str) -> None:
    values, printer, parser = FORMATS[name]

    @given(values)
    @examples(40)
    def law(value: Any) -> None:
        assert parser(printer(value)) == value

    law()


def test_the_page_lists_every_format() -> None:
    rows = [line.split("|")[1].strip() for line in texts.__doc__.splitlines() if "| `" in line]
    listed = {name for name in rows if name}
    assert listed == set(FORMATS)
    printers = {name.removeprefix("print_") for name in vars(texts) if name.startswith("print_")}
    assert printers == set(FORMATS)
