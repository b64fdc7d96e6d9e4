"""What a loader refuses before it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from message import without_line
from torch.utils.data import DataLoader, DistributedSampler

import shardfn as sf
from shardfn import P

ROWS = torch.arange(6)
SHARDED = DataLoader(
    ROWS,  # type: ignore[arg-type]
    sampler=DistributedSampler(ROWS, num_replicas=2, rank=0),  # type: ignore[arg-type]
)
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no iterable": (
        3,
        P("dp"),
        {},
        "loader, data: data is 3, a int, and must be an iterable of batches\n"
        "  needed: an iterable of batches\n"
        "  try: torch.utils.data.DataLoader(dataset, batch_size=32)",
    ),
    "a seed": (
        [],
        P("dp"),
        {"seed": -1},
        "loader, seed: seed is -1, a int, and must be an int from 0 up\n"
        "  needed: an int from 0 up\n  try: seed=0",
    ),
    "a sampler that shards": (
        SHARDED,
        P("dp"),
        {},
        "loader, data: the sampler is a DistributedSampler, which already shards the samples\n"
        "  needed: global batches, which are the same on every rank\n"
        "  try: DataLoader(dataset, batch_size=the size of the global batch, shuffle=True)",
    ),
    "an axis that the mesh lacks": (
        [],
        {"x": P("pp"), "y": P()},
        {},
        "loader, placements: P('pp') names axis 'pp'; the mesh has (dp=2)\n  try: P('dp')",
    ),
    "stages that the mesh lacks": (
        [],
        {"x": P(pp=0), "y": sf.Stage(2)},
        {},
        "loader, placements: P(pp=0) names axis 'pp'; the mesh has (dp=2)\n"
        "  Stage(2) on axis 'dp', which has the stages 0 to 1; a second stage on a coordinate is "
        "sf.Stage(0, chunk=1)\n"
        "  try: P('dp')",
    ),
    "no placement": (
        [],
        "dp",
        {},
        "loader, placements: 'dp', a str, is not a placement\n  try: P('dp')",
    ),
    "data without rows": (
        [],
        P(None, "dp"),
        {"rows": True},
        "loader, rows=True: data is [], a list, which cannot be indexed by row number\n  "
        "placements is P(None, 'dp'), which does not shard dim 0 of every tensor in the same way\n"
        "  needed: a DataLoader with a batch size over an indexed dataset, and placements that "
        "shard dim 0 of every tensor in the same way\n  try: rows=None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    data, placements, options, text = REFUSED[case]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.ShardError) as error:
            sf.loader(data, mesh, placements, **options)
    assert without_line(error.value) == text


NEEDED = "\n  needed: a state of an sf.loader over the same data"
GOOD = {"epoch": 0, "batch": 1, "sample": 0, "seed": 0, "generators": []}
STATES: dict[str, tuple[Any, str]] = {
    "no state": (3, "loader.load_state_dict: it is 3, a int" + NEEDED),
    "a part": (
        {**GOOD, "epoch": None, "seed": "a"},
        "loader.load_state_dict: epoch is None, a NoneType, not a int\n"
        "  seed is 'a', a str, not a int" + NEEDED,
    ),
    "of other data": (
        {**GOOD, "generators": [1]},
        "loader.load_state_dict: the state has 1 generators, but the data have 0" + NEEDED,
    ),
    "of data with a state": (
        {**GOOD, "data": {}},
        (
            "loader.load_state_dict: the state includes a state of the data, but the "
            "loader's data have no state to restore"
        )
        + NEEDED,
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_states_that_are_refused(case: str) -> None:
    state, text = STATES[case]
    with sf.fake_world(2):
        loader = sf.loader([], sf.make_mesh((2,), ("dp",)), P("dp"))
        with pytest.raises(sf.CheckpointError) as error:
            loader.load_state_dict(state)
    assert without_line(error.value) == text
