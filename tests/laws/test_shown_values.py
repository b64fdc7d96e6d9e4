"""Law: a captured function shows the values that plain Python shows, in the same order, once: in
loops and branches, under each transform, on each mesh, compiled and on real ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.tensor([1.5, -2.0, 0.5, 3.0, 7.0], dtype=torch.float64)


def show(text: str, *xs: Any) -> None:
    sf.debug.print(text, *xs)


def straight(x: Tensor) -> Tensor:
    show("x {}", x)
    y = (x * x).sum()
    print(f"y {y:.3f}")
    show("again {}", y)
    return y


def scanned(x: Tensor) -> Tensor:
    def body(c: Tensor, row: Tensor) -> Any:
        show("c {:.4f} row {:.4f}", c, row)
        return c * row.cos(), c

    show("before")
    c, rows = sf.scan(body, x.sum(), x)
    show("after {:.4f}", c)
    sf.scan(body, c, x)  # nothing reads it
    show("end")
    return c + rows.sum()


def looped(x: Tensor) -> Tensor:
    def body(state: Any) -> Any:
        i, c = state
        show("i {}", i)
        return i + 1, c * 1.5

    show("before {:.4f}", x.sum())
    _, c = sf.while_loop(lambda state: state[0] < 3, body, (torch.tensor(0), x))
    show("after {:.4f}", c.sum())
    return c.sum()


def branched(x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        show("yes {:.4f}", x.sum())
        return x.sin()

    def no(x: Tensor) -> Tensor:
        print("no %.4f" % x.sum())  # noqa: UP031
        return x * 2

    a = sf.cond(x.sum() > 0, yes, no, x)
    b = sf.cond(x.sum() < 0, yes, no, x)
    return (a * b).sum()


def checkpointed(x: Tensor) -> Tensor:
    return sf.checkpoint(straight)(x)


def loops_checkpointed(x: Tensor) -> Tensor:
    def nested(x: Tensor) -> Tensor:
        def outer(c: Tensor, row: Tensor) -> Any:
            show("outer {:.4f}", c)
            return sf.scan(lambda c, row: (inner(c, row), c), c + row, x)

        def inner(c: Tensor, row: Tensor) -> Tensor:
            show("inner {:.4f}", c)
            return c * row.cos()

        return sf.scan(outer, x.sum(), x)[0]

    return sf.checkpoint(scanned)(x) + sf.checkpoint(nested)(x)


def written(x: Tensor) -> Tensor:
    y = (x * x).sum()
    sys.stdout.write(f"y {y:.3f}\n")
    sys.stdout.flush()
    sys.stdout.write(f"x {x.sum():.3f}\n")
    return y


def logged(x: Tensor) -> Tensor:
    log = logging.getLogger("tests.shown")
    y = (x * x).sum()
    log.warning("y %.3f of %s", y, x.dtype)
    print("y " + str(y) + " {braces} " + f"{y:.2f}")
    print("y: " + f"{y}")
    return y


def formatted(x: Tensor) -> Tensor:
    y, at = (x * x).sum(), x.argmax()
    print("loss %.3f of %s at %d, 100%%" % (y.item(), "all", at.item()))  # noqa: UP031
    print("loss " + str(y.item()) + " " + repr(at.item()))
    print(", ".join(f"{k}={v:.2f}" for k, v in {"{y}": y, "at": at}.items()))
    print("|".join(["a", f"{y:.1f}".rjust(12), f"{y:.1f}".ljust(12), "b"]) + "|")
    return y


def computed(x: Tensor) -> Tensor:
    y, at = (x * x).sum(), x.argmax()
    loss, n = y.item(), at.item()
    print(f"{loss / 3:.3f} {100 * n / len(x):.1f}%", round(loss, 2), round(loss), int(y), float(at))
    print(-loss % 2, n // 3, n**2, abs(-loss), max(loss, 1000.0), min(n, 1), n == 4, loss > n)
    print({"sum": [loss + n, 1 - loss]}, math.sqrt(loss), math.floor(loss), math.ceil(loss))
    return y


PROGRAMS = (
    formatted,
    computed,
    straight,
    scanned,
    looped,
    branched,
    checkpointed,
    loops_checkpointed,
    written,
    logged,
)


@contextlib.contextmanager
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops and branches as Python's own."""

    def scan(body: Any, c: Any, xs: Tensor) -> Any:
        rows = []
        for x in xs:
            c, row = body(c, x)
            rows.append(row)
        return c, torch.stack(rows)

    def while_loop(test: Any, body: Any, state: Any) -> Any:
        while test(state):
            state = body(state)
        return state

    with monkeypatch.context() as m:
        m.setattr(sf, "scan", scan)
        m.setattr(sf, "while_loop", while_loop)
        m.setattr(sf, "cond", lambda truth, yes, no, *xs: (yes if truth else no)(*xs))
        m.setattr(sf, "checkpoint", lambda fn: fn)
        yield


def lines(capsys: pytest.CaptureFixture[str], fn: Callable[[], Any]) -> list[str]:
    capsys.readouterr()
    fn()
    return capsys.readouterr().out.splitlines()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: sf.jit(f, backend="aten")(X),
    "grad": lambda f: sf.grad(f)(X),
    "jvp": lambda f: sf.jvp(f, (X,), (X,)),
    "vjp": lambda f: sf.vjp(f, X),
    "hessian": lambda f: sf.hessian(f)(X),
    "backward": lambda f: sf.jit(f, backend="aten")(X.clone().requires_grad_()).backward(),
}


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_shows_what_python_shows(
    name: str, fn: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain(monkeypatch):
        wanted = lines(capsys, lambda: fn(X))
    assert len(wanted) >= 2
    assert lines(capsys, lambda: TRANSFORMS[name](fn)) == wanted


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_each_mesh_shows_global_values(
    fn: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain(monkeypatch):
        wanted = lines(capsys, lambda: fn(X))
    for shape, axes, spec in (((3,), ("dp",), P("dp")), ((2, 2), ("dp", "tp"), P(("dp", "tp")))):
        with sf.fake_world(torch.Size(shape).numel()):
            mesh = sf.make_mesh(shape, axes)
            step = sf.shard(sf.value_and_grad(fn), mesh, in_placements=(spec,))
            assert lines(capsys, lambda step=step: step(X)) == wanted
            assert lines(capsys, lambda step=step: step(X)) == wanted


def test_vmap_shows_each_sample(capsys: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        show("{:.1f} {:.1f}", x, w)
        return x * w

    xs = torch.tensor([1.0, 2.0])
    wanted = ["1.0 5.0", "2.0 5.0"]
    assert lines(capsys, lambda: sf.vmap(f, in_axes=(0, None))(xs, torch.tensor(5.0))) == wanted
    per_sample = sf.vmap(sf.grad(f), in_axes=(0, None))
    assert lines(capsys, lambda: per_sample(xs, torch.tensor(5.0))) == wanted


def test_constants_are_shown_once_where_a_capture_is_repeated(capsys: Any) -> None:
    layer = torch.nn.Linear(5, 2).double()

    def step(x: Tensor) -> Tensor:
        sys.stdout.write("begin\n")
        return layer(x)

    step(X)
    capsys.readouterr()
    sf.jit(step, backend="aten")(X)  # autograd follows the weights, once they are known
    note = "(printed when jit(step) is captured, because no tensor is printed)"
    assert capsys.readouterr().out.splitlines() == [f"begin {note}"]


def test_a_capture_that_fails_shows_no_values_of_its_own(capsys: Any) -> None:
    def step(x: Tensor) -> Tensor:
        print("loss", x.sum())
        logging.getLogger("tests.shown").warning("mean %.2f", x.mean())
        return __import__("math").pi * x

    with pytest.raises(sf.CaptureError):
        sf.jit(step, backend="aten")(X)
    got = capsys.readouterr()
    assert "FakeTensor" not in got.out + got.err
    assert "Logging error" not in got.err


def test_what_is_printed_to_the_errors_of_a_process_goes_there(capsys: Any) -> None:
    def step(x: Tensor) -> Tensor:
        print("loss", x.sum(), file=sys.stderr)
        sys.stderr.write(f"mean {x.mean():.1f}\n")
        print("here")
        return x

    step(X)
    wanted = capsys.readouterr()
    sf.jit(step, backend="aten")(X)
    got = capsys.readouterr()
    assert got.err == wanted.err
    assert got.out == "here (printed when jit(step) is captured, because no tensor is printed)\n"


def test_compiled_code_shows_in_order(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with plain(monkeypatch):
        wanted = lines(capsys, lambda: (straight(X), scanned(X), straight(-X)))
    f = sf.jit(sf.grad(lambda x: straight(x) + scanned(x) + straight(-x)), backend="inductor")
    assert lines(capsys, lambda: f(X)) == wanted


def ranks(backend: str) -> list[str]:
    """What one rank shows."""
    shown: list[str] = []
    mesh = sf.make_mesh((2,), ("dp",))

    def step(x: Tensor) -> Tensor:
        sf.debug.callback(lambda y: shown.append(f"first {y.tolist()}"), x * 2)
        sf.debug.callback(lambda y: shown.append(f"all {y:.1f}"), x.sum(), ranks="all")
        return x.sum()

    sf.shard(step, mesh, P("dp"), backend=backend)(X)

    def local(x: Tensor) -> Tensor:
        sf.debug.callback(lambda y: shown.append(f"own {y.tolist()}"), x, ranks="all")
        return sf.psum(x, "dp")

    sf.shard_map(local, mesh, P("dp"), P(), backend=backend)(X[:4])
    return shown


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_real_ranks_show_global_values_and_their_own(backend: str) -> None:
    first, second = run_ranks(2, ranks, backend)
    assert first == ["first [3.0, -4.0, 1.0, 6.0, 14.0]", "all 10.0", "own [1.5, -2.0]"]
    assert second == ["all 10.0", "own [0.5, 3.0]"]


def warns(x: Tensor) -> Tensor:
    warnings.warn(FutureWarning(f"old {x.sum():.2f}"))  # noqa: B028
    warnings.warn(Own("own %.1f" % x.max()))  # noqa: UP031, B028
    warnings.warn(f"plain {x.sum():.2f}", RuntimeWarning)  # noqa: B028
    return x * 2


class Own(UserWarning):
    pass


@pytest.mark.parametrize("name", ["jit", "grad"])
def test_a_warning_keeps_its_class_and_text(name: str) -> None:
    call = {"jit": sf.jit(warns, backend="aten"), "grad": sf.grad(lambda x: warns(x).sum())}[name]
    shown = []
    for fn in (warns, call, call):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fn(X)
        shown.append([(w.category, str(w.message)) for w in found if w.filename == __file__])
    assert shown[1] == shown[2] == shown[0] and len(shown[0]) == 3


class Queue:
    def join(self, x: Tensor) -> Tensor:
        return x + 1


def test_other_methods_of_the_name_join_are_read() -> None:
    queue = Queue()

    def joins(x: Tensor) -> Tensor:
        name = os.path.join("a", "b") + "-".join(["c", "d"]) + "e".rjust(3)
        return queue.join(x) * len(name)

    assert torch.equal(sf.jit(joins, backend="aten")(X), joins(X))


def test_what_torch_logs_of_an_error_that_it_raises_is_not_shown() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            sf.jit(lambda x: x @ x, backend="aten")(torch.ones(2, 3))
    finally:
        log.removeHandler(handler)
    assert not [x.getMessage() for x in records if "(printed when" in x.getMessage()]
