"""`sf.debug`: what its functions take, what they refuse, and Python's own as these."""

from __future__ import annotations

import functools
import logging
import pprint
import sys
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import shardfn as sf
from shardfn import P

X = torch.arange(3.0)


def run(fn: Any, *args: Any) -> Any:
    return sf.jit(fn, backend="aten")(*args)


def test_print_takes_trees_names_and_formats(capsys: Any) -> None:
    def f(x: Tensor) -> Tensor:
        sf.debug.print("{} {n:.2f} {s}", {"a": (x, 1)}, n=x.sum(), s=x.shape)
        return x

    run(f, X)
    assert capsys.readouterr().out == "{'a': (tensor([0., 1., 2.]), 1)} 3.00 torch.Size([3])\n"


def test_print_of_constants_happens_at_capture_and_says_so(capsys: Any) -> None:
    def f(x: Tensor) -> Tensor:
        for i in range(2):
            print("layer", i)
        return x

    g = sf.jit(f, backend="aten")
    g(X), g(X)
    note = "(printed when jit(f) is captured, because no tensor is printed)"
    assert capsys.readouterr().out == f"layer 0 {note}\nlayer 1 {note}\n"


def test_python_prints_texts_of_tensors(capsys: Any) -> None:
    def f(x: Tensor) -> Tensor:
        print("a", x.sum(), sep="=", end=";\n")
        print(f"b {x.sum().item():.1f} {x}")
        print("c {:.1f}".format(x.mean()), str(x))  # noqa: UP032
        print("d %s %.2f%%" % (x, x.sum()))  # noqa: UP031
        return x

    run(f, X)
    shown = capsys.readouterr().out.splitlines()
    text = str(X)
    assert shown == ["a=tensor(3.);", f"b 3.0 {text}", f"c 1.0 {text}", f"d {text} 3.00%"]


class Pair(NamedTuple):
    x: Any
    k: int


def show_objects(x: Tensor) -> Tensor:
    total = x.sum()
    print(x.shape, x[1:].size(), [x.size()], {"s": x.shape}, tuple(x.shape), total)
    print(f"{x.shape} {total}", "%s %s" % (x.size(), total))  # noqa: UP031
    print(x.numpy(), [x.numpy() + 1], x.numpy().shape)
    print(x.max(0), Pair(x, 3))
    print([x.dtype, x.device], x.dtype, slice(1, 2), total)
    return x


class Objects(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print(x.size(), [x.shape, x.dtype], Pair(x, 3), x.sum())
        return x


def test_python_prints_ordered_dicts_as_plain_python_does(capsys: Any) -> None:
    def fn(x: torch.Tensor, d: Any) -> torch.Tensor:
        print(OrderedDict(b=x, a=[x[0], 1]), d)
        return x * 2

    x = torch.arange(3.0)
    fn(x, OrderedDict(c=x))
    wanted = capsys.readouterr().out
    sf.jit(fn, backend="aten")(x, OrderedDict(c=x))
    assert capsys.readouterr().out == wanted


def test_python_prints_sizes_arrays_and_named_tuples_as_plain_python_does(capsys: Any) -> None:
    fn, params, buffers = sf.functionalize(Objects())
    for plain, ours in (
        (show_objects, show_objects),
        (Objects(), lambda x: fn(params, buffers, x)[0]),
    ):
        plain(X)
        wanted = capsys.readouterr().out
        run(ours, X)
        assert capsys.readouterr().out == wanted
        with sf.fake_world(3):
            sf.shard(ours, sf.make_mesh((3,), ("dp",)), P("dp"), backend="aten")(X)
        assert capsys.readouterr().out == wanted


def show_pretty(x: Tensor) -> Tensor:
    pprint.pprint({"x": x, "sizes": [x.shape]}, width=20)
    pprint.pp([x, 1])
    return x


class Pretty(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pprint.pprint({"x": x})
        return x


def test_rich_prints_the_values_of_each_call(capsys: Any) -> None:
    rich = pytest.importorskip("rich")

    def f(x: Tensor) -> Tensor:
        rich.print("x", x, [x.shape])
        return x

    step = sf.jit(f, backend="aten")
    for x in (X, X + 1):
        f(x)
        wanted = capsys.readouterr().out
        step(x)
        assert capsys.readouterr().out == wanted


def test_pprint_prints_the_values_of_each_call(capsys: Any) -> None:
    fn, params, buffers = sf.functionalize(Pretty())
    for plain, ours in (
        (show_pretty, show_pretty),
        (Pretty(), lambda x: fn(params, buffers, x)[0]),
    ):
        step = sf.jit(ours, backend="aten")
        for x in (X, X + 1):
            plain(x)
            wanted = capsys.readouterr().out
            step(x)
            assert capsys.readouterr().out == wanted


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_loggers_and_warnings_show_values(monkeypatch: Any) -> None:
    log, messages = logging.getLogger("of_a_test"), Messages()
    monkeypatch.setattr(logging.root, "handlers", [messages])
    monkeypatch.setattr(logging.root, "level", logging.INFO)

    def f(x: Tensor) -> Tensor:
        if log.isEnabledFor(logging.INFO):
            log.info("mean %s", x.mean())
        log.log(logging.WARNING, "once")
        logging.error("root %s", x.sum())
        warnings.warn(f"sum {x.sum()}", RuntimeWarning, stacklevel=2)
        return x

    with pytest.warns(RuntimeWarning, match=r"sum 3\.0") as caught:
        run(f, X)
    assert caught[0].filename == __file__
    note = "once (printed when jit(f) is captured, because no tensor is printed)"
    assert messages.texts == [note, "mean tensor(1.)", "root tensor(3.)"]


def test_a_method_that_a_library_adds_to_loggers_is_read(monkeypatch: Any) -> None:
    """As transformers adds `warning_once`, which a model's forward calls."""

    @functools.cache
    def warning_once(self: logging.Logger, *args: Any) -> None:
        self.warning(*args)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    log: Any = logging.getLogger("of_a_test")
    messages = Messages()
    monkeypatch.setattr(logging.root, "handlers", [messages])

    def f(x: Tensor) -> Tensor:
        log.warning_once("careful with %s", "this")
        return x

    run(f, X)
    assert messages.texts == [
        "careful with this (printed when jit(f) is captured, because no tensor is printed)"
    ]
    with pytest.raises(sf.CaptureError, match="configures the logger 'of_a_test'"):
        run(lambda x: (log.setLevel(10), x)[1], X)


class Loud(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.eye_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        print("y", y.sum())
        print("shape", tuple(y.shape))
        sf.debug.print("again {}", y.sum())
        return y


def test_a_module_that_is_run_shows_values(capsys: Any) -> None:
    fn, params, buffers = sf.functionalize(Loud())
    with torch.no_grad():
        run(lambda p, x: fn(p, buffers, x)[0], params, X)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("shape (3,) (printed when ")
    assert shown[1:] == ["y tensor(3.)", "again 3.0"]


def test_callback_gets_values_and_constants_and_stages_once() -> None:
    seen: list[Any] = []

    def f(x: Tensor) -> Tensor:
        sf.debug.callback(seen.append, x)
        sf.debug.callback(lambda y, k, *, tag: seen.append((float(y), k, tag)), x.sum(), 3, tag="t")
        return x

    g = sf.jit(f, backend="aten")
    g(X), g(X + 1)
    assert [type(y) for y in seen] == [Tensor, tuple] * 2
    assert seen[1::2] == [(3.0, 3, "t"), (6.0, 3, "t")]
    assert "2 earlier" not in str(sf.explain_retrace(g, X))


def test_callback_may_write_to_what_it_gets() -> None:
    y = run(lambda x: (sf.debug.callback(lambda z: z.zero_(), x), x + 0)[1], X)
    assert y.tolist() == [0, 1, 2] and X.tolist() == [0, 1, 2]


def test_breakpoint_stops_with_the_values_of_all_ranks(monkeypatch: Any) -> None:
    stops: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1)))

    def local(x: Tensor, k: int) -> Tensor:
        y = 2 * x
        sf.debug.breakpoint(more=y + k)
        breakpoint()
        return sf.psum(y, "dp")

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        sf.shard_map(lambda x: local(x, 5), mesh, P("dp"), P())(torch.arange(4.0))
    first, second = stops
    names = first.f_locals
    assert names["y"].tolist() == [0, 2] and names["k"] == 5 and names["more"].tolist() == [5, 7]
    assert [rank["y"].tolist() for rank in names["ranks"]] == [[0, 2], [4, 6]]
    assert first.f_code.co_filename == __file__ and second.f_lineno == first.f_lineno + 1


def test_a_program_without_debug_is_the_same_and_its_price_is_shown() -> None:
    def step(x: Tensor, loud: bool) -> Tensor:
        if loud:
            sf.debug.print("{}", x)
        return x * 2

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        quiet = sf.shard(lambda x: step(x, False), mesh, P("dp"), implicit_comm="error")
        loud = sf.shard(lambda x: step(x, True), mesh, P("dp"), implicit_comm="error")
        assert len(sf.explain(quiet, torch.ones(4)).collectives) == 0
        assert [c.kind for c in sf.explain(loud, torch.ones(4)).collectives] == ["all_gather"]


def made_inside(x: Tensor) -> Tensor:
    y = x * 2
    sf.debug.callback(lambda: print(y))
    return x


WRONG = {
    "fmt: it is a tensor": lambda x: sf.debug.print(x),
    r"does not fit 1 positional arguments": lambda x: sf.debug.print("{} {}", x),
    "fn: it is a tensor": lambda x: sf.debug.callback(x),
    "ranks: it is 'some'": lambda x: sf.debug.print("{}", x, ranks="some"),
    "closes over y, which the captured function creates": made_inside,
    "print is called with file=": lambda x: print(x, file=logging),
    "a number that is computed from a tensor's value": lambda x: print(x.argmax().item() << 1),
}


@pytest.mark.parametrize("text", WRONG)
def test_mistakes_are_refused_by_name(text: str) -> None:
    with pytest.raises(sf.ShardError, match=text) as caught:
        run(lambda x: (WRONG[text](x), x)[1], X)
    assert f"at: {__file__}" in str(caught.value)


def test_a_program_that_shows_values_is_not_saved(tmp_path: Any) -> None:
    g = sf.jit(lambda x: (sf.debug.print("{}", x), x)[1], backend="aten")
    with pytest.raises(sf.ShardError, match="debug"):
        g.compile(X).save(tmp_path / "program")


def test_outside_of_a_capture_values_are_shown_at_once(capsys: Any) -> None:
    sf.debug.print("{} {n}", X, n=4)
    seen: list[Any] = []
    torch.func.vmap(lambda x: (sf.debug.callback(seen.append, x), x)[1])(X)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        sf.debug.print("{}", sf.distribute(torch.ones(4), mesh, P("dp")))
    assert capsys.readouterr().out == "tensor([0., 1., 2.]) 4\ntensor([1., 1., 1., 1.])\n"
    assert [float(x) for x in seen] == [0, 1, 2]
