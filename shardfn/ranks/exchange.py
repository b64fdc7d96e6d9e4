"""The results of the collectives of torch.distributed for each rank of a group."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ..errors import SAME_COLLECTIVES, DivergenceError, call_site, listed, problem
from ..runtime.ring import ring_reduce
from .turns import Turns

Tensors = list[torch.Tensor]
REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,  # and divided
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


SAME_ORDER = "the same collectives on every rank of a group, in the same order"


@attrs.frozen(eq=False)
class Posted:
    """A collective that one rank has posted.

    Args:
        kind: its name.
        same: its options, equal on all ranks.
        outs: the tensors that it writes on this rank.
        ins: the tensors that it reads on this rank.
        source: the user's line.
    """

    kind: str
    same: tuple[Any, ...]
    outs: Tensors
    ins: Tensors
    source: str | None

    def __str__(self) -> str:
        shapes = ", ".join(str([*x.shape]) for x in self.ins or self.outs)
        options = "".join(f", {x}" for x in self.same)
        return f"{self.kind}({shapes}{options}) at {self.source}"


class Ticket:
    """A posted collective, and the wait for what other ranks have to do.

    Args:
        turns: of the ranks.
        posted: the collective.
        attempt: tries to finish it; None where another rank does.
    """

    def __init__(
        self, turns: Turns, posted: Posted, attempt: Callable[[Ticket], bool] | None = None
    ) -> None:
        self.turns, self.posted, self.attempt = turns, posted, attempt
        self.is_finished = False
        self.sender: int | None = None  # of a message that has come

    def has_finished(self) -> bool:
        """Return whether it has finished."""
        return self.is_finished or (self.attempt is not None and self.attempt(self))

    def is_done(self) -> bool:
        """Return whether it has finished, after a turn of the other ranks."""
        if not self.has_finished():
            self.turns.pause()
        return self.has_finished()

    def wait(self) -> None:
        """Wait until it has finished."""
        if not self.has_finished():
            self.turns.wait(self.has_finished, lambda: f"waits in {self.posted}")


class Exchange:
    """The collectives of all ranks: each is done when the last rank of its group has posted it.

    Args:
        turns: of the ranks.
        name: of the program, for errors.
    """

    def __init__(self, turns: Turns, name: str) -> None:
        self.turns, self.name = turns, name
        self.numbers: dict[tuple[str, int], int] = {}  # of the next one, by group and rank
        self.posts: dict[tuple[str, int], dict[int, Ticket]] = {}  # by group and number
        self.mail: dict[tuple[str, int], deque[tuple[int, int, Tensors]]] = {}  # to each rank

    def post(
        self, group: Any, kind: str, same: tuple[Any, ...], outs: Tensors, ins: Tensors
    ) -> Ticket:
        """Post a collective of the calling rank."""
        posted = Posted(kind, same, outs, ins, call_site())
        if kind == "recv":
            return Ticket(self.turns, posted, functools.partial(self._receive, group))
        ticket = Ticket(self.turns, posted)
        if kind == "isend":
            to, tag = same
            self._mail(group, to).append((group.rank(), tag, [x.clone() for x in ins]))
        if kind in AT_ONCE:
            ticket.is_finished = True
        else:
            self._join(group, ticket)
        return ticket

    # Collectives

    def _join(self, group: Any, ticket: Ticket) -> None:
        rank, name = group.rank(), group.group_name
        number = self.numbers.get((name, rank), 0)
        self.numbers[name, rank] = number + 1
        posts = self.posts.setdefault((name, number), {})
        posts[rank] = ticket
        if len(posts) < group.size():
            return
        del self.posts[name, number]
        tickets = [posts[r] for r in range(group.size())]
        self._same(tickets)
        with torch.no_grad():
            COMBINE[tickets[0].posted.kind]([t.posted for t in tickets])
        for each in tickets:
            each.is_finished = True

    def _same(self, tickets: Sequence[Ticket]) -> None:
        """Check that all ranks of a group have posted the same collective."""
        posts = [t.posted for t in tickets]
        kinds = {(p.kind, p.same) for p in posts}
        uneven = posts[0].kind in EQUAL_SHAPES and len({_shapes(p.ins) for p in posts}) > 1
        if len(kinds) == 1 and not uneven:
            return
        texts = dict.fromkeys(str(p) for p in posts)
        lines = [
            f"  {listed([r for r, p in enumerate(posts) if str(p) == text])} of the group: {text}"
            for text in texts
        ]
        raise DivergenceError(
            problem(self.name, "ranks enter different collectives", *lines, needed=SAME_COLLECTIVES)
        )

    # Messages

    def _mail(self, group: Any, to: int) -> deque[tuple[int, int, Tensors]]:
        return self.mail.setdefault((group.group_name, to), deque())

    def _receive(self, group: Any, ticket: Ticket) -> bool:
        """Take the message that a rank waits for, if it has come."""
        mail = self._mail(group, group.rank())
        source, tag = ticket.posted.same
        for message in mail:
            sender, its_tag, values = message
            if source in (None, sender) and tag == its_tag:
                mail.remove(message)
                _copy(ticket.posted.outs, values)
                ticket.sender, ticket.is_finished = sender, True
                return True
        return False


def _shapes(tensors: Tensors) -> tuple[Any, ...]:
    return tuple((x.numel(), x.dtype) for x in tensors)


def _copy(outs: Tensors, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for out, x in zip(outs, values, strict=True):
            out.copy_(x.reshape(out.shape))


# Values, as Gloo computes them


def reduced(values: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Reduce one tensor for each rank."""
    name, _, factor = name.partition("*")
    if factor:
        values = [x * float(factor) for x in values]
    total = ring_reduce([x.contiguous() for x in values], REDUCE[name])
    return total / len(values) if name == "AVG" else total


def _all_reduce(group: Sequence[Posted]) -> None:
    """Reduce the tensors of a post as one, as Gloo does."""
    joined = [torch.cat([x.reshape(-1) for x in p.ins]) for p in group]
    total = reduced(joined, group[0].same[0])
    for p in group:
        _copy(p.outs, total.split([x.numel() for x in p.outs]))


def _reduce(group: Sequence[Posted]) -> None:
    name, root = group[0].same
    for i, out in enumerate(group[root].outs):
        _copy([out], [reduced([p.ins[i] for p in group], name)])


def _broadcast(group: Sequence[Posted]) -> None:
    values = [x.clone() for x in group[group[0].same[0]].ins]
    for p in group:
        _copy(p.outs, values)


def _all_gather(group: Sequence[Posted]) -> None:
    """Give each rank the tensors of all: for each tensor one of each rank, or of each rank all."""
    values = [x.clone() for p in group for x in p.ins]
    for p in group:
        _copy(p.outs, values)


def _all_gather_into_tensor(group: Sequence[Posted]) -> None:
    for i in range(len(group[0].outs)):
        values = torch.cat([p.ins[i].reshape(-1) for p in group])
        for p in group:
            _copy([p.outs[i]], [values])


def _gather(group: Sequence[Posted]) -> None:
    _copy(group[group[0].same[0]].outs, [p.ins[0] for p in group])


def _scatter(group: Sequence[Posted]) -> None:
    for p, x in zip(group, group[group[0].same[0]].ins, strict=True):
        _copy(p.outs, [x])


def _reduce_scatter(group: Sequence[Posted]) -> None:
    for i, p in enumerate(group):
        _copy(p.outs, [reduced([other.ins[i] for other in group], group[0].same[0])])


def _reduce_scatter_tensor(group: Sequence[Posted]) -> None:
    for i in range(len(group[0].outs)):
        total = reduced([p.ins[i] for p in group], group[0].same[0]).reshape(-1)
        for p, x in zip(group, total.chunk(len(group)), strict=True):
            _copy([p.outs[i]], [x])


def _all_to_all(group: Sequence[Posted]) -> None:
    values = [[x.clone() for x in p.ins] for p in group]
    for rank, p in enumerate(group):
        _copy(p.outs, [sent[rank] for sent in values])


def _barrier(group: Sequence[Posted]) -> None:
    pass


COMBINE: dict[str, Callable[[Sequence[Posted]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
}
AT_ONCE = {"isend", "nothing"}
# Collectives whose tensors are of one size on all ranks.
EQUAL_SHAPES = {"all_reduce", "reduce", "broadcast", "reduce_scatter_tensor"}
EQUAL_SHAPES |= {"all_gather_into_tensor", "reduce_scatter"}
