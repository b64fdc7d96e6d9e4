"""What each kind of argument takes, and what it does not."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.accepted import kinds

T = torch.tensor
ACCEPTED: dict[str, list[Any]] = {
    "FLAG": [True, False],
    "FUNCTION": [len, lambda: 1],
    "FUNCTION_OR_NONE": [None, len],
    "PATTERNS": [None, {}, {"a.*": 3}],
    "WORLDS": [(), (1, 2), [{"dp": 2, "tp": 1}, 3]],
    "SHAPE": [(), (0, 3), [2], torch.Size([2])],
    "DEVICE_TYPE": [None, "cpu"],
    "DTYPE": [torch.int8],
    "LIMIT": [1, -1.5, float("inf"), 2**62, T(1.0), T(3)],
    "TOLERANCE": [0, 0.5],
    "STEP": [None, 0, 7],
    "KEEP": [None, 1],
    "POSITIONS": [None, 0, (0, 2), []],
    "PATH": ["a/b", pathlib.Path("a")],
    "FILE": ["a/b", pathlib.Path("a")],
    "FILE_OR_NONE": [None, "a/b", pathlib.Path("a")],
    "BYTES": ["5GB", 1],
    "COUNTS": [None, {}, {"all_reduce": 0}],
    "NUMBER_OR_NONE": [None, 0],
    "SHAPE_OR_NONE": [None, (), (0, 3)],
    "MESHES": [[(8,), (4, 2)], ((1,),), [{"dp": 8}, (4, 2)]],
    "AXIS": ["pp", "stage"],
    "NAMES": [None, ("dp", "tp"), ["a"], ()],
    "SEED": [0, 2**40],
    "SCALE": [1, 2.0**16],
    "GROWTH": [1, 2.5],
    "BACKOFF": [1, 0.5],
    "INTERVAL": [1, 2000],
    "ITERABLE": [[], range(3), iter([])],
    "FLAG_OR_NONE": [None, True, False],
    "COUNT": [0, 3],
    "SIZE": [1, 8],
    "COSTS": [{}, {"F": 1, "B": 0.5}],
    "RANKS": [1, 8],
    "RANKS_OR_NONE": [None, 8],
    "NUMBER": [0, 2.5],
    "RATE": [1, 1e12, float("inf")],
    "RATE_OR_NONE": [None, 80e9],
    "SHARE": [1, 0.5],
    "EFFICIENCY": [sf.Efficiency()],
    "TEXT": ["", "all_reduce"],
    "DEVICE": [None, "cpu", torch.device("meta")],
    "LOSS": [T(1.0), T(1j)],
    "FINITE": [T(True)],
    "LINK": [None, sf.Link(latency=1e-5, bandwidth=1e9)],
    "LINKS": [None, {}],
    "TOLERANCES": [None, {}, {"ms": 0}, {"ms": float("inf")}],
    "PROGRAM": [len, "train.py"],
    "PROGRAM_OR_NONE": [len, "train.py", None],
    "THREADS": [None, 1, 1024],
    "AXES": [None, {"dp": 2}],
    "MESH_OR_AXES": [None, {"dp": 2, "tp": 1}],
    "BACKEND": [None, "aten", "inductor"],
    "PLACE": [0, -1, "mm_1"],
    "WATCH": [None, len],
    "OF_SCALE": [{"scale": 1, "good_steps": 2}],
    "OF_AVERAGE": [{"average": 1, "count": 2}],
    "OF_OPTIM": [{}],
    "OF_SCHEDULE": [{"scheduler": {}, "options": []}],
}
REFUSED: dict[str, list[Any]] = {
    "FLAG": [0, 1, None],
    "FUNCTION": [None, "len"],
    "FUNCTION_OR_NONE": [0],
    "PATTERNS": [[], "a"],
    "WORLDS": [2, "12", (0,), ({},), ({"1a": 2},), ({"a": 0},), (True,), (1.0,)],
    "SHAPE": ["23", (-1,), (True,), (1.0,), 3, T([2])],
    "DEVICE_TYPE": [3, torch.device("cpu")],
    "DTYPE": [float, "float32"],
    "LIMIT": [None, True, "1", 2**63, -(2**63), 1j, T([1.0]), T(1j)],
    "TOLERANCE": [-1e-9, True, "0", float("nan")],
    "STEP": [-1, True, 1.0],
    "KEEP": [0, True],
    "POSITIONS": [-1, "0", (True,)],
    "PATH": [b"a", 3, None],
    "FILE": [b"a", 3, None],
    "FILE_OR_NONE": [b"a", 3],
    "BYTES": [0, -1, True, 1.5, None],
    "COUNTS": [{3: 1}, {"a": -1}, {"a": True}, [("a", 1)]],
    "NUMBER_OR_NONE": [-1, True],
    "SHAPE_OR_NONE": ["23", (-1,), 3],
    "MESHES": [[], [8], [()], [(0,)], "8", [("8",)], [{}], [{"dp": 0}], {"dp": 8}],
    "AXIS": ["", "a b", 3, None],
    "NAMES": ["dp", (1,), 3],
    "SEED": [-1, True, 1.0, None],
    "SCALE": [0, -1.0, True, float("inf"), float("nan")],
    "GROWTH": [0.5, True, float("nan"), "2"],
    "BACKOFF": [0, 1.5, True, None],
    "INTERVAL": [0, -1, 1.0, True],
    "ITERABLE": [3, None],
    "FLAG_OR_NONE": [0, 1, "yes"],
    "COUNT": [-1, True, 1.0],
    "SIZE": [0, True, 1.0, "4"],
    "COSTS": [None, [], {"F": -1}, {1: 1}, {"F": float("nan")}],
    "RANKS": [0, None],
    "RANKS_OR_NONE": [0, "8"],
    "NUMBER": [-1, True, None],
    "RATE": [0, -1.0, float("nan"), "1"],
    "RATE_OR_NONE": [0, "1"],
    "SHARE": [0, 1.5, "1"],
    "EFFICIENCY": [None, 0.5],
    "TEXT": [b"", None],
    "DEVICE": ["nope", 1.0, 1 << 70],
    "LOSS": [1.0, T(1)],
    "FINITE": [True, T(1), T([True])],
    "LINK": [1e9, "a"],
    "LINKS": [[], "a"],
    "TOLERANCES": [0.1, {"ms": -1}, {"ms": None}, {1: 0.1}, {"ms": float("nan")}],
    "PROGRAM": [None, 3],
    "PROGRAM_OR_NONE": [3, ("train.py",)],
    "THREADS": [0, 1025, True, 2.0],
    "AXES": [{}, {"dp": 0}, 4, {"d p": 2}],
    "MESH_OR_AXES": [{}, {"dp": 0}, 8, "dp=8"],
    "BACKEND": [0, len, "foo"],
    "PLACE": [True, None, 1.0],
    "WATCH": [3, "x"],
    "OF_SCALE": [{}, {"scale": 1}, [], None],
    "OF_AVERAGE": [{"count": 1}, T(1)],
    "OF_OPTIM": [None, [], T(1)],
    "OF_SCHEDULE": [{"options": []}, None],
}
ALL = {k: x for k, x in vars(kinds).items() if isinstance(x, kinds.Kind)}


def test_each_kind_has_cases() -> None:
    assert ALL.keys() == ACCEPTED.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_kind_takes_its_values_and_no_others(name: str) -> None:
    test = ALL[name].test
    assert [x for x in ACCEPTED[name] if not test(x)] == []
    assert [x for x in REFUSED[name] if test(x)] == []


def test_each_row_names_a_kind_of_the_table() -> None:
    every = {id(kind) for kind in ALL.values()}
    rows = [kind for row in kinds.ARGUMENTS.values() for kind in row.values()]
    assert rows and {id(kind) for kind in rows} <= every
