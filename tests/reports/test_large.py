"""Reports of large steps: within a minute and 4 GB, a page under 3 MB."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from bench.reports import STEPS

SECONDS, BYTES, PAGE = 60.0, 4e9, 3e6


@pytest.mark.parametrize("name", STEPS)
def test_a_large_step_has_a_report_within_a_minute(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    start = time.process_time()  # a speed of its own, whatever else runs
    page = STEPS[name]().report(path=path)
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES
    assert path.stat().st_size < PAGE
    assert page.summary.fits and 0.05 < page.summary.mfu < 1
    assert sum(row["nbytes"] for row in page.contents["collectives"]) == page.summary.nbytes
