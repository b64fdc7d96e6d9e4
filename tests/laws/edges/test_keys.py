"""Law: a transformed function answers as the plain function does now, whatever has changed.

What may change: a constant argument, down to its type and its sign; what the function closes over;
torch's settings; the world.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from stagings import counts
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf

X = torch.arange(1.0, 4.0, dtype=torch.float64)


class Mode(enum.Enum):
    A, B = "a", "b"


class Name(enum.StrEnum):
    A, B = "a", "b"


class Lying:
    """Equal to every other one, whatever it holds."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lying)

    def __hash__(self) -> int:
        return 0


def told(k: Any) -> float:
    """A number that tells a constant from those that Python takes for equal."""
    if isinstance(k, Lying):
        return k.k
    if isinstance(k, complex):
        return 50.0 + 2 * math.copysign(1.0, k.real) + math.copysign(1.0, k.imag)
    if isinstance(k, bool):
        return 10.0 + k
    if isinstance(k, float):
        return 20.0 if math.isnan(k) else 22.0 + math.copysign(1.0, k) * (1 + abs(k))
    if isinstance(k, int):
        return 30.0 + k
    if isinstance(k, torch.dtype):
        return 40.0 + (k is torch.float64)
    if k is None or k is Mode.A or k is Mode.B:
        return 60.0 if k is None else 61.0 + (k is Mode.B)
    return 70.0 + len(k)


PLAIN = [
    0.0,
    -0.0,
    0,
    False,
    True,
    1,
    1.0,
    math.nan,
    float("nan"),
    2,
    2.0,
    0j,
    complex(0.0, -0.0),
    complex(-0.0, 0.0),
]
PLAIN += ["a", "ab", None, torch.float32, torch.float64]
STATIC = [*PLAIN, Mode.A, Mode.B, Lying(1.0), Lying(2.0), Lying(-0.0), Lying(0.0)]


def positional(k: Any) -> tuple[Any, dict[str, Any]]:
    return (X, k), {}


def by_name(k: Any) -> tuple[Any, dict[str, Any]]:
    return (X,), {"k": k}


def in_a_tree(k: Any) -> tuple[Any, dict[str, Any]]:
    return (X, {"deep": [(k, X)]}), {}


def scaled(x: torch.Tensor, k: Any) -> torch.Tensor:
    while isinstance(k, (dict, list, tuple)):
        k = k["deep"] if isinstance(k, dict) else k[0]
    return x * told(k)


def same(got: Any, wanted: Any) -> None:
    assert got.dtype == wanted.dtype
    assert got.device == wanted.device
    if got.device.type != "meta":
        assert_close(got, wanted, rtol=1e-10, atol=0, equal_nan=True)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: sf.jit(f, backend="aten"),
    "vmap": lambda f: sf.vmap(f, in_axes=(0, None)),
    "jit of grad": lambda f: sf.jit(sf.grad(lambda x, k: f(x, k).sum()), backend="aten"),
}
PLAINLY: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: f,
    "vmap": lambda f: f,
    "jit of grad": lambda f: torch.func.grad(lambda x, k: f(x, k).sum()),
}


@examples(8)
@given(
    st.sampled_from(list(TRANSFORMS)),
    st.sampled_from([positional, in_a_tree]),
    st.lists(st.sampled_from(PLAIN), min_size=2, max_size=4),
)
def test_a_constant_counts_to_its_type_and_its_sign(
    name: str, call: Any, values: list[Any]
) -> None:
    fn, plain = TRANSFORMS[name](scaled), PLAINLY[name](scaled)
    for k in values:
        args, kwargs = call(k)
        same(fn(*args, **kwargs), plain(*args, **kwargs))


@examples(8)
@given(st.lists(st.sampled_from(STATIC), min_size=2, max_size=4), st.booleans())
def test_a_static_argument_or_a_partial_counts_so_too(values: list[Any], partial: bool) -> None:
    fn = sf.jit(scaled, backend="aten", static_argnums=1)
    for k in values:
        got = sf.jit(functools.partial(scaled, k=k), backend="aten")(X) if partial else fn(X, k)
        same(got, scaled(X, k))


@pytest.mark.parametrize(
    "pair", [(0.0, -0.0), (1, True), (1, 1.0), (0j, -0j), ("a", Name.A)], ids=str
)
def test_each_pair_that_python_takes_for_equal(pair: tuple[Any, Any]) -> None:
    assert pair[0] == pair[1]
    fn = sf.jit(
        lambda x, k: x * (told(k) + 100 * isinstance(k, Name)), backend="aten", static_argnums=1
    )
    other = sf.jit(
        lambda x, k: x * (told(k) + 100 * isinstance(k, Name)), backend="aten", static_argnums=1
    )
    assert not torch.equal(fn(X, pair[0]), fn(X, pair[1]))
    assert torch.equal(fn(X, pair[1]), other(X, pair[1]))


def test_nan_is_itself_and_captured_once() -> None:
    fn = sf.jit(lambda x, k: x * k, backend="aten")
    fn(X, float("nan"))
    before = counts["captures"]
    assert torch.isnan(fn(X, float("nan"))).all()
    assert counts["captures"] == before


def test_a_static_object_that_changes_is_captured_again() -> None:
    fn, k = sf.jit(scaled, backend="aten", static_argnums=1), Lying(2.0)
    same(fn(X, k), X * 2)
    k.k = 3.0
    same(fn(X, k), X * 3)


@examples(8)
@given(
    st.sampled_from(PLAIN),
    st.sampled_from(PLAIN),
    st.sampled_from([positional, by_name, in_a_tree]),
)
def test_a_compiled_program_takes_its_own_constants_and_refuses_others(
    a: Any, b: Any, call: Any
) -> None:
    args, kwargs = call(a)
    compiled = sf.jit(scaled, backend="aten").compile(*args, **kwargs)
    same(compiled(*args, **kwargs), scaled(*args, **kwargs))
    args, kwargs = call(b)
    if repr(a) == repr(b):
        same(compiled(*args, **kwargs), scaled(*args, **kwargs))
        return
    with pytest.raises(
        sf.TreeError,
        match="differ from those that the program was compiled for\n  k.*, the program is for ",
    ) as caught:
        compiled(*args, **kwargs)
    assert "call the transformed function itself" in caught.value.fix


# Places that a function reads: each gives what reads it, and what puts a number there.
Place = tuple[Callable[[torch.Tensor], Any], Callable[[Any], None]]
K = 2.0
helper = math.sqrt


class Config:
    shared = 2.0

    def __init__(self) -> None:
        self.k, self.table, self.row = 2.0, {"a": 2.0}, [2.0]

    @property
    def doubled(self) -> float:
        return 2 * self.k


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k if self.training else x


def a_global() -> Place:
    def put(v: float) -> None:
        global K  # noqa: PLW0603
        K = v

    return lambda x: x * K, put


def a_closure_variable() -> Place:
    k = 2.0

    def put(v: float) -> None:
        nonlocal k
        k = v

    return lambda x: x * k, put


def a_default() -> Place:
    def fn(x: torch.Tensor, k: float = 2.0, *, m: float = 1.0) -> torch.Tensor:
        return x * k * m

    def put(v: float) -> None:
        fn.__defaults__, fn.__kwdefaults__["m"] = (v,), v + 1

    return lambda x: fn(x), put


def a_list() -> Place:
    held = [2.0, 3.0]

    def put(v: float) -> None:
        held[0] = v
        held.append(v)

    return lambda x: x * held[0] * len(held), put


def a_dict() -> Place:
    held: dict[str, Any] = {"a": {"b": 2.0}}

    def put(v: float) -> None:
        held["a"]["b"] = v
        held[str(v)] = {"b": v}

    return lambda x: x * sum(row["b"] for row in held.values()), put


def an_attribute() -> Place:
    config = Config()

    def put(v: float) -> None:
        config.k, config.row[0], config.table["a"] = v, v + 1, v + 2

    return lambda x: x * config.doubled * config.row[0] * config.table["a"], put


def another_object() -> Place:
    config = Config()

    def put(v: float) -> None:
        nonlocal config
        config = Config()
        config.k = v

    return lambda x: x * config.k, put


def two_names_of_one_object() -> Place:
    first = second = Config()

    def put(v: float) -> None:
        nonlocal second
        second = Config()
        second.k = v

    return lambda x: x * first.k + second.k, put


def an_attribute_of_the_class() -> Place:
    class Own(Config):
        shared = 2.0

    config = Own()

    def put(v: float) -> None:
        Own.shared = v

    return lambda x: x * config.shared, put


def an_attribute_that_hides_the_class() -> Place:
    config = Config()

    def put(v: float) -> None:
        config.shared = v

    return lambda x: x * config.shared, put


def a_module() -> Place:
    module = Module()

    def put(v: float) -> None:
        module.k = v
        module.train(v < 5)

    return lambda x: module(x), put


def a_hook() -> Place:
    module = Module()

    def put(v: float) -> None:
        module.register_forward_hook(lambda module, given, out: out * v)

    return lambda x: module(x), put


def a_function() -> Place:
    inner = lambda x: x * 2.0

    def put(v: float) -> None:
        nonlocal inner
        inner = lambda x: x + v

    return lambda x: inner(x), put


def a_method() -> Place:
    config = types.SimpleNamespace(k=2.0)

    def put(v: float) -> None:
        config.k = v

    return functools.partial(lambda config, x: x * config.k, config), put


def a_tensor() -> Place:
    w = torch.full((3,), 2.0, dtype=torch.float64)

    def put(v: float) -> None:
        nonlocal w
        w = w * v

    return lambda x: x * w, put


def a_tensor_written_to() -> Place:
    w = torch.full((3,), 2.0, dtype=torch.float64)
    return lambda x: x * w, w.fill_


def a_tensor_of_another_shape() -> Place:
    w = torch.full((3,), 2.0, dtype=torch.float64)

    def put(v: float) -> None:
        w.data = torch.full((int(v) % 3 + 1, 1), v, dtype=torch.float64)

    return lambda x: x * w.mean() * (1 + w.shape[0]), put


PLACES = [
    a_global, a_closure_variable, a_default, a_list, a_dict, an_attribute, another_object,
    two_names_of_one_object, an_attribute_of_the_class, an_attribute_that_hides_the_class,
    a_module, a_hook, a_function, a_method, a_tensor,
    a_tensor_written_to, a_tensor_of_another_shape,
]  # fmt: skip
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "jit": (lambda f: sf.jit(f, backend="aten"), lambda f: f),
    "grad": (
        lambda f: sf.grad(lambda x: f(x).sum()),
        lambda f: torch.func.grad(lambda x: f(x).sum()),
    ),
    "jit of jit": (lambda f: sf.jit(sf.jit(lambda x: f(x)), backend="aten"), lambda f: f),
    "checkpoint": (lambda f: sf.jit(sf.checkpoint(lambda x: f(x)), backend="aten"), lambda f: f),
    "cond": (
        lambda f: sf.jit(lambda x: sf.cond(x.sum() > 0, lambda: f(x), lambda: x), backend="aten"),
        lambda f: f,
    ),
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_a_function_closes_over_is_read_at_each_call(place: Callable[[], Place]) -> None:
    fn, put = place()
    staged = sf.jit(fn, backend="aten")
    same(staged(X), fn(X))
    for v in (3.0, 7.0):
        put(v)
        same(staged(X), fn(X))


@examples(8)
@given(
    st.sampled_from(list(WAYS)),
    st.sampled_from(PLACES),
    st.sampled_from(PLACES),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
def test_what_is_closed_over_under_every_transform(
    way: str, a: Any, b: Any, order: list[int]
) -> None:
    places = a(), b()
    both = lambda x: places[0][0](x) + places[1][0](x)
    staged, plain = WAYS[way][0](both), WAYS[way][1](both)
    same(staged(X), plain(X))
    for n, which in enumerate(order):
        places[which][1](3.0 + n)
        same(staged(X), plain(X))


def test_a_module_that_runs_as_it_is_reads_numbers_at_each_call() -> None:
    class Reading(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * K * k

    k = 2.0
    fn, params, buffers = sf.functionalize(Reading())
    staged = sf.jit(lambda x: fn(params, buffers, x)[0], backend="aten")
    for k in (2.0, 3.0):
        for found in (staged(X), fn(params, buffers, X)[0]):
            same(found, X * K * k)


def test_another_object_that_reads_the_same_is_not_captured_again() -> None:
    config, row = Config(), [2.0]
    fn = sf.jit(lambda x: x * config.k * row[0], backend="aten")
    fn(X)
    before = counts["captures"]
    config, row = Config(), [float("2")]
    same(fn(X), X * 4)
    assert counts["captures"] == before


def test_a_setting_that_comes_back_is_captured_once() -> None:
    module = Module()
    fn = sf.jit(lambda x: module(x), backend="aten")
    for turn in range(3):
        same(fn(X), X * 2)
        module.eval()
        same(fn(X), X)
        module.train()
        if turn == 0:
            before = counts["captures"]
    assert counts["captures"] == before


def test_a_program_is_for_what_it_closed_over() -> None:
    k = 2.0
    compiled = sf.jit(lambda x: x * k, backend="aten").compile(X)
    k = 3.0
    with pytest.raises(sf.TreeError, match="closed-over k: 3.0, the program is for 2.0"):
        compiled(X)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
}
W = torch.arange(9.0).reshape(3, 3)


def reads_settings(x: torch.Tensor) -> torch.Tensor:
    y = (x @ x).softmax(0) @ x + torch.full((3,), 1 / 3)
    y = (
        y
        * (2 if torch.is_grad_enabled() else 3)
        * (5 if torch.are_deterministic_algorithms_enabled() else 7)
    )
    return y + torch.tensor(0.1)


@examples(7)
@given(st.lists(st.sampled_from(list(SETTINGS)), min_size=2, max_size=4), st.booleans())
def test_torchs_settings_are_those_of_the_call(names: list[str], placed: bool) -> None:
    with sf.fake_world(2) if placed else contextlib.nullcontext():
        if placed:
            staged = sf.shard(reads_settings, sf.make_mesh((2,), ("a",)), sf.P("a"), backend="aten")
        else:
            staged = sf.jit(reads_settings, backend="aten")
        for name in names:
            with SETTINGS[name]():
                got, wanted = staged(W), reads_settings(W)
                got = sf.full(got) if placed else got
                assert got.dtype == wanted.dtype
                assert_close(got, wanted, equal_nan=True)


def test_a_default_device_is_that_of_the_call() -> None:
    staged = sf.jit(lambda x: torch.zeros(2) + 1, backend="aten")
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            assert staged(X).device.type == device
    assert staged(X).device.type == "cpu"


def test_autocast_casts_once_with_the_default_backend() -> None:
    f = lambda x: (x @ x).exp().sum(0)
    staged = sf.jit(f, backend="inductor")
    for setting in ("nothing", "bfloat16", "nothing"):
        with SETTINGS[setting]():
            assert_close(staged(W / 9), f(W / 9), rtol=2e-2, atol=0)


def test_a_compiled_program_names_the_setting_that_is_another() -> None:
    compiled = sf.jit(reads_settings, backend="aten").compile(W)
    with (
        default_dtype(torch.float64),
        pytest.raises(
            sf.TreeError, match="torch.set_default_dtype: torch.float64, the program is for"
        ),
    ):
        compiled(W)
    with SETTINGS["bfloat16"](), pytest.raises(sf.TreeError, match="torch.autocast: .*bfloat16"):
        compiled(W)


def asks_size(x: torch.Tensor) -> torch.Tensor:
    return x * dist.get_world_size()


@examples(6)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_the_world_is_that_of_the_call(sizes: list[int]) -> None:
    for n in sizes:
        with simulated(a=n) as mesh:
            same(sf.full(sf.shard(asks_size, mesh, sf.P("a"), backend="aten")(X)), X * n)


def test_equal_meshes_of_two_worlds_are_two() -> None:
    fn = lambda x: x * 2
    for _ in range(2):
        with simulated(a=2) as mesh:
            assert sf.shard(fn, mesh, sf.P("a"), backend="aten")(X).device_mesh is mesh


def test_a_function_that_asks_nothing_of_the_world_is_captured_once_for_all() -> None:
    fn = lambda x: x * 2
    before = counts["captures"]
    for n in (1, 2, 3):
        with simulated(a=n) as mesh:
            same(sf.full(sf.shard(fn, mesh, sf.P("a"), backend="aten")(X)), X * 2)
    assert counts["captures"] == before + 1
