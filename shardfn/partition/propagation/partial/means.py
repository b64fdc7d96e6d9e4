"""Partial means of arguments and results. Inside a program, each is a Partial sum of shares."""

from __future__ import annotations

import math

import torch

from ....types import MEAN, Marks
from ... import plan
from ...emission.builder import Builder, Piece

aten = torch.ops.aten


def as_sums(marks: Marks) -> Marks:
    """The placements with Partial sums in place of Partial means."""
    return tuple("sum" if m == MEAN else m for m in marks)


def rescale(b: Builder, step: plan.Rescale, pieces: dict[int, Piece]) -> None:
    """Emit a Rescale: a rank's share of a mean over n ranks is one n-th of its term. Sends
    nothing.
    """
    before = step.source.marks
    after = step.target.marks
    piece = pieces[step.source.number]
    shares = math.prod(n for n, m, k in zip(b.axes.sizes, before, after, strict=True) if m != k)
    op = aten.div.Tensor if MEAN in before else aten.mul.Tensor
    node = b.restride(b.call(op, piece.node, shares), piece.shape, piece.stride)
    pieces[step.target.number] = b.piece(node, step.target.value, after)
