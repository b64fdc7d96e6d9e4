"""The communication of a program as a table, and against a budget."""

from __future__ import annotations

from typing import Any

from shardfn.inspect.budget import Explanation, over_budget
from shardfn.types import Collective

GATHER = Collective("all_gather", "dp", 256, None, "mm_2", "model.py:3", True)
REDUCE = Collective("all_reduce", "dp", 4, "sum", "output", None, False)
ALIGN = Collective("all_reduce", "dp", 128, "sum", "prim_align_1", "model.py:7", False, 0)
FOUND = Explanation("shard(f)", "(dp=2)", (GATHER, REDUCE, ALIGN), elided=2)


def test_a_table_and_its_sums() -> None:
    assert str(FOUND).splitlines() == [
        "shard(f) on mesh (dp=2): 3 collectives, 388 B a rank",
        "  bytes  collective           for       bucket  asked by           at",
        "  256 B  all_gather[dp]       mm_2              nothing: implicit  model.py:3",
        "    4 B  all_reduce[sum, dp]  result            a placement",
        "  128 B  all_reduce[sum, dp]  gradient  0       a placement        model.py:7",
        "  1 all_gather over dp: 256 B",
        "  2 all_reduce over dp: 132 B",
        "  2 over axes of one rank were removed",
    ]
    assert FOUND.nbytes == 388 and FOUND.implicit == (GATHER,)
    assert str(Explanation("f", "(a=2)", ())) == "f on mesh (a=2): 0 collectives, 0 B a rank"


def test_the_collectives_of_a_scan_stand_once() -> None:
    found = str(Explanation("f", "(dp=2)", (REDUCE, *[GATHER] * 80)))
    rows = [line for line in found.splitlines() if "all_gather[" in line]
    assert len(rows) == 1 and rows[0].startswith("  80 x 256 B  all_gather[dp]")
    assert "80 all_gather over dp: 20.0 KiB" in found


def _over(**options: Any) -> list[str]:
    limits = {"counts": {}, "most_bytes": None, "most_implicit": None, **options}
    return over_budget(FOUND, limits.pop("counts"), **limits)


def test_a_budget_counts_kinds_bytes_and_implicit_collectives() -> None:
    assert _over() == []
    counts = {"all_gather": 1, "all_reduce": 2, "all_to_all": 0}
    assert _over(counts=counts, most_bytes=388, most_implicit=1) == []
    assert _over(counts={"all_gather": 0, "all_to_all": 1}, most_bytes=387, most_implicit=0) == [
        "1 all_gather, and 0 in the budget: for mm_2 over dp, 256 B, at model.py:3",
        "0 all_to_all, and 1 in the budget",
        "388 B a rank, and at most 387 B in the budget",
        "1 implicit collectives, and at most 0 in the budget: for mm_2 over dp, 256 B, "
        "at model.py:3",
    ]
