"""An error of the user's function arrives as what it is: the class and the text that the plain
function raises, the frames of the user, one note.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(12.0).reshape(3, 4)
LINES = 12


class Misfit(Exception):
    """An exception of a user's, with arguments that are no text."""

    def __init__(self, rows: int, *, why: str) -> None:
        super().__init__(rows)
        self.why = why


class Net(torch.nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(columns, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.missing


def look_up(x: Any, key: str) -> Any:
    return {"a": x}[key]


def unbound(x: Any) -> Any:
    if x.dim() > 2:
        y = x
    return y


def unpacked(x: Any) -> Any:
    a, b, c = x.shape
    return x * a * b * c


def failed_check(x: Any) -> Any:
    assert x.shape[0] == 5
    return x


def checked(x: Any) -> Any:
    assert x >= 0, "below zero"
    return x


def explained_check(x: Any) -> Any:
    assert x.shape[0] == 5, f"got {x.shape[0]} rows"
    return x


def misfit(x: Any) -> Any:
    raise Misfit(x.shape[0], why="odd")


def raised(make: Callable[[], Any]) -> Callable[[Any], Any]:
    def raises(x: Any) -> Any:
        raise make()

    return raises


def from_another(x: Any) -> Any:
    try:
        return look_up(x, "b")
    except KeyError as error:
        raise ValueError("no such part") from error


def in_an_except(x: Any) -> Any:
    try:
        return look_up(x, "b")
    except KeyError:
        raise ValueError("no such part")  # noqa: B904


def from_none(x: Any) -> Any:
    try:
        return look_up(x, "b")
    except KeyError:
        raise ValueError("no such part") from None


def again(x: Any) -> Any:
    try:
        return look_up(x, "b")
    except KeyError:
        raise


def with_finally(x: Any) -> Any:
    try:
        return look_up(x, "b")
    finally:
        x = x + 1


def in_a_loop(x: Any) -> Any:
    for key in ("a", "a", "b"):
        x = look_up(x, key)
    return x


def written(x: Any) -> Any:
    x.shape = 3
    return x


def imported(x: Any) -> Any:
    import no_such_module

    return no_such_module.f(x)


def under_no_grad(x: Any) -> Any:
    with torch.no_grad():
        return look_up(x, "b")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return look_up(x, "b")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return look_up(g, "b")


def in_a_backward(x: Any) -> Any:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(Backward.apply(y).sum(), y)[0]


def unused(x: Any) -> Any:
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y * 2).sum(), y.clone())[0]


def recomputed(x: Any) -> Any:
    part = lambda y: look_up(y, "b")
    return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)


def lengths(x: Any) -> Any:
    y = x[:, None].expand(3, 2, 4).log_softmax(-1)
    return torch.nn.functional.ctc_loss(y, torch.ones(2, 2, dtype=torch.int64), (3,), (2, 2))


WRONG: dict[str, Callable[[Any], Any]] = {
    "a branch on many elements": lambda x: x if x > 0 else -x,
    "an assert of many elements": checked,
    "a backward": in_a_backward,
    "a gradient of what is not used": unused,
    "what is recomputed": recomputed,
    "lengths of ctc_loss": lengths,
    "an attribute of a tensor": lambda x: x.nope,
    "an attribute of an object": lambda x: json.JSONEncoder().nope * x,
    "an attribute of torch": lambda x: torch.nope(x),
    "a name": lambda x: x + undefined,  # noqa: F821
    "a variable before its value": unbound,
    "a key": lambda x: look_up(x, "b"),
    "an index of a list": lambda x: [x][x.dim()],
    "an index of a tensor": lambda x: x[7],
    "too many indices": lambda x: x[0, 0, 0],
    "a number of arguments": lambda x: look_up(x),
    "a keyword": lambda x: torch.sum(x, foo=3),
    "operands": lambda x: x + "a",
    "operands without tensors": lambda x: "a" + 1,
    "a call of a number": lambda x: x.dim()(x),
    "a length": lambda x: len(5),
    "a class": lambda x: isinstance(x, 3),
    "a text of a number": lambda x: int("abc") * x,
    "a domain": lambda x: math.sqrt(-1) * x,
    "a division": lambda x: x * (1 / (x.dim() - 2)),
    "a json text": lambda x: json.loads("{") * x,
    "unpacking": unpacked,
    "an assert": failed_check,
    "an assert with a text": explained_check,
    "shapes of a product": lambda x: x @ torch.ones(7, 5),
    "shapes of a sum": lambda x: x + torch.ones(7),
    "shapes of a linear layer": lambda x: torch.nn.functional.linear(x, torch.ones(5, 7)),
    "a view": lambda x: x.view(7, 7),
    "a view of a lazy conjugate": lambda x: torch.view_as_real((x + 1j).conj()),
    "a view of a lazy negative": lambda x: (x + 1j).conj().imag.view(torch.int32),
    "dims to join": lambda x: torch.cat([x, torch.ones(7)]),
    "dims of a convolution": lambda x: torch.nn.functional.conv2d(x, torch.ones(1, 1, 2, 2)),
    "a dim": lambda x: x.softmax(5),
    "dtypes of a product": lambda x: x @ torch.ones(4, 5, dtype=torch.float64),
    "a dtype of indices": lambda x: torch.nn.functional.embedding(x, torch.ones(5, 7)),
    "an exception class of the user's": misfit,
    "ValueError": raised(lambda: ValueError("mine")),
    "a class without a text": raised(NotImplementedError),
    "a text like torch's": raised(lambda: RuntimeError("to be on the same device")),
    "a text like Dynamo's": raised(lambda: ValueError("side effects happened")),
    "RuntimeError": raised(lambda: RuntimeError(3, "b")),
    "StopIteration": lambda x: next(iter([])),
    "SystemExit": lambda x: sys.exit(3),
    "KeyboardInterrupt": raised(lambda: KeyboardInterrupt()),
    "BaseException": raised(lambda: BaseException("b")),
    "a group": raised(lambda: ExceptionGroup("two", [ValueError(1), TypeError("2")])),
    "raise from": from_another,
    "raise in an except": in_an_except,
    "raise from None": from_none,
    "raise alone": again,
    "finally": with_finally,
    "a loop": in_a_loop,
    "a generator": lambda x: sum(look_up(x, key) for key in ("a", "b")),
    "a method": lambda x: x.sum().nope(),
    "an attribute that is written": written,
    "a module that is missing": imported,
    "an attribute of a module": Net(4),
    "a module's shapes": Net(5),
    "under no_grad": under_no_grad,
    "an autograd.Function": Doubled.apply,
}


def error_of(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it raises nothing")


def own_frames(error: BaseException | None) -> list[tuple[str, int | None]]:
    """The frames of a traceback that are neither torch's nor shardfn's, without the caller's."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    places = [(frame.filename, frame.lineno) for frame in frames]
    return [place for place in places[2:] if "/torch/" not in place[0]]


def is_shortened(short: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether some frames are the first and the last of others, or all of them."""
    n = len(short)
    return [*short] == ([*whole] if n == len(whole) else [whole[0], *whole[1 - n :]])


def check(plain: BaseException, ours: BaseException, name: str) -> None:
    assert (type(ours), str(ours)) == (type(plain), str(plain))
    assert is_shortened(own_frames(ours), own_frames(plain))
    assert not any("/shardfn/" in f.filename for f in traceback.extract_tb(ours.__traceback__))
    (note,) = ours.__notes__
    assert name in note
    cause, context = ours.__cause__, ours.__context__
    assert type(cause) is type(plain.__cause__)
    assert is_shortened(own_frames(cause), own_frames(plain.__cause__))
    assert type(context) is type(plain.__context__)


def printed(fn: Callable[[Any], Any], x: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Python prints for an error of a script that calls a function."""
    try:
        exec(compile("fn(x)", "script.py", "exec"), {"fn": fn, "x": x})
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        text = io.StringIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", text)
            sys.__excepthook__(type(error), error, error.__traceback__)
        return text.getvalue().splitlines()
    raise AssertionError("it raises nothing")


def deep(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that calls another one, six frames deep."""

    def first(x: Any) -> Any:
        return second(x)

    def second(x: Any) -> Any:
        y = third(x)
        return y

    def third(x: Any) -> Any:
        return torch.nn.Identity()(fourth(x))

    def fourth(x: Any) -> Any:
        return Around(fifth)(x)

    def fifth(x: Any) -> Any:
        y = f(x)
        return y

    return first


CHAINED = ("raise from", "raise in an except", "a group")
SPECS = (P("dp", "tp"),)
READERS: dict[str, Callable[[Any, Any], Callable[[Any], Any]]] = {
    "jit, aten": lambda f, _: sf.jit(f, backend="aten"),
    "jit": lambda f, _: sf.jit(f),
    "shard": lambda f, mesh: sf.shard(f, mesh, SPECS),
    "grad": lambda f, mesh: sf.shard(sf.grad(lambda x: f(x).sum()), mesh, SPECS),
    "shard_map": lambda f, mesh: sf.shard_map(f, mesh, (P(None, "tp"),), P(None, "tp")),
    "scan": lambda f, mesh: sf.shard(
        lambda x: sf.scan(lambda c, _: (f(c), None), x, length=2), mesh, SPECS
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_printed_is_short(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = WRONG if reader == "jit, aten" else INSIDE
    with simulated(dp=2, tp=2) as mesh:
        for name in names:
            fn = READERS[reader](deep(WRONG[name]), mesh)
            lines = printed(fn, X, monkeypatch)
            text = "\n".join(lines)
            assert not re.search("/torch/|/shardfn/", text), text
            note = f"shardfn: raised inside {re.escape(fn.__name__)}, \\d of its frames are hidden"
            assert len(re.findall(note, text)) == 1, text
            frames = sum('  File "' in line for line in lines)
            if name in CHAINED:  # each of their errors has two frames of the function at most
                assert frames <= 6, text
                continue
            plain = traceback.format_exception_only(error_of(lambda f=WRONG[name]: f(X)))
            own = "".join(plain).splitlines()
            if not (name.startswith("shapes") and reader == "shard_map"):  # of a rank's shard
                assert lines[-1 - len(own) : -1] == own
            assert len(lines) <= LINES - 1 + len(own), text
            assert frames >= 3, text


SCRIPT = """
import torch
import shardfn as sf

def main():
    sf.jit(first, backend="aten")(torch.ones(3))

def first(x):
    return second(x)

def second(x):
    return third(x)

def third(x):
    return fourth(x)

def fourth(x):
    return x.nope

main()
"""
PRINTED = """Traceback (most recent call last):
  File "{0}", line 20, in <module>
    main()
  File "{0}", line 6, in main
    sf.jit(first, backend="aten")(torch.ones(3))
  File "{0}", line 9, in first
    return second(x)
  File "{0}", line 18, in fourth
    return x.nope
           ^^^^^^
AttributeError: 'Tensor' object has no attribute 'nope'
shardfn: raised inside jit(first), 2 of its frames are hidden; SHARDFN_TRACEBACK=full shows all \
frames
"""


def test_of_a_script(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, file], check=False, capture_output=True, text=True, env=os.environ
    )
    carets = re.compile(r"\n +[\^~]+(?=\n)")
    assert carets.sub("", run.stderr) == carets.sub("", PRINTED.format(file))
    assert len(run.stderr.splitlines()) <= LINES


def test_a_misspelled_name_of_shardfn() -> None:
    found = error_of(lambda: sf.jit(lambda x: sf.scann(x), backend="aten")(X))
    text = "module 'shardfn' has no attribute 'scann'"
    assert (type(found), str(found)) == (AttributeError, text)
    assert (found.name, found.obj) == ("scann", sf)  # from which Python finds a similar name


def test_errors_that_led_to_another_have_no_carets_under_whole_lines() -> None:
    ours = error_of(lambda: sf.jit(WRONG["raise from"], backend="aten")(X))
    text = "".join(traceback.format_exception(ours))
    assert 'return look_up(x, "b")\n  File' in text


def test_a_compilers_error_is_that_of_the_op() -> None:
    ours = error_of(lambda: sf.jit(WRONG["a dim"], backend="inductor")(X))
    check(error_of(lambda: WRONG["a dim"](X)), ours, "jit(")


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_what_the_plain_function_raises(name: str) -> None:
    f = WRONG[name]
    plain = error_of(lambda: f(X))
    check(plain, error_of(lambda: sf.jit(f, backend="aten")(X)), "jit(")


AROUND: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "grad": lambda f: sf.grad(lambda x: f(x).sum()),
    "vmap": sf.vmap,
    "checkpoint": sf.checkpoint,
    "jvp": lambda f: lambda x: sf.jvp(f, (x,), (x,)),
    "hessian": lambda f: sf.hessian(lambda x: f(x).sum()),
    "scan": lambda f: lambda x: sf.scan(lambda c, _: (f(c), None), x, length=2),
    "map": lambda f: lambda x: sf.map(f, x),
    "cond": lambda f: lambda x: sf.cond(x.sum() > 0, f, lambda x: x, x),
    "the other branch": lambda f: lambda x: sf.cond(x.sum() > 0, lambda x: x, f, x),
    "while_loop": lambda f: lambda x: sf.while_loop(lambda x: x.sum() > 0, f, x),
    "accumulate": lambda f: lambda x: sf.accumulate(lambda w, x: f(x).sum(), 3)(x, x),
    "jit of grad": lambda f: sf.jit(sf.grad(lambda x: f(x).sum()), backend="aten"),
    "torch.func": lambda f: sf.jit(torch.func.grad(lambda x: f(x).sum()), backend="aten"),
    "compose": lambda f: sf.compose(sf.checkpoint, sf.vmap)(f),
    "functionalize": lambda f: lambda x: sf.jit(sf.functionalize(Around(f))[0])({}, {}, x),
}


class Around(torch.nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)


INSIDE = (
    *("a key", "an attribute of a tensor", "a name", "shapes of a product", "ValueError"),
    *("a branch on many elements", "what is recomputed"),
)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", INSIDE)
def test_under_every_transform(around: str, name: str) -> None:
    f = WRONG[name]
    x = X.expand(3, 3, 4) if around in ("vmap", "map", "compose") else X
    ours = error_of(lambda: AROUND[around](f)(x))
    plain = error_of(lambda: f(X))
    if (around, name) == ("accumulate", "shapes of a product"):  # of a microbatch
        plain = error_of(lambda: f(X[:1]))
    assert (type(ours), str(ours)) == (type(plain), str(plain))
    assert own_frames(ours)[-1] == own_frames(plain)[-1]
    files = [frame.filename for frame in traceback.extract_tb(ours.__traceback__)]
    assert not any("/torch/" in file or "/shardfn/" in file for file in files), files
    assert len(ours.__notes__) == 1


@pytest.mark.parametrize("name", ["a key", "a dim", "dtypes of a product", "ValueError"])
def test_on_a_mesh_and_at_each_stage(name: str) -> None:
    f = WRONG[name]
    plain = error_of(lambda: f(X))
    with simulated(dp=2, tp=2) as mesh:
        sharded = sf.shard(f, mesh, (P("dp", "tp"),))
        check(plain, error_of(lambda: sharded(X)), "shard(")
        if name in ("a key", "ValueError"):
            check(plain, error_of(lambda: sharded.trace(X)), "shard(")
            check(plain, error_of(lambda: sharded.lower(X)), "shard(")
            inside = sf.shard_map(f, mesh, (P(None, "tp"),), P(None, "tp"))
            check(plain, error_of(lambda: inside(X)), "shard_map(")


@sf.custom_vjp
def ruled(x: Any) -> Any:
    return x.sin()


@sf.custom_vjp
def ruled_too(x: Any) -> Any:
    return x.sin()


@sf.custom_jvp
def ruled_forward(x: Any) -> Any:
    return x.sin()


ruled.defvjp(lambda x: (look_up(x, "b"), x), lambda x, g: (g,))
ruled_too.defvjp(lambda x: (x.sin(), x), lambda x, g: (look_up(g, "b"),))
ruled_forward.defjvp(lambda xs, ts: (look_up(xs[0], "b"), ts[0]))


@pytest.mark.parametrize("fn", [ruled, ruled_too, ruled_forward])
def test_in_a_custom_rule(fn: Any) -> None:
    derive = sf.grad(lambda x: fn(x).sum())
    for call in (derive, sf.jit(derive, backend="aten"), sf.vmap(derive)):
        ours = error_of(lambda call=call: call(X))
        assert (type(ours), str(ours)) == (KeyError, "'b'")
        assert own_frames(ours)[-1] == own_frames(error_of(lambda: look_up(X, "b")))[-1]
        assert len(ours.__notes__) == 1


def test_a_caught_exception_changes_nothing() -> None:
    def f(x: Any) -> Any:
        try:
            x = look_up(x, "b")
        except KeyError as error:
            x = x * len(error.args)
        try:
            raise LookupError(2)
        except LookupError as error:
            return x * error.args[0]

    assert_close(sf.jit(f, backend="aten")(X), f(X))


def test_a_fault_of_shardfns_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any) -> None:
        raise RuntimeError("no such node")

    monkeypatch.setattr("shardfn.capture.annotations.attach", broken)
    error = error_of(lambda: sf.jit(lambda x: x + 1, backend="aten")(X))
    assert (type(error), str(error)) == (RuntimeError, "no such node")
    assert "this is a bug in shardfn" in error.__notes__[0]
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    assert any("/shardfn/" in file for file in frames), "its frames stay"


def test_arguments_that_fit_no_public_function_are_no_fault_of_shardfns() -> None:
    wrong: list[Callable[[], Any]] = [
        lambda: sf.vjp(),  # type: ignore[call-arg]
        lambda: sf.scan(look_up),  # type: ignore[call-arg]
        lambda: sf.lock(look_up),  # type: ignore[call-arg]
        lambda: sf.check(look_up, X),
    ]
    for call in wrong:
        error = error_of(call)
        assert "missing" in str(error)
        assert not getattr(error, "__notes__", [])


def test_all_frames_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFN_TRACEBACK", "full")
    error = error_of(lambda: sf.jit(lambda x: look_up(x, "b"), backend="aten")(X))
    assert any("/shardfn/" in f.filename for f in traceback.extract_tb(error.__traceback__))


def test_a_refusal_is_short() -> None:
    error = error_of(lambda: sf.jit(lambda x: x if x.sum() > 0 else -x)(X))
    assert isinstance(error, sf.CaptureError)
    assert len("".join(traceback.format_exception(error)).splitlines()) <= LINES


def test_a_line_of_a_notebook_is_that_of_its_cell() -> None:
    cells: dict[str, Any] = {}
    code = "def f(x):\n    return x if x.sum() > 0 else -x\n"
    exec(compile(code, "<ipython-input-10-5e1f7>", "exec"), cells)
    error = error_of(lambda: sf.jit(cells["f"])(X))
    assert "at: Cell In[10], line 2\n" in str(error)


def test_what_a_run_to_find_an_error_stores_is_taken_back() -> None:
    seen: list[Any] = []
    net = torch.nn.Linear(4, 4)

    def f(x: Any) -> Any:
        seen.append(x)
        net.last = net(x)
        return look_up(x, "b")

    error = error_of(lambda: sf.jit(f, backend="aten")(X))
    assert isinstance(error, KeyError)
    assert not seen and not hasattr(net, "last")


def test_a_run_to_find_an_error_writes_to_no_array() -> None:
    array = np.ones(3)

    def f(x: Any) -> Any:
        array[1] = 7.0
        return look_up(x, "b")

    for call in (sf.jit(f, backend="aten"), sf.grad(f)):
        assert isinstance(error_of(lambda call=call: call(X)), KeyError)
        assert array.tolist() == [1.0, 1.0, 1.0]


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda held: held.add_(1),
    "mul_": lambda held: torch.mul(held, 2, out=held),
    "a row": lambda held: held[0].sub_(1),
    "lists": lambda held: torch._foreach_add_([held], 1),
    "fill_": lambda held: held.data.fill_(5),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("transform", [lambda f: sf.jit(f, backend="aten"), sf.vmap])
def test_a_run_to_find_an_error_writes_to_no_tensor(transform: Any, name: str) -> None:
    held = torch.ones(2, 3)

    def f(x: Any) -> Any:
        WRITES[name](held)
        return look_up(x, "b")

    assert isinstance(error_of(lambda: transform(f)(X)), KeyError)
    assert torch.equal(held, torch.ones(2, 3))


def test_a_compiled_function_is_compiled_after_a_capture_that_failed() -> None:
    """The search for the user's error runs the function, and with it what torch.compile wraps."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: x * 2, backend=backend)
    with pytest.raises(ZeroDivisionError):
        sf.jit(lambda x: doubled(x) * (1 / (x.shape[0] - 3)), backend="aten")(torch.ones(3))
    assert not graphs
    torch.testing.assert_close(doubled(torch.ones(3)), torch.full((3,), 2.0))
    assert len(graphs) == 1
