"""Bodies over wrapper subclasses, as bodies over their inner tensors.

A tensor that a derivative or vmap follows stays as it is: its class runs the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from .bodies import BodyGraph, BodyWithSums

Shells = list[_compat.Shell | None]  # None for a plain tensor
FIX = "pass the subclass's inner tensors as plain tensors, and build the subclass inside the body"


def inner_tensors(xs: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], Shells]:
    """The inner tensors of each wrapper subclass, or the plain tensor itself; and what each
    subclass is besides them.
    """
    rows = [_compat.opened(x) if _compat.holds_tensors(x) else ([x], None) for x in xs]
    return [x for tensors, _ in rows for x in tensors], [spec for _, spec in rows]


def rebuilt_subclasses(
    name: str, specs: Shells, tensors: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The wrapper subclasses that are made again from their inner tensors.

    Raises:
        CaptureError: a transform follows what one of them holds.
    """
    feed = iter(tensors)
    for spec in specs:
        if spec is None:
            yield next(feed)
            continue
        held = [next(feed) for _ in spec.names]
        if any(map(_compat.is_wrapped, held)):
            raise CaptureError.of(
                name,
                f"a derivative or vmap applies to a {spec.kind.__name__} in the loop's carry",
                fix=FIX,
            )
        yield _compat.closed(spec, held)


def specs_of_rows(name: str, xs: Sequence[torch.Tensor]) -> Shells:
    """For stacked wrapper subclasses, what one row of each is besides its inner tensors.

    Raises:
        CaptureError: a row does not hold the rows of what the tensor holds.
    """
    held = map(_compat.holds_tensors, xs)
    rows = zip(xs, held, strict=True)
    return [_spec_of_row(name, x, x[0]) if is_held else None for x, is_held in rows]


def refuse_unstackable(name: str, xs: Iterable[torch.Tensor]) -> None:
    """Refuse wrapper subclasses, as per-step results, that cannot be stacked by stacking their
    inner tensors.

    Raises:
        CaptureError: names the class.
    """
    for x in xs:
        if _compat.holds_tensors(x):
            _spec_of_row(name, x.unsqueeze(0), x)


def _spec_of_row(name: str, x: torch.Tensor, row: torch.Tensor) -> _compat.Shell | None:
    """What a row of a wrapper subclass is besides its inner tensors, if x has the stacked inner
    tensors of it.
    """
    if not _compat.holds_tensors(row) and not _compat.holds_tensors(x):
        return None
    if type(x) is type(row):
        (held, _), (rows, spec) = _compat.opened(x), _compat.opened(row)
        pairs = zip(held, rows, strict=True)
        if all(a.dim() and a.shape[1:] == b.shape for a, b in pairs):
            return spec
    kind = type(x if _compat.holds_tensors(x) else row).__name__
    raise CaptureError.of(
        name, f"a row of a {kind} does not consist of the rows of its inner tensors", fix=FIX
    )


def stacked_specs(specs: Shells, length: int) -> Shells:
    """For rows of wrapper subclasses, what the stacked ones are besides their inner tensors."""
    return [s and _shaped(s, (length, *s.shape), (_size(s), *s.stride)) for s in specs]


def refuse_different_results(name: str, one: Shells, other: Shells) -> None:
    """Refuse two lists of results that should have equal wrapper subclasses and do not.

    Raises:
        CaptureError: names both.
    """
    told = [[s and (s.kind, s.names, s.said) for s in x] for x in (one, other)]
    if told[0] != told[1]:
        texts = [", ".join(map(_spec_text, x)) for x in (one, other)]
        raise CaptureError.of(
            name,
            f"the function returns {texts[0]} in one case, and {texts[1]} in another",
            fix="return results of the same class in all cases",
        )


def _spec_text(spec: _compat.Shell | None) -> str:
    return "a plain tensor" if spec is None else f"a {spec!r}"


def _size(spec: _compat.Shell) -> int:
    return max(torch.Size(spec.shape).numel(), 1)


def _shaped(spec: _compat.Shell, shape: tuple[int, ...], stride: tuple[int, ...]) -> _compat.Shell:
    return attrs.evolve(spec, shape=shape, stride=stride)


class BodyOverInnerTensors:
    """A body over wrapper subclasses, as a function of their inner tensors.

    Args:
        name: of the op, for errors.
        region: the body.
        entered: what the values that enter it are besides their tensors.
        carries: how many results come first that are not stacked; None if none is stacked.
    """

    def __init__(
        self,
        name: str,
        region: BodyGraph | BodyWithSums,
        entered: Shells,
        carries: int | None = None,
    ) -> None:
        self.carries = carries
        self.name, self.region, self.entered = name, region, entered
        self.free, self.closed_over = inner_tensors(region.free)
        self.left: Shells = []

    def __call__(
        self, entered: Sequence[torch.Tensor], free: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        constant = (
            _compat.unwrapped(x) if spec else x
            for x, spec in zip(free, self._owners(), strict=True)
        )
        given = rebuilt_subclasses(self.name, self.entered, entered)
        outs = self.region(
            [*given], [*rebuilt_subclasses(self.name, self.closed_over, [*constant])]
        )
        if self.carries is not None:
            refuse_unstackable(self.name, outs[self.carries :])
        tensors, self.left = inner_tensors(outs)
        return tensors

    def _owners(self) -> Shells:
        """For each closed-over inner tensor, the spec of the subclass that has it."""
        return [s for s in self.closed_over for _ in (s.names if s is not None else [s])]


def refuse_partly_followed(name: str, xs: Iterable[torch.Tensor]) -> None:
    """Refuse wrapper subclasses of which a transform follows some and not all.

    Raises:
        CaptureError: names the class.
    """
    values = list(xs)
    followed = [x for x in map(_compat.unwrapped, values) if _compat.holds_tensors(x)]
    if followed and 0 < sum(map(_compat.holds_tensors, values)) < len(followed):
        kind = _compat.class_name(followed[0])
        raise CaptureError.of(
            name,
            f"inside the loop or branch, one {kind} is differentiated or mapped by vmap, but "
            f"another {kind} is not",
            fix=FIX,
        )
