"""What a difference between ranks and one device looks like, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from ...errors import listed

OTHER = "other values"
UNREDUCED = "each rank its own"
SCALED = ": scaled"  # by a number that is no size
FIT = 0.1  # of the largest element: what is farther from a multiple is none


@attrs.frozen
class Axis:
    """Groups of ranks that communicate, such as those along an axis of a mesh.

    Args:
        name: of the axis.
        groups: the ranks of each group.
        slack: how far a ratio may be from its size, relative to it.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    slack: float = 1e-3

    @property
    def size(self) -> int:
        """The ranks of the largest group."""
        return max(len(group) for group in self.groups)


@attrs.frozen(eq=False)
class Pair:
    """A tensor of one rank, and what one device has in its place.

    Args:
        value: of the rank; None where it has none.
        expected: of one device, the same elements.
        elements: the numbers of the elements.
    """

    value: torch.Tensor | None
    expected: torch.Tensor
    elements: torch.Tensor


@attrs.frozen
class Difference:
    """How the tensors of ranks differ from those of one device.

    Args:
        ratio: by which those of all ranks are too large; None where no number is.
        largest: the largest difference of an element.
        ranks: the ranks that differ.
        cause: what it looks like.
    """

    ratio: float | None
    largest: float
    ranks: tuple[int, ...]
    cause: str


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the difference, relative to the largest element, that rounding may make."""
    floating = [x for x in dtypes if x.is_floating_point]
    return max((torch.finfo(x).eps ** 0.55 for x in floating), default=0.0)


def difference(
    pairs: Mapping[int, Pair],
    axes: Sequence[Axis],
    bound: float,
    hint: str | None,
    *,
    is_summed: bool = True,
) -> Difference | None:
    """Say how the tensors of ranks differ from those of one device; None where they do not.

    Args:
        pairs: by rank.
        axes: the groups of ranks, the likeliest first.
        bound: the difference of an element that rounding may make.
        hint: a cause that is known of all tensors; None where none is.
        is_summed: whether ranks add up what each has, as gradients and losses, unlike parameters.
    """
    if missing := tuple(r for r, p in pairs.items() if p.value is None):
        largest = max(size(pairs[r].expected) for r in missing)
        where = "every rank" if len(missing) == len(pairs) else listed(missing)
        return Difference(0.0, largest, missing, f"missing on {where}: not computed, or not saved")
    gaps = {r: gap(p) for r, p in pairs.items()}
    wrong = tuple(r for r, x in gaps.items() if not x <= bound)  # also for NaN
    if not wrong:
        return None
    largest = max(gaps[r] for r in wrong)
    slack = slack_of(pairs, bound)
    axes = [attrs.evolve(axis, slack=slack) for axis in axes]
    shared = ratio_of([pairs[r] for r in wrong], bound)
    cause, ratio = hint or OTHER, None
    if any(not math.isfinite(x) for x in gaps.values()):
        cause = f"not finite on {listed([r for r in wrong if not math.isfinite(gaps[r])])}"
    elif not is_summed and (parts := replicas(pairs, bound)):
        cause = f"differs between replicas: {parts}"
    elif own := scaled_by_rank(pairs, bound, slack) or unreduced(pairs, axes, bound):
        cause = own
    elif shared is not None and is_telling(shared, [pairs[r] for r in wrong], axes):
        ratio, cause = shared, scaled(shared, wrong, pairs, axes)
        if hint is not None and cause.endswith(SCALED):
            ratio, cause = None, hint
    elif parts := replicas(pairs, bound):
        cause = f"differs between replicas: {parts}"
    return Difference(ratio, largest, wrong, cause)


def slack_of(pairs: Mapping[int, Pair], bound: float) -> float:
    """Return how far rounding may move the ratio of two tensors."""
    largest = max(size(p.expected) for p in pairs.values())
    return min(max(bound / max(largest, 1e-300), 1e-3), FIT)


def gap(pair: Pair) -> float:
    """Return the largest difference of an element."""
    assert pair.value is not None
    return size(pair.value.double() - pair.expected.double())


def size(x: torch.Tensor) -> float:
    """Return the size of the largest element; 0 for a tensor without elements."""
    return float(x.abs().max()) if x.numel() else 0.0


def ratio_of(pairs: Sequence[Pair], bound: float) -> float | None:
    """Return the number by which all tensors are the expected ones; None where there is none."""
    value = torch.cat([p.value.reshape(-1).double() for p in pairs if p.value is not None])
    expected = torch.cat([p.expected.reshape(-1).double() for p in pairs])
    square = float(expected @ expected)
    if square == 0:
        return None
    ratio = float(value @ expected) / square
    rest = size(value - ratio * expected)
    allowed = bound * max(1.0, abs(ratio))
    if abs(ratio) > 1e-2:  # where rounding is large, all else would be a multiple
        allowed = min(allowed, FIT * abs(ratio) * size(expected))
    return ratio if rest <= allowed else None


def is_telling(ratio: float, pairs: Sequence[Pair], axes: Sequence[Axis]) -> bool:
    """Return whether a ratio says something: any two numbers have one."""
    slack = max(axis.slack for axis in axes)
    is_size = abs(ratio - 1) < slack or bool(sized(ratio, axes) or sized(1 / (ratio or 1), axes))
    elements = {int(e) for p in pairs for e in p.elements.reshape(-1)[:2]}
    return is_size or len(elements) > 1


def scaled(
    ratio: float, ranks: Sequence[int], pairs: Mapping[int, Pair], axes: Sequence[Axis]
) -> str:
    """Say what a ratio looks like."""
    where = "every rank" if len(ranks) == len(pairs) else listed(ranks)
    start = f"x {number(ratio)} on {where}"
    if abs(ratio) < 1e-6:
        return f"{start}: lost"
    names = sized(ratio, axes)
    if names:
        return f"{start} = size of {names}: reduced twice, or summed in place of averaged"
    names = sized(1 / ratio, axes)
    if names:
        return f"{start} = 1 / size of {names}: divided once more"
    return f"{start}{SCALED}"


def scaled_by_rank(pairs: Mapping[int, Pair], bound: float, slack: float) -> str | None:
    """Say by which number each rank has scaled what is right, if ranks have numbers of their own:
    a norm of its part, a count of its tokens.
    """
    ratios = {
        rank: ratio_of([pair], bound)
        for rank, pair in pairs.items()
        if int((pair.expected.abs() > bound).sum()) > 1
    }
    known = [ratio for ratio in ratios.values() if ratio is not None and abs(ratio) > 1e-3]
    if len(known) < max(len(ratios), 2) or max(known) - min(known) < 2 * slack * max(known):
        return None
    written = ", ".join(f"x {ratio:.4g} on rank {rank}" for rank, ratio in ratios.items())
    return f"each rank another scale: {written}"


def sized(ratio: float, axes: Sequence[Axis]) -> str:
    """Return the names of the axes of a size, or of two axes whose sizes make it."""
    slack = max((axis.slack for axis in axes), default=1e-3)
    close = lambda n: n > 1 and abs(ratio / n - 1) < slack
    names = [axis.name for axis in axes if close(axis.size)]
    if not names:
        pairs = itertools.combinations(axes, 2)
        names = [f"{a.name} x {b.name}" for a, b in pairs if close(a.size * b.size)][:1]
    return " or ".join(names)


def unreduced(pairs: Mapping[int, Pair], axes: Sequence[Axis], bound: float) -> str | None:
    """Say over which axis each rank has its own part, if their sum or mean is what is expected."""
    for chosen in [*((a,) for a in axes), *itertools.combinations(axes, 2)]:
        groups = [*joined(chosen, tuple(pairs))]
        if all(len(group) == 1 for group in groups) or not all(
            same_elements(pairs, group) and differ(pairs, group, bound) for group in groups
        ):
            continue
        sums = [
            Pair(
                sum((pairs[r].value.double() for r in group), torch.zeros(())),  # type: ignore[union-attr]
                pairs[group[0]].expected,
                pairs[group[0]].elements,
            )
            for group in groups
        ]
        n = len(groups[0])
        ratio = ratio_of(sums, bound * n)
        if ratio is None or abs(ratio) < 1e-6 or not is_telling(ratio, sums, axes):
            continue
        name = " x ".join(axis.name for axis in chosen)
        start = f"{UNREDUCED}: not reduced over {name}"
        slack = chosen[0].slack
        if abs(ratio - 1) < slack or abs(ratio / n - 1) < slack:
            return start
        return f"{start}, and x {number(ratio)}"
    return None


def joined(axes: Sequence[Axis], ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that axes connect together."""
    left = set(ranks)
    while left:
        group = {min(left)}
        while True:
            more = {r for a in axes for g in a.groups if group & set(g) for r in g}
            if more <= group:
                break
            group |= more
        left -= group
        yield tuple(sorted(group & set(ranks)))


def same_elements(pairs: Mapping[int, Pair], group: Sequence[int]) -> bool:
    """Return whether all ranks of a group have the same elements."""
    first = pairs[group[0]].elements
    return all(torch.equal(pairs[r].elements, first) for r in group)


def differ(pairs: Mapping[int, Pair], group: Sequence[int], bound: float) -> bool:
    """Return whether ranks of a group have different values."""
    first = pairs[group[0]].value
    others = [pairs[r].value for r in group[1:]]
    assert first is not None
    return any(x is not None and not _near(x, first, bound) for x in others)


def replicas(pairs: Mapping[int, Pair], bound: float) -> str | None:
    """Say which ranks with the same elements have equal values, if not all of them do."""
    classes: list[list[int]] = []
    for rank, pair in pairs.items():
        for known in classes:
            other = pairs[known[0]]
            is_same = torch.equal(other.elements, pair.elements)
            if is_same and _near(pair.value, other.value, bound):
                known.append(rank)
                break
        else:
            classes.append([rank])
    firsts = [pairs[known[0]].elements for known in classes]
    repeated = any(torch.equal(a, b) for a, b in itertools.combinations(firsts, 2))
    return " | ".join(listed(known) for known in classes) if repeated else None


def _near(x: torch.Tensor | None, y: torch.Tensor | None, bound: float) -> bool:
    assert x is not None and y is not None
    return x.shape == y.shape and (not x.numel() or float((x - y).abs().max()) <= bound)


def number(x: float) -> str:
    """Write a ratio: as a fraction where it is one."""
    if 0 < x < 0.75 and abs(x * round(1 / x) - 1) < 1e-3:
        return f"1/{round(1 / x)}"
    return f"{round(x)}.0" if round(x) and abs(x / round(x) - 1) < 1e-3 else f"{x:.4g}"
