"""The bucket plan as a value: the table, hashing, JSON, merge and split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import shardfn as sf


def bucket(index: int = 0, *names: str, **fields: Any) -> sf.Bucket:
    said = {
        "kind": "all_reduce",
        "axis": "dp",
        "op": "sum",
        "dtype": "float32",
        "phase": "forward",
        "cap": 100,
        "ready": f"mm_{index}, net.py:{index}",
        "first_use": "result",
        "sizes": tuple(10 * (i + 1) for i in range(len(names))),
    } | fields
    return sf.Bucket(index=index, leaves=names, **said)


def plan(*buckets: sf.Bucket, **fields: Any) -> sf.BucketPlan:
    return sf.BucketPlan("step", "(dp=2)", buckets, **fields)


PLAN = plan(
    bucket(0, "p['a']"),
    bucket(1, "p['b']", "p['c']"),
    bucket(2, "p['d']"),
    ignored=("p['e']",),
    local=("p['f']",),
)


def test_s9_7_the_table_prints_a_line_for_each_bucket_and_marks_those_over_their_cap() -> None:
    gather = bucket(
        1,
        *"bcdef",
        kind="all_gather",
        op=None,
        axis="tp",
        cap=150,
        ready="start",
        first_use="mm, net.py:3",
    )
    told = {"ignored": ("g",), "unused": tuple("uvwxyzUVWX"), "local": ("l",), "unreduced": ("r",)}
    said = plan(bucket(0, "p['a']", sizes=(1536,), cap=1024), gather, **told)
    lines = str(said).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "buckets of step on mesh (dp=2): 2",
        "bytes collective dtype ready first use leaves",
        "0 1.5 KiB+ all_reduce[sum, dp] float32 mm_0, net.py:0 result p['a']",
        "1 150 B all_gather[tp] float32 start mm, net.py:3 b, c, d, and 2 more",
        "+ the bucket exceeds its cap, because a leaf is never split",
        "reduced outside of buckets: g",
        "gradient is zero: nothing to send: u, v, w, x, y, z, U, V, and 2 more",
        "nothing to send: l",
        "returned unreduced: r",
    ]
    columns = (
        ("collective", "all_reduce", "all_gather"),
        ("dtype", "float32", "float32"),
        ("leaves", "p['a']", "b, c"),
    )
    for words in columns:
        assert len({line.index(word) for line, word in zip(lines[1:4], words, strict=True)}) == 1, (
            "columns stand under each other"
        )


def test_s9_7_a_plan_without_buckets_prints_one_line() -> None:
    assert str(plan()) == "buckets of step on mesh (dp=2): 0"
    assert (
        str(plan(unused=("u",)))
        == "buckets of step on mesh (dp=2): 0\n  gradient is zero: nothing to send: u"
    )


def test_bytes_of_a_bucket_are_those_of_its_leaves_and_over_the_cap_is_extended() -> None:
    whole = bucket(0, "a", "b", sizes=(60, 40))
    assert (whole.nbytes, whole.extended) == (100, False), (
        "a bucket as large as its cap is not over it"
    )
    assert attrs.evolve(whole, sizes=(60, 41)).extended


def test_equal_plans_are_equal_and_hash_equally_and_others_do_not() -> None:
    again = plan(*(attrs.evolve(b) for b in PLAN.buckets), ignored=("p['e']",), local=("p['f']",))
    assert (
        again is not PLAN
        and again == PLAN
        and hash(again) == hash(PLAN)
        and len({again, PLAN}) == 1
    )
    others = [
        attrs.evolve(PLAN, name="other"),
        attrs.evolve(PLAN, unused=("z",)),
        PLAN.merge(0, 1),
        PLAN.split(1, 1),
        attrs.evolve(PLAN, buckets=(attrs.evolve(PLAN.buckets[0], cap=7), *PLAN.buckets[1:])),
    ]
    assert len({PLAN, *others}) == len(others) + 1


def test_a_plan_cannot_be_changed_in_place() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        PLAN.name = "x"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        PLAN.buckets[0].cap = 1


def test_leaves_are_listed_once_each() -> None:
    assert PLAN.leaves == ("p['a']", "p['b']", "p['c']", "p['d']", "p['e']", "p['f']")
    twice = plan(bucket(0, "a"), bucket(1, "a", "b"), unused=("c",), unreduced=("c", "a"))
    assert twice.leaves == ("a", "b", "c")


def test_json_round_trip_keeps_everything(tmp_path: Path) -> None:
    gather = bucket(1, "b", kind="all_gather", op=None, region=3)
    for p in (
        PLAN,
        plan(),
        plan(bucket(0, "p['ä \"q\"']"), gather, unused=("u",), unreduced=("r",)),
    ):
        again = sf.BucketPlan.from_json(p.to_json())
        assert again == p and hash(again) == hash(p) and str(again) == str(p)
        p.save(tmp_path / "plan.json")
        assert sf.BucketPlan.load(tmp_path / "plan.json") == p
        p.save(str(tmp_path / "again.json"))
        assert sf.BucketPlan.load(str(tmp_path / "again.json")) == p
        assert json.loads((tmp_path / "plan.json").read_text())["mesh"] == "(dp=2)", (
            "plain JSON, for other tools to read"
        )


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda d: "{",
    "a list": lambda d: "[]",
    "a number": lambda d: "3",
    "null": lambda d: "null",
    "no buckets": lambda d: json.dumps({"name": "f", "mesh": "()"}),
    "no name": lambda d: json.dumps({k: v for k, v in d.items() if k != "name"}),
    "a strange field": lambda d: json.dumps({**d, "colour": 1}),
    "a strange field of a bucket": lambda d: json.dumps(
        {**d, "buckets": [{**d["buckets"][0], "colour": 1}]}
    ),
    "a bucket that lacks a field": lambda d: json.dumps({**d, "buckets": [{"index": 0}]}),
    "a bucket that is a number": lambda d: json.dumps({**d, "buckets": [3]}),
    "leaves without sizes": lambda d: json.dumps(
        {**d, "buckets": [{**d["buckets"][0], "sizes": []}]}
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_text_that_is_no_plan_is_refused(case: str) -> None:
    text = BROKEN[case](json.loads(PLAN.to_json()))
    with pytest.raises(sf.TreeError) as error:
        sf.BucketPlan.from_json(text)
    assert type(error.value) is sf.TreeError
    said = str(error.value).splitlines()
    assert said[0].startswith("BucketPlan.from_json: not a bucket plan: ")
    assert (
        said[-1] == "  try: a file that BucketPlan.save wrote"
        and error.value.fix == "a file that BucketPlan.save wrote"
    )


def test_merge_makes_one_bucket_in_place_of_the_first() -> None:
    merged = PLAN.merge(0, 2)
    assert [b.leaves for b in merged.buckets] == [("p['a']", "p['d']"), ("p['b']", "p['c']")]
    assert [b.sizes for b in merged.buckets] == [(10, 10), (10, 20)]
    assert [b.index for b in merged.buckets] == [0, 1]
    assert merged.buckets[0].ready == PLAN.buckets[2].ready, "it is ready when its last member is"
    assert PLAN.merge(1) == PLAN and (merged.ignored, merged.local, merged.leaves[-1]) == (
        PLAN.ignored,
        PLAN.local,
        "p['f']",
    )
    assert [b.leaves for b in PLAN.merge(0, 1, 2).buckets] == [
        ("p['a']", "p['b']", "p['c']", "p['d']")
    ]
    assert len(PLAN.buckets) == 3, "the plan itself stays as it is"


def test_merge_does_not_ask_for_an_order() -> None:
    merged = PLAN.merge(2, 0)
    assert merged.buckets[0].ready == PLAN.buckets[2].ready, "it is ready when its last member is"
    assert {frozenset(b.leaves) for b in merged.buckets} == {
        frozenset({"p['a']", "p['d']"}),
        frozenset({"p['b']", "p['c']"}),
    }


def test_split_cuts_one_bucket_in_two() -> None:
    cut = PLAN.split(1, 1)
    assert [(b.index, b.leaves, b.sizes) for b in cut.buckets] == [
        (0, ("p['a']",), (10,)),
        (1, ("p['b']",), (10,)),
        (2, ("p['c']",), (20,)),
        (3, ("p['d']",), (10,)),
    ]
    assert [b.leaves for b in cut.merge(1, 2).buckets] == [b.leaves for b in PLAN.buckets]


def test_merging_a_bucket_with_itself_doubles_nothing() -> None:
    try:
        merged = PLAN.merge(1, 1)
    except sf.ShardError:
        return  # refused is as good
    assert sorted(leaf for b in merged.buckets for leaf in b.leaves) == [
        "p['a']",
        "p['b']",
        "p['c']",
        "p['d']",
    ]


def test_merging_what_one_collective_cannot_do_is_refused() -> None:
    for change in (
        {"kind": "all_gather", "op": None},
        {"axis": "tp"},
        {"dtype": "bfloat16"},
        {"op": "max"},
        {"region": 1},
    ):
        with pytest.raises(sf.TreeError):
            plan(bucket(0, "a"), bucket(1, "b", **change)).merge(0, 1)


@pytest.mark.parametrize(
    "edit",
    [lambda: PLAN.merge(0, 9), PLAN.merge, lambda: PLAN.split(9, 1)],
    ids=["merge", "merge nothing", "split"],
)
def test_a_bucket_that_does_not_exist_is_refused_in_words(edit: Callable[[], Any]) -> None:
    with pytest.raises(sf.ShardError):
        edit()


@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_split_that_leaves_nothing_on_one_side_is_refused(at: int) -> None:
    with pytest.raises(sf.ShardError):
        PLAN.split(1, at)


@st.composite
def plans(draw: st.DrawFn) -> sf.BucketPlan:
    sizes = draw(st.lists(st.lists(st.integers(1, 2**40), min_size=1, max_size=4), max_size=5))
    names = iter(
        draw(st.lists(st.text(min_size=1, max_size=5), min_size=20, max_size=20, unique=True))
    )
    made = [
        bucket(i, *(next(names) for _ in row), sizes=tuple(row), cap=draw(st.integers(1, 2**41)))
        for i, row in enumerate(sizes)
    ]
    return plan(*made, ignored=tuple(draw(st.lists(st.text(max_size=3), max_size=3))))


@given(plans(), st.data())
@examples(60)
def test_edits_keep_every_leaf_and_byte_and_survive_json(
    p: sf.BucketPlan, data: st.DataObject
) -> None:
    edited = p
    for _ in range(data.draw(st.integers(0, 4))):
        cuttable = [b.index for b in edited.buckets if len(b.leaves) > 1]
        if cuttable and data.draw(st.booleans()):
            i = data.draw(st.sampled_from(cuttable))
            edited = edited.split(i, data.draw(st.integers(1, len(edited.buckets[i].leaves) - 1)))
        elif len(edited.buckets) > 1:
            edited = edited.merge(
                *data.draw(
                    st.lists(
                        st.integers(0, len(edited.buckets) - 1), min_size=2, max_size=3, unique=True
                    )
                )
            )
    pairs = lambda q: sorted(
        (leaf, n) for b in q.buckets for leaf, n in zip(b.leaves, b.sizes, strict=True)
    )
    assert pairs(edited) == pairs(p) and sum(b.nbytes for b in edited.buckets) == sum(
        b.nbytes for b in p.buckets
    )
    assert [b.index for b in edited.buckets] == list(range(len(edited.buckets)))
    assert sf.BucketPlan.from_json(edited.to_json()) == edited
    assert str(edited).splitlines()[0].endswith(f": {len(edited.buckets)}")
