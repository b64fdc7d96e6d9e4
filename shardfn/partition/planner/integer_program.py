"""A minimization over choices of 0 or 1, and sizes, solved exactly by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

# A search visits so many nodes, times the entries of its matrix, at most: about a minute, and the
# same solution on every machine, at every load. A search that takes longer than that is stuck.
WORK, SECONDS = 10_000_000, 600.0
# Relative, within which a solution counts as the least, above so many variables of 0 or 1. A plan
# is taken if it is a tenth better, and proving the last hundredths of a large program takes
# minutes.
EXACT, LARGE = 1e-9, 6_000
GAPS = {0: EXACT, 3_000: 2e-3, LARGE: 0.05}
# Below so many times its cost the relaxation is tight, and what it decides is searched to a gap.
TIGHT, NEAR = 1.03, 1e-3
CLOSE = 1e-6  # to 0 or to 1
SOLVED, IMPOSSIBLE = 0, 2  # statuses of scipy's
HALF = 0.5
LARGEST = 1e4  # cost, for the solver's tolerances

# Terms of a sum: a variable and its factor.
Terms = Iterable[tuple[int, float]]


@attrs.define(eq=False)
class IntegerProgram:
    """A minimisation over 0-1 variables and sizes with linear constraints, which HiGHS solves."""

    costs: list[float] = attrs.field(factory=list)
    low: list[float] = attrs.field(factory=list)
    high: list[float] = attrs.field(factory=list)
    rows: list[int] = attrs.field(factory=list)
    columns: list[int] = attrs.field(factory=list)
    factors: list[float] = attrs.field(factory=list)
    sizes: set[int] = attrs.field(factory=set)  # the variables that are 0 or more
    choices: list[int] = attrs.field(factory=list)  # those of which one is 1
    is_impossible: bool = False  # whether the last solution found a contradiction
    is_late: bool = False  # whether a limit came before it was known to be the cheapest

    def variable(self, cost: float) -> int:
        """Add a 0-1 variable with a cost. Returns its number."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def size(self, cost: float) -> int:
        """Add a variable of 0 or more with a cost. Returns its number."""
        number = self.variable(cost)
        self.sizes.add(number)
        return number

    def minimise_size(self) -> int:
        """Make one new variable of 0 or more the only objective. Returns its number."""
        self.costs[:] = [0.0] * len(self.costs)
        return self.size(1.0)

    def between(self, low: float, terms: Terms, high: float) -> None:
        """Add the constraint low <= sum of terms <= high."""
        row = len(self.low)
        for variable, factor in terms:
            self.rows.append(row)
            self.columns.append(variable)
            self.factors.append(factor)
        self.low.append(low)
        self.high.append(high)

    def one_of(self, variables: Iterable[int]) -> None:
        """Require that exactly one of some variables is 1."""
        several = list(variables)
        self.choices += several
        self.between(1.0, ((v, 1.0) for v in several), 1.0)

    def at_most(self, variables: Iterable[int], others: Iterable[int], constant: float) -> None:
        """Require that the sum of some variables is at most that of others plus a constant."""
        terms = [(v, 1.0) for v in variables] + [(v, -1.0) for v in others]
        self.between(float("-inf"), terms, constant)

    def solve(self) -> list[bool] | None:
        """Return which variables are 1 in the cheapest solution; None if there is none within the
        limits.

        The relaxation, in which variables may lie between 0 and 1, is solved first. If it leaves
        nothing open, it is the solution. Of a large program then a part is searched, and of one
        that is not so large all of it too, if the part costs clearly more than the relaxation.
        The cheapest solution counts. A search that is not complete at its limit counts for
        nothing.
        """
        if not self.costs:
            return []
        relaxed = _Minimum(self)
        if relaxed.values is None:
            self.is_impossible = relaxed.is_impossible
            return None
        integral = self.integral()
        is_open = (relaxed.values > CLOSE) & (relaxed.values < 1.0 - CLOSE)
        if not (integral & is_open).any():
            return relaxed.taken
        count = int(integral.sum())
        gap = gap_of(count)
        found = [] if gap == EXACT else self.near(relaxed, gap)
        least = min((x.cost for x in found), default=np.inf)
        is_near = least <= relaxed.cost * (1.0 + gap)
        if not is_near and (count <= LARGE or least == np.inf):
            exact = _Minimum(self, gap)
            found.append(exact)
            self.is_impossible = exact.is_impossible
            self.is_late = exact.values is None and not exact.is_impossible
        return min(found, key=lambda x: x.cost).taken

    def near(self, relaxed: _Minimum, gap: float) -> list[_Minimum]:
        """Search near the relaxation: among the choices that it uses, then with the variables
        that it makes 1.

        Args:
            relaxed: the relaxation.
            gap: within which a solution counts as the cheapest.
        """
        assert relaxed.values is not None
        unused = np.zeros(len(self.costs), dtype=bool)
        unused[self.choices] = True
        unused &= relaxed.values < CLOSE
        first = _Minimum(self, gap, zeros=unused)
        if first.cost > relaxed.cost * TIGHT:
            return [first]
        ones = self.integral() & (relaxed.values > 1.0 - CLOSE)
        return [first, _Minimum(self, NEAR, ones=ones)]

    def integral(self) -> np.ndarray:
        """Return which variables must be 0 or 1."""
        found = np.ones(len(self.costs), dtype=bool)
        found[sorted(self.sizes)] = False
        return found


class _Minimum:
    """The cheapest solution of an integer program, or of its relaxation, by one call of scipy's
    milp.

    Args:
        program: the program.
        gap: within which a solution counts as the cheapest. None: variables may lie between
            0 and 1.
        zeros: the variables that are 0 in it.
        ones: those that are 1 in it.
    """

    def __init__(
        self,
        program: IntegerProgram,
        gap: float | None = None,
        zeros: np.ndarray | None = None,
        ones: np.ndarray | None = None,
    ) -> None:
        from scipy.optimize import Bounds, milp
        from scipy.sparse import coo_matrix

        size = (len(program.low), len(program.costs))
        entries = program.factors, (program.rows, program.columns)
        matrix = coo_matrix(entries, shape=size).tocsr()
        integral = program.integral()
        high: Any = np.where(integral, 1.0, np.inf)
        low: Any = np.zeros(len(program.costs))
        if zeros is not None:
            high[zeros] = 0.0
        if ones is not None:
            low[ones] = 1.0
        scale = LARGEST / max(1.0, *program.costs)
        found = milp(
            np.array(program.costs) * scale,
            constraints=(matrix, np.array(program.low), np.array(program.high)),
            integrality=integral.astype(int) * (gap is not None),
            bounds=Bounds(low, high),
            options={
                "time_limit": SECONDS,
                "node_limit": max(1, WORK // max(1, len(program.rows))),
                "mip_rel_gap": gap or 0.0,
            },
        )
        self.is_impossible = found.status == IMPOSSIBLE
        self.values: np.ndarray | None = found.x if found.status == SOLVED else None
        self.cost = np.inf if self.values is None else float(found.fun)

    @property
    def taken(self) -> list[bool] | None:
        """Return which variables are 1; None without a solution."""
        return None if self.values is None else [x > HALF for x in self.values]


def gap_of(count: int) -> float:
    """Return the relative optimality gap for a program of so many variables."""
    return next(gap for above, gap in reversed(GAPS.items()) if count > above)
