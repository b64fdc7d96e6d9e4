"""JSON that is not a bucket plan: each value that is wrong is named, and nothing is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardfn as sf
from shardfn.buckets import reading

BUCKET = {
    "index": 0,
    "kind": "all_reduce",
    "axis": "dp",
    "op": "sum",
    "dtype": "float32",
    "phase": "backward",
    "leaves": ["w"],
    "sizes": [8],
    "cap": 100,
    "ready": "mm",
    "first_use": "add",
}
PLAN = {"name": "f", "mesh": "(dp=2)", "buckets": [BUCKET], "ignored": ["b"]}

WRONG_FIELDS: list[tuple[str, Any, str]] = [
    ("index", -1, "plan.buckets[0].index: it is -1, must be an int"),
    ("index", True, "plan.buckets[0].index: it is true, must be an int"),
    ("index", 1.0, "plan.buckets[0].index: it is 1.0, must be an int"),
    ("cap", 2**63, "plan.buckets[0].cap: it is 9223372036854775808, must be"),
    ("cap", None, "plan.buckets[0].cap: it is null, must be an int"),
    ("axis", 3, "plan.buckets[0].axis: it is 3, must be text"),
    ("op", ["sum"], "plan.buckets[0].op: it is ["),
    ("leaves", "w", 'plan.buckets[0].leaves: it is "w", must be a list'),
    ("leaves", [["w"]], "plan.buckets[0].leaves[0]: it is ["),
    ("sizes", ["8"], 'plan.buckets[0].sizes[0]: it is "8", must be an int'),
    ("sizes", {"0": 8}, "plan.buckets[0].sizes: it is {"),
]


@pytest.mark.parametrize("case", range(len(WRONG_FIELDS)))
def test_a_value_of_another_type_is_named(case: int) -> None:
    name, value, wanted = WRONG_FIELDS[case]
    plan = {**PLAN, "buckets": [{**BUCKET, name: value}]}
    with pytest.raises(sf.TreeError, match="not a bucket plan") as error:
        sf.BucketPlan.from_json(json.dumps(plan))
    assert wanted in str(error.value)


def test_all_problems_are_listed() -> None:
    plan = {**PLAN, "name": 3, "mesh": None, "colour": 1}
    with pytest.raises(sf.TreeError) as error:
        sf.BucketPlan.from_json(json.dumps(plan))
    for wanted in ("plan.name: it is 3", "plan.mesh: it is null", "plan.colour: unknown"):
        assert wanted in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 3, "\ud800", b"\xff\xfe{}"])
def test_text_that_is_not_json_is_refused(text: Any) -> None:
    with pytest.raises(sf.TreeError, match="not a bucket plan"):
        sf.BucketPlan.from_json(text)


def test_a_text_that_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST", 10)
    with pytest.raises(sf.TreeError, match="characters, the most is 10"):
        sf.BucketPlan.from_json(json.dumps(PLAN))


@pytest.mark.parametrize("value", [3, None, ["{}"]])
def test_another_type_than_text_is_refused(value: Any) -> None:
    with pytest.raises(sf.TreeError, match="must be text"):
        sf.BucketPlan.from_json(value)


def test_a_plan_is_read_with_its_tuples() -> None:
    plan = sf.BucketPlan.from_json(json.dumps(PLAN))
    assert plan.buckets[0].sizes == (8,) and plan.ignored == ("b",)
    assert sf.BucketPlan.from_json(plan.to_json()) == plan
