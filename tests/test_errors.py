"""Errors: one family, one way to write the text, fields for programs to read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import shardfn as sf
from shardfn.errors import ShardError, call_site, is_ours, problem

FAMILY = (
    sf.PlacementError,
    sf.TreeError,
    sf.CaptureError,
    sf.RuleError,
    sf.DivergenceError,
    sf.RankLostError,
    sf.ScheduleError,
    sf.RendezvousError,
    sf.BudgetError,
    sf.CapacityError,
    sf.FakeValueError,
    sf.CheckpointError,
    sf.ArtefactError,
    sf.TorchVersionError,
)
FIELDS = ("arg_path", "mesh", "placements", "dim", "source", "fix")


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_is_a_shard_error_with_fields(kind: type[ShardError]) -> None:
    fields = {name: f"a {name}" for name in FIELDS}
    error = kind("said", **fields)
    assert isinstance(error, sf.ShardError) and isinstance(error, Exception)
    assert str(error) == "said"
    assert {name: getattr(error, name) for name in FIELDS} == fields
    assert all(getattr(kind("said"), name) is None for name in FIELDS)
    assert kind.__doc__


def test_the_family_is_complete_and_flat() -> None:
    assert set(ShardError.__subclasses__()) == set(FAMILY)
    assert all(kind.__bases__ == (ShardError,) for kind in FAMILY)


def test_a_problem_says_where_what_at_needed_and_try_in_that_order() -> None:
    text = problem(
        "shard(f), argument x", "got this", "and this", needed="that", fix="so", source="model.py:3"
    )
    assert text == "\n".join([
        "shard(f), argument x: got this",
        "  and this",
        "  at: model.py:3",
        "  needed: that",
        "  try: so",
    ])  # fmt: skip


def test_a_problem_leaves_out_what_it_does_not_know() -> None:
    assert problem("f", "got") == "f: got"
    assert problem("f", "got", fix="so") == "f: got\n  try: so"
    assert problem("f", "got", needed="that") == "f: got\n  needed: that"


def test_the_call_site_is_the_users_line() -> None:
    file, line = (call_site() or "").rsplit(":", 1)
    assert file == __file__
    assert int(line) == test_the_call_site_is_the_users_line.__code__.co_firstlineno + 1


def test_an_error_is_caught_by_its_family_and_keeps_its_cause() -> None:
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise sf.RuleError("outer") from inner
    except sf.ShardError as error:
        assert isinstance(error.__cause__, ValueError)


WITHOUT = """
import torch
torch.distributed.is_available = lambda: False
try:
    import shardfn
except ImportError as error:
    print(error)
"""


def test_s7_7_a_torch_without_distributed_is_one_clear_error() -> None:
    ran = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(ran, check=True, capture_output=True, text=True)
    first, *rest = done.stdout.splitlines()
    assert first == "shardfn: this build of torch has no torch.distributed"
    assert [line.split(":")[0] for line in rest] == ["  needed", "  try"]


def test_a_library_whose_name_begins_with_torch_is_not_torch() -> None:
    """Errors name lines of torchmetrics, say, as they name lines of other libraries."""
    folder = os.path.dirname(torch.__file__)
    assert is_ours(os.path.join(folder, "functional.py"))
    assert not is_ours(os.path.join(f"{folder}metrics", "functional.py"))
