"""Each place of torch that shardfn changes, taken away in turn: programs are right, or refused by
an error that names torch's version and the place. None blames the user's function. What shardfn
calls of torch and leaves as it is takes the arguments that it gets.

One program is tried without each place; all ten without each place are a sweep.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn._compat import patches, patching, versions
from shardfn._compat.fakes import answers
from shardfn.errors import TorchVersionError

G = torch.Generator().manual_seed(0)
X = torch.randn(6, 3, dtype=torch.float64, generator=G)
W = torch.randn(3, 3, dtype=torch.float64, generator=G)
PLACES = {place: row for row in patches.rows_of_all() for place in (*row.calls, *row.places)}
DUE = [place for place in PLACES if patching.is_due(place)]
COMPILING = [
    row for stage in ("patterns", "loading", "compilation") for row in patches.PATCHES[stage]
]


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.erf(x @ w).pow(2).mean()


def gradient() -> tuple[Any, Any]:
    return sf.jit(sf.grad(loss), backend="aten")(W, X), torch.func.grad(loss)(W, X)


def compiled() -> tuple[Any, Any]:
    return sf.jit(sf.grad(loss), backend="inductor")(W, X), torch.func.grad(loss)(W, X)


def tangent() -> tuple[Any, Any]:
    fn = lambda w: torch.where(w > 0, w, torch.zeros_like(w)).sum()
    return sf.jvp(fn, (W,), (W,)), torch.func.jvp(fn, (W,), (W,))


def sharded() -> tuple[Any, Any]:
    with simulated(dp=4) as mesh:
        step = sf.shard(sf.grad(loss), mesh, (P(), P("dp")), backend="aten")
        return sf.full(step(W, X)), torch.func.grad(loss)(W, X)


def of_dtensors() -> tuple[Any, Any]:
    with simulated(dp=2) as mesh:

        def fn(x: torch.Tensor) -> torch.Tensor:
            d = dt.distribute_tensor(x, mesh, [dt.Shard(0)])
            return (d * mesh.size()).sum().full_tensor()

        return sf.full(sf.jit(fn, backend="aten")(X)), 2 * X.sum()


def of_a_module() -> tuple[Any, Any]:
    lstm = torch.nn.LSTM(3, 3, batch_first=True, dtype=torch.float64)
    forward, params, buffers = sf.functionalize(lstm)
    fn = lambda p: forward(p, buffers, X[None])[0][0].sum()
    want = torch.autograd.grad(lstm(X[None])[0].sum(), [*lstm.parameters()])
    return [*sf.grad(fn)(params).values()], [*want]


def looped() -> tuple[Any, Any]:
    def body(total: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total + X[t], total.sum()

    return sf.scan(body, torch.zeros(3, dtype=torch.float64), torch.arange(6))[0], X.sum(0)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3  # its own, not that of the forward


def of_a_function() -> tuple[Any, Any]:
    return sf.grad(lambda x: Twice.apply(x).sum())(X), torch.full_like(X, 3)


def reshaped() -> tuple[Any, Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.t_()
        return y.reshape(y.shape[0], -1).sum(1) + y.size(0)

    return sf.jit(fn, backend="aten")(X), fn(X)


def distributed_eagerly() -> tuple[Any, Any]:
    with simulated(dp=2) as mesh:
        module = torch.nn.Linear(3, 3, dtype=torch.float64)
        want = torch.autograd.grad(module(X).sum(), module.weight)[0]
        fully_shard(module, mesh=mesh)
        module(X).sum().backward()
        return module.weight.grad.full_tensor(), want  # type: ignore[union-attr]


PROGRAMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    fn.__name__: fn
    for fn in (
        gradient,
        compiled,
        tangent,
        sharded,
        of_dtensors,
        of_a_module,
        looped,
        of_a_function,
        reshaped,
        distributed_eagerly,
    )
}


@pytest.fixture(autouse=True)
def looked_at_again() -> Iterator[None]:
    patches.require_places.cache_clear()
    yield
    patches.require_places.cache_clear()


def take_away(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    resolve = patching.resolve
    monkeypatch.setattr(patching, "resolve", lambda x: None if x == place else resolve(x))
    sf.clear_cache()


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_every_place_it_is_right(name: str) -> None:
    got, want = PROGRAMS[name]()
    assert_close(got, want)


def assert_right_or_refused(place: str, name: str) -> None:
    """A program without a place is right, or refused by an error that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, want = PROGRAMS[name]()
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        assert place in text and torch.__version__ in text, (name, text)
        assert isinstance(error, TorchVersionError) or PLACES[place].on_missing == "degrade"
    else:
        assert_close(got, want, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("place", DUE)
def test_without_a_place_a_gradient_is_right_or_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    take_away(monkeypatch, place)
    assert_right_or_refused(place, "gradient")


@pytest.mark.parametrize("place", DUE)
def test_without_a_place_programs_are_right_or_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    take_away(monkeypatch, place)
    for name in PROGRAMS:
        # Inductor's kernels are as before where only a capture lacks a place.
        if name != "compiled" or PLACES[place] in COMPILING:
            assert_right_or_refused(place, name)


REFUSED = next(p for p in DUE if PLACES[p].on_missing == "refuse")
DEGRADED = "torch._subclasses.fake_tensor:FakeTensorMode._cached_dispatch_impl"


def test_the_error_names_versions_the_place_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, REFUSED)
    with pytest.raises(TorchVersionError) as caught:
        gradient()
    first, *lines = str(caught.value).split("\n")
    wanted = f"knows torch {versions.known()}; this torch lacks {REFUSED}: {PLACES[REFUSED].lost}"
    assert first == f"shardfn {versions.VERSION} {wanted}"
    assert lines[0] == f"  got: torch {torch.__version__}"
    assert lines[-1].startswith(f"  try: pip install '{versions.requirement()}'")


def test_a_place_that_goes_after_the_first_capture_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradient()
    take_away(monkeypatch, REFUSED)
    with pytest.raises(TorchVersionError, match=f"lacks {REFUSED}"):
        gradient()


def test_a_place_with_other_arguments_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeTensorMode._cached_dispatch_impl

    def changed(self: Any, func: Any, types: Any, args: Any, kwargs: Any, more: Any = None) -> Any:
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "_cached_dispatch_impl", changed)
    sf.clear_cache()
    got, want = gradient()
    assert_close(got, want)
    assert not answers._ANSWERS and any(DEGRADED in text for text in patches.degraded())


def test_who_wants_any_torch_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, REFUSED)
    monkeypatch.setenv(versions.ANY, "1")
    with pytest.warns(UserWarning, match=f"this torch lacks {REFUSED}"):
        gradient()


@pytest.mark.parametrize("running", [(2, 10), (2, 16), (3, 0), ()])
def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch, running: Any) -> None:
    monkeypatch.setattr(versions, "RUNNING", running)
    versions.require_known.cache_clear()
    sf.clear_cache()
    try:
        with pytest.raises(TorchVersionError, match="this is torch") as caught:
            gradient()
        assert caught.value.fix and versions.ANY in caught.value.fix
        monkeypatch.setenv(versions.ANY, "1")
        with pytest.warns(UserWarning, match="this is torch"):
            got, want = gradient()
        assert_close(got, want)
    finally:
        versions.require_known.cache_clear()


def test_an_error_of_a_torch_without_a_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, DEGRADED)
    with pytest.raises(ValueError, match="mine") as caught:
        sf.jit(mine, backend="aten")(X)
    assert any(DEGRADED in note and torch.__version__ in note for note in caught.value.__notes__)


def mine(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


def unfit_calls(source: str) -> tuple[int, list[str]]:
    """Count the calls of torch's Python functions, and list those that torch's signature refuses.

    An import that torch lacks is an ImportError.
    """
    nodes = [*ast.walk(ast.parse(source))]
    names: dict[str, Any] = {"__builtins__": {"__import__": __import__}}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text = ast.unparse(node)
            if re.match(r"(import|from) torch\b", text):
                exec(text, names)
    checked, unfit = 0, []
    for node in nodes:
        if not isinstance(node, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(node.func)):
            continue
        starred = [x for x in node.args if isinstance(x, ast.Starred)]
        named = {x.arg: x for x in node.keywords if x.arg is not None}
        if starred or len(named) < len(node.keywords):
            continue
        try:
            signature = inspect.signature(eval(ast.unparse(node.func), names))
        except (NameError, AttributeError, TypeError, ValueError):
            continue  # not of torch, of another version of it, or of C
        checked += 1
        try:
            signature.bind(*node.args, **named)
        except TypeError as error:
            unfit.append(f"line {node.lineno}: {ast.unparse(node)}: {error}")
    return checked, unfit


def test_calls_of_torchs_own_functions_fit_its_signatures() -> None:
    checked, unfit = 0, {}
    for path in Path(patches.__file__).parent.rglob("*.py"):
        count, wrong = unfit_calls(path.read_text())
        checked += count
        if wrong:
            unfit[path.name] = wrong
    assert unfit == {} and checked > 100


def test_a_call_that_does_not_fit_is_listed() -> None:
    source = "from torch import nn\nnn.Linear(2, 3)\nnn.Linear(2)\nnn.Linear(*x)\nlen(x)"
    wrong = "line 3: nn.Linear(2): missing a required argument: 'out_features'"
    assert unfit_calls(source) == (2, [wrong])
