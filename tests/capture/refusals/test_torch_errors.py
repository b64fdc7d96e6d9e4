"""torch's errors during a capture, as errors of ours: the problem, what to try, and the line."""

from __future__ import annotations

import functools
import math
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardfn as sf
from shardfn import _compat
from shardfn.capture.refusals.torch_errors import capture_error_of

GONE = torch.ones(2)
TAKEN = sf.jit(lambda x: x * 2, backend="aten", donate_argnums=0)(GONE)


def fn(x: Any) -> Any: ...


def told(text: str, paths: Any = (), read: Any = None) -> str:
    return str(capture_error_of(RuntimeError(text), fn, "f", paths, read))


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.parts = [SimpleNamespace(total=0)]


def test_changed_objects_have_the_users_names() -> None:
    changed = lambda said, paths=(), read=None: told(
        f"side effects happened {said}", paths, read
    ).splitlines()[0]
    start = "f: the function changes an object outside of itself: "
    assert changed("L['args'][1]", ["x['w']", "y[0]"]) == f"{start}argument y"
    assert changed("L['args'][7]", ["x"]) == f"{start}argument 7"
    assert changed("G['total']") == f"{start}total"
    assert changed("G['log'].level and G['log'].level") == f"{start}log.level"
    assert changed("nothing named") == f"{start}a closed-over object"


def test_an_object_is_reached_from_the_function() -> None:
    held, other = Counter(), Counter()

    def reads() -> Any:
        return held, other

    text = told("side effects happened L['fn'].__closure__[1].cell", (), reads)
    assert text.startswith("f: the function changes an object outside of itself: other")
    text = told("side effects happened L['fn'].parts[0]", (), held)
    assert "an attribute of SimpleNamespace" in text
    text = told("side effects happened L['fn'].parts[0].total", (), held)
    assert "itself: SimpleNamespace.total" in text
    text = told("side effects happened L['fn'].none[0]", (), held)
    assert "a closed-over object" in text


FOREIGN = {
    f"{_compat.FOREIGN} Odd;": "the function closes over a Odd",
    f"{_compat.MADE} Odd;": "the function makes a Odd",
    f"{_compat.FOLLOWED} Odd: .scale;": (
        "a derivative or vmap applies to a Odd, and the function reads its .scale"
    ),
    f"{_compat.MADE_OF_FOLLOWED} Odd;": (
        "the function makes a Odd from tensors that are differentiated or mapped by vmap"
    ),
    f"{_compat.COMMUNICATES} all_reduce;": "the function calls a collective itself: all_reduce",
    "'FakeTensor' object has no attribute 'full_tensor'": (
        "the function reads .full_tensor of a global tensor, which is not a DTensor inside sf.shard"
    ),
}


@pytest.mark.parametrize("text", FOREIGN)
def test_classes_and_collectives_are_named(text: str) -> None:
    assert told(text).splitlines()[0] == f"f: {FOREIGN[text]}"


def test_an_exception_of_the_users_keeps_its_class_and_text() -> None:
    for said in (
        "got ValueError('n must be odd')",
        "raised exception ValueError([ConstantVariable(str: 'n must be odd')])",
    ):
        assert told(said).startswith("f: the function raises ValueError: n must be odd")


def test_other_texts_are_quoted_with_their_explanation() -> None:
    text = told("Unsupported thing\n  Explanation: it is new\n  Hint: none")
    assert "cannot be captured as one graph: Unsupported thing. it is new\n" in text
    assert "cannot be captured as one graph: RuntimeError." in told("")


class Scale:
    def __enter__(self) -> Scale:
        return self

    def __exit__(self, *_: object) -> None: ...

    @functools.cached_property
    def factor(self) -> torch.Tensor:
        return torch.full((2,), 3.0)

    def __rmul__(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


class TripleWithTangent(Triple):
    jvp = Triple.backward


SCALE, READ = Scale(), Scale()
TWO, LEAF = torch.full((2,), 2.0), torch.ones(2, requires_grad=True)
assert READ.factor is not None


def entered(x: torch.Tensor) -> torch.Tensor:
    with SCALE:
        return x * 3


def deep(x: torch.Tensor, n: int = 2000) -> torch.Tensor:
    return deep(x + 1, n - 1) if n else x


def looped(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
    return x


def made_and_entered(x: torch.Tensor) -> torch.Tensor:
    with Scale():
        return x * 3


UNREAD = {  # what is refused -> the problem, and a function that follows the advice
    lambda x: x * 3 if not x.is_conj() else x: (
        "the function calls is_conj, which returns a bool that is not known in a capture",
        lambda x: x * 3,
    ),
    lambda x: 3 * x if torch.get_float32_matmul_precision() else x: (
        "the function calls get_float32_matmul_precision, which returns a str",
        lambda x: 3 * x,
    ),
    lambda x: x * 3 if torch.can_cast(torch.float, torch.int) else x: (
        "the function calls can_cast, which returns a bool",
        lambda x: x * 3,
    ),
    lambda x: x * float(np.prod((1, 3))): (
        "the function takes a Python number from a NumPy array",
        lambda x: x * math.prod((1, 3)),
    ),
    deep: ("Python's limit of recursion is met while the function is read", looped),
    lambda x: x + GONE: (
        "the function uses a tensor that was donated to an earlier call, so its memory is gone",
        lambda x: x + TAKEN,
    ),
    lambda x: x * SCALE: ("an operation on tensors gets an object of class Scale", SCALE.times),
    lambda x: x * SCALE.factor: (
        "the function enters a lock, or reads a functools.cached_property for the first time",
        lambda x: x * READ.factor,
    ),
    lambda x: sf.cond(x.sum() > 0, Triple.apply, Triple.apply, x): (
        "the function uses a method of torch as a value",
        lambda x: sf.cond(x.sum() > 0, lambda x: Triple.apply(x), lambda x: -x, x),
    ),
    lambda x: sf.vmap(TWO.add)(x): (
        "the function uses a method of torch as a value",
        lambda x: sf.vmap(lambda *args: TWO[0].add(*args))(x),
    ),
    lambda x: TripleWithTangent.apply(LEAF) * x: (
        "autograd records a call of an autograd.Function that has a jvp of its own",
        lambda x: sf.vjp(lambda x: TripleWithTangent.apply(x), x)[1](x)[0],
    ),
}


@pytest.mark.parametrize("fn", UNREAD)
def test_what_dynamo_cannot_read_is_named_and_the_advice_works(fn: Any) -> None:
    start, advised = UNREAD[fn]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn)(torch.ones(2))
    assert str(caught.value).partition(": ")[2].startswith(start)
    torch.testing.assert_close(sf.jit(advised)(torch.ones(2)), torch.full((2,), 3.0))


def test_a_context_manager_made_outside_is_entered_or_refused_by_name() -> None:
    try:
        result = sf.jit(entered)(torch.ones(2))  # from torch 2.15 on
    except sf.CaptureError as error:
        assert "the function enters a Scale, a context manager that cannot be read" in str(error)
        result = sf.jit(made_and_entered)(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 3.0))


@pytest.mark.parametrize("around", [sf.grad, sf.checkpoint, sf.hessian])
def test_the_line_of_an_error_inside_of_a_transform(around: Any) -> None:
    none: list[float] = []

    def beyond(x: Any) -> Any:
        return x.sum() * none[2]

    with pytest.raises(IndexError) as caught:
        sf.jit(around(beyond), backend="aten")(torch.ones(3))
    *_, last = traceback.extract_tb(caught.value.__traceback__)
    assert (last.filename, last.lineno) == (__file__, beyond.__code__.co_firstlineno + 1)
