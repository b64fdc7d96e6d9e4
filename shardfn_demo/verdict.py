"""The verdict on the runs: whether each world's loss differs from the single device's by
rounding only.
"""

from __future__ import annotations

import attrs

from shardfn_demo.runs import Run

# relative; rounding in float32 stays a hundred times below it, a wrong gradient far above
LIMIT = 1e-4


@attrs.frozen
class Verdict:
    """Whether the worlds agree.

    Args:
        holds: whether they agree.
        sentence: the verdict in words.
    """

    holds: bool
    sentence: str


def differences(oracle: Run, run: Run) -> list[float]:
    """The relative difference of the loss at each step.

    Args:
        oracle: the single device.
        run: another world, of as many steps.

    Returns:
        One number for each step; NaN where a loss is.
    """
    return [
        abs(mine - right) / abs(right)
        for right, mine in zip(oracle.losses, run.losses, strict=True)
    ]


def judge(runs: list[Run]) -> Verdict:
    """Compare the losses of every step.

    Args:
        runs: the single device first.

    Returns:
        The verdict: it holds when no loss of another world differs by more than `LIMIT`,
        relatively.

    Example:
        >>> judge([Run("one", (2.0,), 1.0, 1.0), Run("two", (2.2,), 1.0, 1.0)]).holds
        False
    """
    oracle, *others = runs
    gaps = {run.name: differences(oracle, run) for run in others}
    wrong = {name: step for name, gap in gaps.items() if (step := first_wrong(gap)) is not None}
    if wrong:
        said = ", ".join(
            f"{name} from step {step} on, by {gaps[name][step - 1]:.1e}"
            for name, step in wrong.items()
        )
        return Verdict(
            False, f"Not proved: the loss is not that of {oracle.name}: {said} (limit {LIMIT:.0e})."
        )
    worlds, worst = " and ".join(gaps), max(max(gap) for gap in gaps.values())
    steps = len(oracle.losses)
    return Verdict(
        True,
        (
            f"Proved: over {steps} steps {worlds} have the loss of {oracle.name} to "
            f"{worst:.1e} (limit {LIMIT:.0e})."
        ),
    )


def first_wrong(gaps: list[float]) -> int | None:
    """The first step, counted from 1, whose difference exceeds rounding. NaN counts as
    exceeding it.
    """
    return next((step for step, gap in enumerate(gaps, start=1) if not gap <= LIMIT), None)
