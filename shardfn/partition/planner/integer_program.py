"""A minimization over choices of 0 or 1, and sizes, solved exactly by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

SECONDS = (
    60.0  # after which there is no solution: another rank might find another one
)
# Relative, within which a solution counts as the least, above so many variables. A plan is taken
# if it is a tenth better, and proving the last tenth of a large program takes minutes.
GAPS = {0: 1e-9, 2_000: 2e-3, 10_000: 0.1}
SOLVED, IMPOSSIBLE = 0, 2  # statuses of scipy's
HALF = 0.5
LARGEST = 1e4  # cost, for the solver's tolerances

# Terms of a sum: a variable and its factor.
Terms = Iterable[tuple[int, float]]


@attrs.define(eq=False)
class IntegerProgram:
    """Variables of 0 or 1 with a cost each, and linear constraints between them."""

    costs: list[float] = attrs.field(factory=list)
    low: list[float] = attrs.field(factory=list)
    high: list[float] = attrs.field(factory=list)
    rows: list[int] = attrs.field(factory=list)
    columns: list[int] = attrs.field(factory=list)
    factors: list[float] = attrs.field(factory=list)
    sizes: set[int] = attrs.field(factory=set)  # the variables that are 0 or more
    is_impossible: bool = False  # whether the last solution found a contradiction

    def variable(self, cost: float) -> int:
        """A new variable, by its number."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def size(self, cost: float) -> int:
        """A new variable of 0 or more, by its number."""
        number = self.variable(cost)
        self.sizes.add(number)
        return number

    def between(self, low: float, terms: Terms, high: float) -> None:
        """Require low <= the sum of the terms <= high."""
        row = len(self.low)
        for variable, factor in terms:
            self.rows.append(row)
            self.columns.append(variable)
            self.factors.append(factor)
        self.low.append(low)
        self.high.append(high)

    def one_of(self, variables: Iterable[int]) -> None:
        """Require that exactly one of some variables is 1."""
        self.between(1.0, ((v, 1.0) for v in variables), 1.0)

    def at_most(
        self, variables: Iterable[int], others: Iterable[int], constant: float
    ) -> None:
        """Require that the sum of some variables is at most that of others and a constant."""
        terms = [(v, 1.0) for v in variables] + [(v, -1.0) for v in others]
        self.between(float("-inf"), terms, constant)

    def solve(self) -> list[bool] | None:
        """Which variables are 1 in the cheapest solution; None if time was up before it was
        known to be the cheapest, or if there is none.
        """
        from scipy.optimize import Bounds, milp
        from scipy.sparse import coo_matrix

        if not self.costs:
            return []
        size = (len(self.low), len(self.costs))
        matrix = coo_matrix((self.factors, (self.rows, self.columns)), shape=size)
        count = len(self.costs)
        integral = [variable not in self.sizes for variable in range(count)]
        most = [1.0 if x else np.inf for x in integral]
        low: Any = np.zeros(count)
        high: Any = np.array(most)
        bounds = Bounds(low, high)
        scale = LARGEST / max(1.0, *self.costs)
        found = milp(
            np.array(self.costs) * scale,
            constraints=(matrix.tocsr(), np.array(self.low), np.array(self.high)),
            integrality=np.array(integral, dtype=int),
            bounds=bounds,
            options={
                "time_limit": SECONDS,
                "mip_rel_gap": gap_of(count),
            },
        )
        self.is_impossible = found.status == IMPOSSIBLE
        return [x > HALF for x in found.x] if found.status == SOLVED else None


def gap_of(count: int) -> float:
    """The gap for so many variables: relative to the cost of the solution."""
    return next(gap for above, gap in reversed(GAPS.items()) if count > above)
