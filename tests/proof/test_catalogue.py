"""Planted faults: `audit` names the parameter, the ratio and the cause of each, and says nothing of
its right twin.
"""

from __future__ import annotations

import re

import pytest

import shardfn as sf
from tests.proof.catalogue import (
    data_parallel,
    experts,
    fully_sharded,
    sequence_parallel,
    tensor_parallel,
)
from tests.proof.catalogue.entries import Entry

FAMILIES = (data_parallel, fully_sharded, tensor_parallel, sequence_parallel, experts)
ENTRIES = [entry for family in FAMILIES for entry in family.entry]
NAMES = [entry.step.__name__ for entry in ENTRIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_a_fault_is_named_with_its_ratio_and_its_cause(entry: Entry) -> None:
    found = sf.audit(entry.fault, entry.single, *entry.args, world=entry.world, mesh=entry.mesh)
    rows = [row for row in found if row.kind == entry.kind]
    assert {row.name for row in rows} == entry.names, found
    for row in rows:
        assert re.search(entry.cause, row.cause), found
        if entry.ratio is not None:
            assert row.ratio == pytest.approx(entry.ratio, rel=1e-3), found


@pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
def test_its_right_twin_is_that_of_one_device(entry: Entry) -> None:
    found = sf.audit(entry.right, entry.single, *entry.args, world=entry.world, mesh=entry.mesh)
    assert found.ok, found


def test_the_catalogue_is_of_many_reports() -> None:
    assert len(ENTRIES) > 60 and len({*NAMES}) == len(ENTRIES)
    assert len({entry.report for entry in ENTRIES}) > 60
