"""The fraction of its rate of arithmetic that torchtitan's card reaches under its power limit. It
is fitted on one row of torchtitan's Table 1: the compiled step in 16 bits.
"""

from __future__ import annotations

from typing import Any

import attrs
from scipy.optimize import brentq

from shardfn.hardware import H100_96GB

from .llama import EIGHT, Run, line_of

COMPILED = 6667  # tokens a second and GPU


def fitted() -> float:
    """Return the `power` at which the row is met. The efficiencies stay as published."""
    run = Run(EIGHT, 2)
    line = line_of(run)

    def miss(power: float) -> float:
        return line.seconds(attrs.evolve(H100_96GB, power=power)) - run.tokens / COMPILED

    power: Any = brentq(miss, 0.05, 1.0, xtol=1e-4)
    return power
