"""One look at the arguments of a call: what is a tensor, a constant, static, or donated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.runtime.arguments.look import look
from shardfn.runtime.options import Request

X, Y = torch.ones(2, 3), torch.ones(4)


def fn(x: Any, y: Any = None, *, k: Any = 1) -> Any: ...


def seen(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    return look(Request("f", fn, fn, **(options or {})), args, kwargs)


def test_tensors_and_constants_have_the_paths_of_the_parameters() -> None:
    placed = seen({"w": X, "n": 3}, Y, k="mode")
    assert placed.paths == ("x['w']", "x['n']", "y", "k")
    assert placed.tensors == (0, 2) and [i for i, _, _ in placed.constants] == [1, 3]
    assert [aval.shape for aval in placed.avals] == [(2, 3), (4,)]
    assert placed.marks == ((), ()) and placed.mesh is None


def test_static_and_donated_arguments_are_told_by_leaf() -> None:
    placed = seen({"w": X, "v": Y}, 3, options={"static_argnums": (1,), "donate_argnums": (0,)})
    assert placed.donated == (0, 1) and placed.static == frozenset({2})


def test_tensors_that_autograd_follows_are_noted_while_it_is_on() -> None:
    w = X.clone().requires_grad_()
    options = {"differentiated": lambda fn, followed: fn}
    assert seen(w, Y, options=options).followed == (0,)
    with torch.no_grad():
        assert seen(w, Y, options=options).followed == ()


def test_a_call_that_python_would_refuse_is_refused_with_the_signature() -> None:
    with pytest.raises(sf.TreeError) as caught:
        seen(X, Y, X)
    text = str(caught.value)
    assert text.startswith("f: too many positional arguments") and "(x: 'Any'" in text


def test_an_object_is_no_argument() -> None:
    with pytest.raises(sf.TreeError, match="f, argument y"):
        seen(X, object())
