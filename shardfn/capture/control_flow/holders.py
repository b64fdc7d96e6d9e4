"""Bodies over tensors that hold others, as bodies over the tensors that they hold.

A tensor that a derivative or vmap follows stays as it is: its class runs the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from .bodies import Region

Shells = list[_compat.Shell | None]  # None for a plain tensor
FIX = "its tensors as plain ones, and the class inside of the body"


def opened(
    xs: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], Shells]:
    """The tensors that each tensor holds, or itself."""
    rows = [
        _compat.opened(x) if _compat.holds_tensors(x) else ([x], None) for x in xs
    ]
    return [x for tensors, _ in rows for x in tensors], [shell for _, shell in rows]


def closed(
    name: str, shells: Shells, tensors: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Tensors made of those that they hold.

    Raises:
        CaptureError: a transform follows what one of them holds.
    """
    feed = iter(tensors)
    for shell in shells:
        if shell is None:
            yield next(feed)
            continue
        held = [next(feed) for _ in shell.names]
        if any(map(_compat.is_wrapped, held)):
            got = (
                f"a derivative or vmap follows a {shell.kind.__name__} in its carry"
            )
            raise CaptureError.of(name, got, fix=FIX)
        yield _compat.closed(shell, held)


def of_rows(shells: Shells) -> Shells:
    """For stacked tensors, what one row of each is besides its tensors."""
    return [_shaped(s, s.shape[1:], s.stride[1:]) if s else None for s in shells]


def stacked(shells: Shells, length: int) -> Shells:
    """For the rows of tensors, what the stacked tensors are besides their tensors."""
    return [
        s and _shaped(s, (length, *s.shape), (_size(s), *s.stride)) for s in shells
    ]


def _size(shell: _compat.Shell) -> int:
    return max(torch.Size(shell.shape).numel(), 1)


def _shaped(
    shell: _compat.Shell, shape: tuple[int, ...], stride: tuple[int, ...]
) -> _compat.Shell:
    return attrs.evolve(shell, shape=shape, stride=stride)


class Opened:
    """A body of tensors of which none holds others.

    Args:
        name: of the op, for errors.
        region: the body.
        entered: what the values that enter it are besides their tensors.

    Raises:
        CaptureError: a derivative or vmap follows some tensors that hold others, and not all.
    """

    def __init__(self, name: str, region: Region, entered: Shells) -> None:
        self.name, self.region, self.entered = name, region, entered
        self.free, self.closed_over = opened(region.free)
        self.left: Shells = []

    def __call__(
        self, entered: Sequence[torch.Tensor], free: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        constant = (
            _compat.unwrapped(x) if shell else x
            for x, shell in zip(free, self._owners(), strict=True)
        )
        given = closed(self.name, self.entered, entered)
        outs = self.region(
            [*given], [*closed(self.name, self.closed_over, [*constant])]
        )
        tensors, self.left = opened(outs)
        return tensors

    def _owners(self) -> Shells:
        """For each closed-over tensor, what holds it."""
        return [
            s for s in self.closed_over for _ in (s.names if s is not None else [s])
        ]


def refuse_mixed(name: str, xs: Iterable[torch.Tensor]) -> None:
    """Refuse tensors that hold others of which a transform follows some and not all.

    Raises:
        CaptureError: names the class.
    """
    values = list(xs)
    followed = [
        x for x in map(_compat.unwrapped, values) if _compat.holds_tensors(x)
    ]
    if followed and 0 < sum(map(_compat.holds_tensors, values)) < len(followed):
        kind = _compat.class_name(followed[0])
        got = f"a derivative or vmap follows one {kind} in it, and not another"
        raise CaptureError.of(name, got, fix=FIX)
