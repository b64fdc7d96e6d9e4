"""The efficiencies of the named cards, fitted on two rows of torchtitan's Table 1: the compiled
step gives that of products of 16 bits, its float8 that of products of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from scipy.optimize import brentq

from shardfn.hardware import FITTED, H100_96GB, Efficiency

from .llama import EIGHT, Run, line_of

COMPILED, FLOAT8 = 6667, 8532  # tokens a second and GPU


def fitted() -> Efficiency:
    """Return the efficiencies at which the two rows are met. The others stay as published."""
    run = Run(EIGHT, 2)
    line = line_of(run)

    def at(wanted: float, float8: bool, efficiency: Callable[[float], Efficiency]) -> Efficiency:
        def miss(share: float) -> float:
            card = attrs.evolve(H100_96GB, float8=float8, efficiency=efficiency(share))
            return line.seconds(card) - run.tokens / wanted

        share: Any = brentq(miss, 0.05, 1.0, xtol=1e-4)
        return efficiency(share)

    wide = at(COMPILED, False, lambda x: attrs.evolve(FITTED, product16=x, product32=x))
    return at(FLOAT8, True, lambda x: attrs.evolve(wide, product8=x))
