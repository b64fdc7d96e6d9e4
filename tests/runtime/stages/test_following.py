"""Which program a call that autograd follows is captured as, by scripted captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import shardfn as sf
from shardfn.capture.closure.primals import Derivative
from shardfn.ops.random_bits import AMBIENT, DRAW, random_bits
from shardfn.runtime.arguments.look import look
from shardfn.runtime.options import Request
from shardfn.runtime.stages import following
from tests.support.stages.graphs import graph_of

W, V = (torch.ones(2, requires_grad=True) for _ in range(2))
X = torch.ones(2)


def fn(w: Any, x: Any) -> Any: ...


class Outside:
    """What a capture closes over: tensors, of which some would lose their gradients."""

    tensors = (X, V)
    names = ("x0", "model.v")

    def __init__(self) -> None:
        self.refused: list[Any] = []

    def lost(self, known: Any = ()) -> list[int]:
        return [] if any(x is V for x in known) else [1]

    def refuse_lost(self, name: str, known: Any) -> None:
        self.refused.append((name, list(known)))


class Nothing(Outside):
    tensors = names = ()

    def lost(self, known: Any = ()) -> list[int]:
        return []


class Read(list[str]):
    """The places that a capture has read."""

    def with_those_of(self, other: list[str]) -> list[str]:
        return [*self, *other]


@attrs.frozen
class Scripted:
    """A capture."""

    outside: Any
    derivative: Any
    reads: Any


def captured(outside: Any, derivative: Any = None, reads: Any = ()) -> Any:
    return Scripted(outside, derivative, Read(reads))


def request() -> Request:
    return Request("f", fn, fn, differentiated=lambda fn, followed: (fn, followed))


def followed(
    monkeypatch: pytest.MonkeyPatch, request: Request, captures: list[Any], w: Any
) -> tuple[Any, Any, list[Request]]:
    """(the request, the capture, the requests that were captured) for fn(w, X)."""
    asked: list[Request] = []
    feed = iter(captures)

    def next_capture(mine: Request, *_: Any) -> Any:
        asked.append(mine)
        return next(feed)

    monkeypatch.setattr(following, "captured_for", next_capture)
    args = (w, X)
    placed = look(request, args, {})
    made, result = following.followed_capture(request, args, {}, placed)
    return made, result, asked


def test_without_gradients_the_request_stays(monkeypatch: Any) -> None:
    mine, one = request(), captured(Nothing())
    made, result, asked = followed(monkeypatch, mine, [one], X)
    assert made is mine and result is one and asked == [mine]


def test_arguments_with_gradients_are_followed(monkeypatch: Any) -> None:
    one = captured(Nothing(), Derivative((True,), ((0,),)))
    made, result, _ = followed(monkeypatch, request(), [one], W)
    assert result is one and made.followed.leaves == (0,)
    assert made.followed.paths == ("w",) and made.followed.are_real == (True,)
    assert made.fn == (fn, made.followed)


def test_closed_over_tensors_are_followed_by_a_second_capture(monkeypatch: Any) -> None:
    first = Outside()
    one = captured(first, reads=["model.v"])
    two = captured(Outside(), Derivative((True,), ((0,), (0,))), ["model"])
    made, result, asked = followed(monkeypatch, request(), [one, two], W)
    assert result.outside is two.outside and len(asked) == 2
    assert result.reads == ["model", "model.v"]
    assert asked[0].followed.closed_over == ()
    assert made.followed.closed_over == (V,)
    assert made.followed.paths == ("w", "model.v")
    assert first.refused == [("f", [V])]


def test_a_closed_over_tensor_that_nothing_reaches_is_refused_as_lost(monkeypatch: Any) -> None:
    first = Outside()
    two = captured(Outside(), Derivative((True,), ((0,), ())))
    followed(monkeypatch, request(), [captured(first), two], W)
    assert first.refused == [("f", [])]


def test_without_a_derivative_the_plain_program_runs(monkeypatch: Any) -> None:
    mine = request()
    one = captured(Nothing(), Derivative((False,), ((),)))
    two = captured(Nothing())
    made, result, asked = followed(monkeypatch, mine, [one, two], W)
    assert made is mine and result is two and asked[1] is mine


def test_the_request_with_gradients_is_made_once(monkeypatch: Any) -> None:
    mine = request()
    one = captured(Nothing(), Derivative((True,), ((0,),)))
    first = followed(monkeypatch, mine, [one], W)[0]
    assert followed(monkeypatch, mine, [one], W)[0] is first
    assert len(mine.store.followed) == 1


def numbers(use: int, seed: str) -> None:
    """Check a program that draws twice from its only input."""
    draw = lambda key, n: random_bits(key, None, [n], [1], use, 0, torch.int64)
    key = torch.zeros(2, dtype=torch.int64)
    graph = graph_of(lambda key: [draw(key, 2), draw(key, 3)], key)
    for node in graph.nodes:
        node.meta |= {"phase": "forward", "source": f"model.py:{node.name}"}
    program = SimpleNamespace(graph=SimpleNamespace(graph=graph))
    made: Any = SimpleNamespace(program=program, closed_over=())
    following.check_numbers(Request("f", fn, fn, seed=seed), made)


def test_a_key_is_used_once_where_that_is_checked(monkeypatch: Any) -> None:
    monkeypatch.delenv("SHARDFN_CHECK", raising=False)
    numbers(DRAW, "required")
    monkeypatch.setenv("SHARDFN_CHECK", "1")
    with pytest.raises(sf.ShardError, match="key"):
        numbers(DRAW, "state")


def test_the_state_is_not_drawn_from_where_keys_are_required() -> None:
    numbers(AMBIENT, "state")
    with pytest.raises(sf.ShardError, match="torch draws random numbers"):
        numbers(AMBIENT, "required")
