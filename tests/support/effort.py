"""How much the property tests try: SHARDFN_EFFORT=20 tries twenty times as much as a run in CI
does, and SHARDFN_EFFORT=1/5, as in `make test`, draws a fifth of the examples. `make sweeps` draws
them all. And which cases of a module run: what is computed once for all of them need not hold the
others.

They try the same at every run; with SHARDFN_EXPLORE=1 something else each time, or as pytest's
--hypothesis-seed says.
"""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ASKED = Fraction(os.environ.get("SHARDFN_EFFORT", "1"))
EFFORT = max(1, math.floor(ASKED))  # of tests that are no property of drawn examples
EXPLORE = os.environ.get("SHARDFN_EXPLORE") == "1"


def examples(n: int) -> settings:
    """Hypothesis settings: n examples, more with more effort."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=math.ceil(n * ASKED),
        derandomize=not EXPLORE,
        deadline=None,
        database=None,
        suppress_health_check=slow,
    )


def asked(request: pytest.FixtureRequest, *params: str) -> set[Any]:
    """The values of parameters in the cases of this module that are to run.

    Args:
        request: of a fixture of the module.
        params: names; the values of several are tuples.
    """
    found = set()
    for item in request.session.items:
        case = getattr(item, "callspec", None)
        is_here = item.path == request.path
        if is_here and case and set(params) <= case.params.keys():
            values = [case.params[name] for name in params]
            found.add(tuple(values) if len(values) > 1 else values[0])
    return found
