"""Rules as text: "b i k, k j -> b i j" names the factor of every dim. Sharding a factor shards
the results that have it, and leaves the others Partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch

from ... import _compat
from ...errors import RuleError
from ...types import AxisPlacement
from .strategy import Choice, OpCall, replicated

REST, ONE = "...", "1"  # any leading dims; a dim of size 1, which is never sharded
Row = tuple[str, ...]


@attrs.frozen
class Factors:
    """A parsed einsum-like rule: the factor of each dim of each input and result."""

    text: str
    ins: tuple[Row, ...]
    outs: tuple[Row, ...]
    whole: frozenset[str]  # factors that are never sharded

    @property
    def contracted(self) -> list[str]:
        """List the factors that some result lacks; sharding one makes that result a Partial sum."""
        names = dict.fromkeys(f for row in self.ins for f in row)
        return [
            f
            for f in names
            if f not in self.whole and f != ONE and any(f not in row for row in self.outs)
        ]

    def choices(self, call: OpCall) -> list[Choice]:
        """List the strategies of a call: replicated, then one per factor."""
        return [replicated(call), *self.factor_strategies(*self.named(call))]

    def factor_strategies(self, ins: Sequence[Row], outs: Sequence[Row]) -> list[Choice]:
        """List one strategy for each factor that may be sharded."""
        names = dict.fromkeys(f for row in (*outs, *ins) for f in row)
        return [_cut(f, ins, outs) for f in names if f != ONE and _family(f) not in self.whole]

    def named(self, call: OpCall) -> tuple[list[Row], list[Row]]:
        """Match the factors to the dims of a call's tensors.

        Raises:
            RuleError: the tensors have other dims, or a factor has two sizes.
        """
        owned = [
            *((self.ins[owner], f"input {owner}") for owner in in_owners(call)),
            *((self.outs[owner], f"result {owner}") for owner in out_owners(call)),
        ]
        tensors = (*call.ins, *call.outs)
        rows: list[Row] = []
        wrong: list[str] = []
        # factor -> size -> the places with that size
        sizes: dict[str, dict[int, str]] = {}
        for (written, owner), x in zip(owned, tensors, strict=True):
            row = _spelled(written, x.dim())
            if len(row) != x.dim():
                wrong.append(_other_dims(owner, written, x))
            for factor, n in zip(row, x.shape, strict=False):
                sizes.setdefault(factor, {}).setdefault(n, owner)
            rows.append(row)
        sizes.setdefault(ONE, {}).setdefault(1, "the rule")
        wrong += _two_sizes(sizes)
        if wrong:
            raise self._misfit(call, wrong)
        return rows[: len(call.ins)], rows[len(call.ins) :]

    def _misfit(self, call: OpCall, wrong: list[str]) -> RuleError:
        """Make the error for a call whose tensors do not match the factors."""
        fix = (
            "give one name for each dim, equal names for equal sizes, and 1 for a dim of size "
            "1; or pass a function as the rule"
        )
        return RuleError.of(f"rule({call.target}), {self.text!r}", *wrong, fix=fix)

    def strangers(self, op: _compat.OpOverload) -> list[str]:
        """Describe how the factors mismatch the schema of an op."""
        tensors = len(tensor_arguments(op))
        returns = len(_compat.schema(op).returns)
        wrong = []
        if len(self.ins) != tensors:
            wrong.append(
                f"the rule names {len(self.ins)} inputs, but the op takes {tensors} tensor "
                "arguments"
            )
        if len(self.outs) != returns:
            wrong.append(f"the rule names {len(self.outs)} results, but the op returns {returns}")
        return wrong


def parsed(text: str, whole: tuple[str, ...]) -> Factors:
    """Parse the text of a rule, such as "i k, k j -> i j".

    Raises:
        ValueError: with one argument for each problem.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError("the rule must have exactly one arrow (->) between inputs and results")
    ins = _rows(left)
    outs = _rows(right)
    known = {f for row in ins for f in row}
    wrong = []
    for row, kind in (*((r, "input") for r in ins), *((r, "result") for r in outs)):
        said = f"{kind} {' '.join(row)!r}"
        wrong += [
            f"{said}: {f!r} is not a name"
            for f in row
            if not (f.isidentifier() or f in (REST, ONE))
        ]
        wrong += [
            f"{said}: it names {f} twice"
            for f in dict.fromkeys(row)
            if f != ONE and row.count(f) > 1
        ]
        wrong += (
            [f"{said}: ... stands for leading dims and must come first"] if REST in row[1:] else []
        )
    wrong += [
        f"the dim name {f} is in a result of the rule, but in none of its inputs"
        for row in outs
        for f in row
        if f not in known and f != ONE
    ]
    wrong += [
        f"need_whole names {f}, which is not a dim name in the rule"
        for f in whole
        if f not in known
    ]
    if wrong:
        raise ValueError(*dict.fromkeys(wrong))
    return Factors(text, ins, outs, frozenset(whole))


def tensor_arguments(op: _compat.OpOverload) -> list[str]:
    """List the names of an op's tensor arguments, optional ones and lists included."""
    return [a.name for a in _compat.schema(op).arguments if "Tensor" in str(a.type)]


def in_owners(call: OpCall) -> list[int]:
    """For each tensor of a call, return the index of its tensor argument."""
    names = tensor_arguments(call.target)
    arguments = _compat.schema(call.target).arguments
    owners: list[int] = []
    for name, value in (
        *zip((a.name for a in arguments), call.args, strict=False),
        *call.kwargs.items(),
    ):
        nodes: list[torch.fx.Node] = []
        torch.fx.node.map_arg(value, nodes.append)
        owners += [names.index(name) for _ in nodes]
    return owners


def out_owners(call: OpCall) -> list[int]:
    """For each tensor that a call returns, return the index of its result."""
    one = len(_compat.schema(call.target).returns) == 1
    return [0 if one else i for i in range(len(call.outs))]


def _rows(text: str) -> tuple[Row, ...]:
    """Split a text into the factors of each tensor."""
    return tuple(tuple(part.replace(REST, f" {REST} ").split()) for part in text.split(","))


def _spelled(row: Row, dims: int) -> Row:
    """Replace `...` by one factor per leading dim, counted from the right."""
    if row[:1] != (REST,):
        return row
    others = row[1:]
    rest = dims - len(others)
    names = [f"{REST}{k}" for k in range(rest, 0, -1)]
    return (*names, *others)


def _other_dims(owner: str, row: Row, x: torch.Tensor) -> str:
    """Describe a tensor whose number of dims differs from its factors."""
    names = " ".join(row) or "no dims"
    return f"{owner} has {x.dim()} dims, shape {tuple(x.shape)}; the rule names {names!r}"


def _two_sizes(sizes: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Describe the factors that have several sizes."""
    return [
        f"factor {factor} has two sizes: "
        + ", ".join(f"{n} in {owner}" for n, owner in owners.items())
        for factor, owners in sizes.items()
        if len(owners) > 1
    ]


def _family(factor: str) -> str:
    """Return the factor as written: `...` for any of the leading dims."""
    return REST if factor.startswith(REST) else factor


def _cut(factor: str, ins: Sequence[Row], outs: Sequence[Row]) -> Choice:
    """Make the strategy that shards one factor."""
    place: Iterator[AxisPlacement] = (row.index(factor) if factor in row else "R" for row in ins)
    made: Iterator[AxisPlacement] = (row.index(factor) if factor in row else "sum" for row in outs)
    return tuple(place), tuple(made)
