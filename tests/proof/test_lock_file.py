"""Files of locks: small, sorted, and read with care."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardfn as sf
from shardfn.proof.locks import lock_file
from shardfn.proof.locks.lock_file import Bucket, Price, Sent

PRICE = Price(
    function="shard(step)",
    mesh="(dp=2)",
    rank=0,
    torch="2.13",
    hardware="H100",
    arguments={"w[0]": "f32[3]", "w[1]": "f32[3]", "w[2]": "f32[5]"},
    collectives={"a.py::f::x = y -> all_gather[tp]": Sent(2, 64, 1)},
    buckets=(Bucket("all_reduce[sum, dp]", "float32", 36, 1, "w", "w", "mm, a.py:3"),),
    bytes={"all_gather over tp": 64},
    peak_bytes={"step": 128},
    ms={"step": 0.25},
    ops={"a.py::f::x = y": {"mm": 1, "add": 2}, "a.py::f::größe = 1": {"mm": 1}},
)


def stored(folder: Path, text: str) -> str:
    path = folder / "step.json"
    path.write_text(text)
    return str(path)


def test_a_price_is_read_as_it_was_written(tmp_path: Path) -> None:
    text = lock_file.text_of(PRICE, test="test_a.py::test_step")
    price, others = lock_file.read("lock", stored(tmp_path, text))
    assert price == PRICE and others == {"format": 1, "test": "test_a.py::test_step"}
    assert lock_file.text_of(price, test="test_a.py::test_step") == text


def test_one_item_stands_on_one_line() -> None:
    lines = lock_file.text_of(PRICE).splitlines()
    assert '    "w[0..1]": "f32[3]",' in lines and '    "w[2]": "f32[5]"' in lines
    assert '    "a.py::f::x = y": {"add": 2, "mm": 1}' in lines
    assert '    "a.py::f::größe = 1": {"mm": 1},' in lines
    assert '  "torch": "2.13",' in lines
    assert not [line for line in lines if "a.py:3" in line], "no number of a line"


PATHS = st.one_of(
    st.builds("a[{}].w[{}]".format, st.integers(0, 3), st.integers(0, 12)),
    st.builds("layers.{}.w".format, st.integers(0, 12)),
    st.builds("['layers.{}.w']['0..2 {{x}}']".format, st.integers(0, 12)),
    st.builds("b{}".format, st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(PATHS, st.sampled_from(["f32[3]", "f32[5]"]), max_size=40))
def test_ranges_of_layers_stand_for_all_paths(rows: dict[str, str]) -> None:
    short = lock_file.numbered_ranges(rows)
    assert len(short) <= len(rows)
    text = lock_file.text_of(Price(arguments=rows))
    assert lock_file.READERS["arguments"](json.loads(text)["arguments"]) == rows


def test_a_later_version_of_the_file_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    fields = json.loads(lock_file.text_of(PRICE))
    fields |= {"format": 2, "energy": {"step": 3}, "ms": "in another form"}
    fields["collectives"]["a.py::f::x = y -> all_gather[tp]"]["dtype"] = "f32"
    price, _ = lock_file.read("lock", stored(tmp_path, json.dumps(fields)))
    assert price == attrs.evolve(PRICE, ms=None)


def test_a_shortened_file_is_read_as_not_known(tmp_path: Path) -> None:
    price, _ = lock_file.read("lock", stored(tmp_path, '{"format": 1, "ms": {"step": 2}}'))
    assert price == Price(ms={"step": 2.0})


DAMAGED = {
    "nothing": ("", "it cannot be read: Expecting value"),
    "half": (lock_file.text_of(PRICE)[:200], "it cannot be read: "),
    "two versions": (
        lock_file.text_of(PRICE).replace(
            '  "rank": 0,\n', '<<<<<<< ours\n  "rank": 0,\n=======\n  "rank": 1,\n>>>>>>> theirs\n'
        ),
        "the file has merge-conflict markers of version control",
    ),
    "a list": ("[]", 'the file is not a lock file of shardfn: "format" is missing'),
    "other JSON": ('{"a": 1}', 'the file is not a lock file of shardfn: "format" is missing'),
    "deep JSON": ("[" * 10**5, "it cannot be read: the values are nested too deeply"),
    "text for a number": (
        '{"format": 1, "peak_bytes": {"step": "much"}}',
        "its \"peak_bytes\" is damaged: 'much' is not an int of 0 or more",
    ),
    "a negative number": (
        '{"format": 1, "ms": {"step": -1}}', 'its "ms" is damaged: -1 is not a number of 0 or more',
    ),
    "not a number": (
        '{"format": 1, "ms": {"step": NaN}}', 'its "ms" is damaged: nan is not a number of 0 or \
more',
    ),
    "a number for a table": (
        '{"format": 1, "ops": 3}', 'its "ops" is damaged: 3 is not an object',
    ),
    "a row without bytes": (
        '{"format": 1, "collectives": {"x": {"count": 1}}}', "its \"collectives\" is damaged: 'by",
    ),
    "a number for text": (
        '{"format": 1, "mesh": 3}', 'its "mesh" is damaged: 3 is not text',
    ),
    "a table for a list": (
        '{"format": 1, "buckets": {}}', 'its "buckets" is damaged: {} is not a list',
    ),
    "too many layers": (
        '{"format": 1, "arguments": {"w[0..99999999]": "f32[3]"}}',
        "its \"arguments\" is damaged: 'w[0..99999999]' expands to too many paths",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("update", [False, True])
def test_a_damaged_file_is_named_and_stays(damage: str, update: bool, tmp_path: Path) -> None:
    text, reason = DAMAGED[damage]
    path = stored(tmp_path, text)
    with pytest.raises(sf.ShardError) as error:
        sf.lock(sf.jit(lambda x: x * 2), sf.ShapeDtype((3,)), path=path, update=update)
    head, *_, needed, fix = str(error.value).splitlines()
    assert head.startswith(f"lock(jit(<lambda>)), path {path!r}: {reason}")
    assert needed == "  needed: a file that sf.lock has written"
    assert fix == (
        "  try: restore the file from version control; or delete the file, and the next call "
        "writes it again"
    )
    assert not isinstance(error.value, sf.BudgetError) and error.value.arg_path == "path"
    assert Path(path).read_text() == text


def test_a_file_that_is_not_text_or_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "step.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for name in ("step.json", "folder"):
        with pytest.raises(sf.ShardError, match="path .*: it cannot be read: "):
            sf.lock(sf.jit(lambda x: x * 2), sf.ShapeDtype((3,)), path=tmp_path / name)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    with pytest.raises(sf.ShardError, match="it cannot be read: "):
        sf.lock(sf.jit(lambda x: x * 2), sf.ShapeDtype((3,)), path=tmp_path / "lost")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _check_unwritable(str(tmp_path / "file" / "step.json"))
    _check_unwritable(str(tmp_path / "a\0b"))


def _check_unwritable(path: str) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.lock(sf.jit(lambda x: x * 2), sf.ShapeDtype((3,)), path=path)
    head, _, fix = str(error.value).splitlines()
    assert head.startswith(f"lock(jit(<lambda>)), path {path!r}: it cannot be written: ")
    assert fix == "  try: path='locks/step.json', in a writable folder"
