"""How much the property tests try: SHARDFN_EFFORT=20 tries twenty times as much as a run in CI
does.

They try the same at every run; with SHARDFN_EXPLORE=1 something else each time, or as pytest's
--hypothesis-seed says.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EFFORT = int(os.environ.get("SHARDFN_EFFORT", "1"))
EXPLORE = os.environ.get("SHARDFN_EXPLORE") == "1"


def examples(n: int) -> settings:
    """Hypothesis settings: n examples, more with more effort."""
    slow = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ]
    return settings(
        max_examples=n * EFFORT,
        derandomize=not EXPLORE,
        deadline=None,
        database=None,
        suppress_health_check=slow,
    )
