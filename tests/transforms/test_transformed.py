"""The manners of every transformed function: decorators, methods, names, signatures, copies,
pickles, keywords and leaks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from message import without_line
from stagings import counts
from torch import Tensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

F64 = torch.float64
G = torch.Generator().manual_seed(4)
W, X = (torch.randn(4, generator=G, dtype=F64), torch.randn(4, generator=G, dtype=F64))
HERE = re.compile(re.escape(__file__) + r":\d+")
PURE = "  needed: one pure graph of tensor ops"


def loss(w: Tensor, x: Any = 2.0, *, k: Any = 2.0, b: float = 1.0) -> Tensor:
    """The loss."""
    return ((w * x) ** 2 * k + b).sum()


def twice(w: Tensor, x: Any = 2.0, *, k: Any = 2.0, b: float = 1.0) -> Tensor:
    """Of one sample."""
    return (w * x).sum() * k + b


def judge_accumulate(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(w: Tensor, x: Any = 2.0, **kwargs: Any) -> Any:
        halves = [x[i::2] for i in range(2)] if isinstance(x, Tensor) else [x, x]
        return sum(fn(w, half, **kwargs) for half in halves) / 2

    return run


def value_first(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: torch.func.grad_and_value(fn)(*args, **kwargs)[::-1]


def with_keywords(transform: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fn: lambda *args, **kwargs: transform(functools.partial(fn, **kwargs))(*args)


def mean(w: Tensor, x: Any = 2.0, *, k: Any = 2.0, b: float = 1.0) -> Tensor:
    """The mean over a batch."""
    return (w[:2] * x).mean() * k + b


aten_shard = functools.partial(sf.shard, backend="aten")
aten_jit = functools.partial(sf.jit, backend="aten")
halved = functools.partial(sf.accumulate, microbatches=2)

TABLE: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], str]] = {
    # name: the transform, a function for it, the judge, how it prints
    "grad": (sf.grad, loss, torch.func.grad, "grad"),
    "value_and_grad": (sf.value_and_grad, loss, value_first, "value_and_grad"),
    "bucketed_grad": (sf.bucketed_grad, loss, value_first, "bucketed_grad"),
    "vmap": (
        functools.partial(sf.vmap, in_axes=(0, None)),
        twice,
        lambda f: torch.func.vmap(f, in_dims=(0, None)),
        "vmap",
    ),
    "jacrev": (sf.jacrev, loss, with_keywords(torch.func.jacrev), "jacrev"),
    "jacfwd": (sf.jacfwd, loss, with_keywords(torch.func.jacrev), "jacfwd"),
    "hessian": (sf.hessian, loss, with_keywords(torch.func.hessian), "hessian"),
    "accumulate": (halved, mean, judge_accumulate, "accumulate"),
    "jit": (aten_jit, loss, lambda f: f, "jit"),
    "shard": (aten_shard, loss, lambda f: f, "shard"),
}
PLAIN_SECOND = {"vmap": 3.0}  # an argument that is no batch


@pytest.fixture(params=TABLE)
def row(request: pytest.FixtureRequest) -> Iterator[Any]:
    """(transform, function, judge, what it prints, a second argument) in a world of one rank,
    whose mesh is current.
    """
    with simulated(a=1) as mesh, sf.use_mesh(mesh):
        yield *TABLE[request.param], PLAIN_SECOND.get(request.param, X)


def close(got: Any, wanted: Any) -> None:
    assert_close(sf.full(got), wanted, rtol=1e-12, atol=1e-12)


def test_it_takes_keywords_and_defaults(row: Any) -> None:
    transform, fn, judge, _, second = row
    close(
        transform(fn)(W, second, k=torch.tensor(3.0, dtype=F64)),
        judge(fn)(W, second, k=torch.tensor(3.0, dtype=F64)),
    )
    close(transform(fn)(W, second, k=3, b=0.5), judge(fn)(W, second, k=3, b=0.5))
    if transform not in (halved,) and second is X:
        close(transform(fn)(W), judge(fn)(W))


def test_it_is_a_decorator(row: Any) -> None:
    transform, fn, judge, verb, second = row

    @transform
    def decorated(w: Tensor, x: Any, k: float = 2.0) -> Tensor:
        """Text."""
        return fn(w, x, k=k)

    close(decorated(W, second, k=0.5), judge(fn)(W, second, k=0.5))
    assert (repr(decorated), decorated.__doc__) == (f"{verb}(decorated)", "Text.")


def test_it_takes_partials_and_callable_objects(row: Any) -> None:
    transform, fn, judge, verb, second = row

    class Scaled:
        """An object that is called."""

        def __init__(self) -> None:
            self.k = torch.tensor(0.5, dtype=F64)

        def __call__(self, w: Tensor, x: Any) -> Tensor:
            return fn(w, x, k=self.k)

    found = (transform(functools.partial(fn, k=torch.tensor(0.5, dtype=F64))), transform(Scaled()))
    for made in found:
        close(made(W, second), judge(fn)(W, second, k=0.5))
    assert [repr(made) for made in found] == [f"{verb}({fn.__name__})", f"{verb}(Scaled)"]
    assert found[1].__doc__ == "An object that is called."


def test_it_prints_and_is_named_as_its_function(row: Any) -> None:
    transform, fn, _, verb, _ = row
    made = transform(transform(fn))
    assert repr(made) == str(made) == made.__name__ == f"{verb}({verb}({fn.__name__}))"
    assert made.__wrapped__.__wrapped__ is fn
    assert (made.__doc__, made.__module__, made.__qualname__) == (
        fn.__doc__,
        fn.__module__,
        fn.__qualname__,
    )
    assert inspect.signature(made) == inspect.signature(fn)
    assert inspect.unwrap(made) is fn


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_give_equal_results_and_capture_nothing_anew(
    row: Any, again: Callable[[Any], Any]
) -> None:
    transform, fn, _, _, second = row
    made = transform(fn)
    wanted = made(W, second)
    other = again(made)
    captures = counts["captures"]
    close(other(W, second), sf.full(wanted))
    assert (repr(other), other.__doc__, counts["captures"]) == (repr(made), made.__doc__, captures)
    assert other.__wrapped__ is fn


def test_a_copy_of_a_nest_is_a_nest(row: Any) -> None:
    transform, fn, _, verb, second = row
    nest = aten_jit(transform(fn))
    for other in (copy.copy(nest), copy.deepcopy(nest), pickle.loads(pickle.dumps(nest))):
        assert repr(other) == f"jit({verb}({fn.__name__}))"
        close(other(W, second), sf.full(nest(W, second)))


def test_a_callable_objects_state_is_copied_with_it() -> None:
    made = sf.grad(Power(3))
    other = pickle.loads(pickle.dumps(made)), copy.deepcopy(made)
    for f in (made, *other):
        close(f(W), 3 * W**2)
    assert (
        other[0].__wrapped__ is not made.__wrapped__
        and other[1].__wrapped__ is not made.__wrapped__
    )


class Power:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, w: Tensor) -> Tensor:
        return (w**self.n).sum()


@sf.grad
def decorated_here(w: Tensor) -> Tensor:
    return (w**3).sum()


class Holder:
    @staticmethod
    @sf.grad
    def inside(w: Tensor) -> Tensor:
        return (w**3).sum()


def test_what_a_decorator_made_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(decorated_here)) is decorated_here
    nest = pickle.loads(pickle.dumps(sf.vmap(decorated_here)))
    assert nest.__wrapped__ is decorated_here
    close(nest(W.reshape(2, 2)), 3 * W.reshape(2, 2) ** 2)
    close(Holder.inside(W), 3 * W**2)


def test_what_cannot_be_pickled_is_said_by_pickle() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(sf.grad(lambda w: w.sum()))


class Point(NamedTuple):
    """A tree of tensors with methods."""

    w: Tensor
    c: float

    @sf.grad
    def of_self(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() * 2

    @functools.partial(sf.value_and_grad, argnums=1)
    def of_x(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() * self.c

    @aten_jit
    def value(self, x: Tensor) -> Tensor:
        return self.w * x * self.c


class Plain:
    """An object that is no tree."""

    def __init__(self, c: float) -> None:
        self.c, self.w = c, W.clone()

    @functools.partial(sf.grad, argnums=1)
    def of_x(self, x: Tensor) -> Tensor:
        return (x**2).sum() * self.c

    @functools.partial(aten_jit, static_argnums=0)
    def value(self, x: Tensor) -> Tensor:
        return x * self.w * self.c

    def plain(self, x: Tensor) -> Tensor:
        return (x**2).sum() * self.c


def test_methods_of_trees_take_self_as_their_first_argument() -> None:
    point = Point(W, 3.0)
    close(point.value(X), W * X * 3)
    close(Point.value(point, X), W * X * 3)
    close(point.of_x(X), ((W * X).sum() * 3, W * 3))
    close(sf.grad(lambda w: Point(w, 3.0).of_x(X)[0])(W), X * 3)
    assert repr(Point.value) == "jit(value)"
    assert repr(point.value).startswith("jit(value) of Point(")
    assert point.value.trace(X).program.in_paths == ("self.w", "x")
    assert str(inspect.signature(point.value)) == "(x: 'Tensor') -> 'Tensor'"


def test_methods_inside_another_transform_are_bound_too() -> None:
    plain, point = Plain(3.0), Point(W, 0.5)
    fn = sf.jit(
        lambda x: plain.of_x(x) + point.value(x) + plain.value(x) + Holder.inside(x), backend="aten"
    )
    close(fn(X), 6 * X + W * X * 0.5 + W * X * 3 + 3 * X**2)
    compiled = point.value.compile(X)
    close(compiled(point, X), W * X * 0.5)
    assert point.value.lower(X).program.name == "jit(value)"


def test_a_gradient_by_self_needs_a_tree_of_floating_tensors_only() -> None:
    with pytest.raises(sf.TreeError) as caught:
        Point(W, 3.0).of_self(X)
    fix = "torch.tensor(x) for a number; for other values use argnums or a closure"
    got = "an argument cannot be differentiated\n  self.c is a float"
    text = f"grad(of_self): {got}\n  needed: floating tensors, or None\n  try: {fix}"
    assert without_line(caught.value) == text


def test_a_self_that_is_no_tree_is_refused_by_name() -> None:
    with pytest.raises(sf.TreeError) as caught:
        Plain(3.0).of_x(X)
    fix = (
        "transform the bound method: at capture, shardfn then reads the object of the method; or "
        "use static_argnums=0 of jit or shard; or make Plain a NamedTuple"
    )
    assert HERE.sub("HERE", str(caught.value)) == "\n".join([
        "grad(of_x), argument self: a Plain",
        "  at: HERE",
        "  needed: a tensor or a constant",
        f"  try: {fix}",
    ])  # fmt: skip


def test_what_that_refusal_says_to_try_works() -> None:
    close(sf.grad(Plain(3.0).plain)(X), 6 * X)
    one, other = Plain(3.0), Plain(0.5)
    before = counts["captures"]
    for _ in range(2):
        close(one.value(X), X * W * 3)
        close(other.value(X), X * W * 0.5)
    assert counts["captures"] == before + 2


def test_a_module_as_an_argument_is_refused_by_name() -> None:
    with pytest.raises(sf.TreeError) as caught:
        sf.grad(lambda x, m: m(x).sum())(X, torch.nn.Linear(4, 1))
    fix = "fn, params, buffers = sf.functionalize(module), and pass params and buffers as arguments"
    said = (
        "grad(<lambda>), argument m: a Linear\n  at: HERE\n  needed: a tensor or a "
        f"constant\n  try: {fix}"
    )
    assert HERE.sub("HERE", str(caught.value)) == said


def test_functions_may_be_arguments() -> None:
    close(sf.grad(lambda w, f: f(w).sum())(W, torch.sin), W.cos())
    close(sf.grad(lambda w, f=None: f(w).sum())(W, f=torch.exp), W.exp())


def test_compose_prints_compares_and_pickles() -> None:
    both = sf.compose(functools.partial(sf.jit, backend="aten"), sf.grad)
    assert repr(both) == "compose(jit, grad)"
    assert repr(both(loss)) == "jit(grad(loss))"
    assert repr(sf.compose(both, sf.vmap)) == "compose(compose(jit, grad), vmap)"
    assert (
        sf.compose(sf.grad, sf.vmap) == sf.compose(sf.grad, sf.vmap) != sf.compose(sf.vmap, sf.grad)
    )
    again = pickle.loads(pickle.dumps(sf.compose(sf.shard, sf.grad)))
    assert repr(again) == "compose(shard, grad)" and again == sf.compose(sf.shard, sf.grad)
    close(pickle.loads(pickle.dumps(both))(loss)(W, X), torch.func.grad(loss)(W, X))


def test_decorators_with_arguments_print_and_pickle() -> None:
    made = sf.shard(in_placements=P("a"), backend="aten")
    with simulated(a=1) as mesh, sf.use_mesh(mesh):
        fn = pickle.loads(pickle.dumps(made))(loss)
        close(fn(W), loss(W))
    assert repr(sf.compose(made, sf.grad)) == "compose(shard, grad)"


LEAKED: list[Tensor] = []
STATE: dict[str, Any] = {}


class Keeps:
    last: Any = None

    def __call__(self, w: Tensor) -> Tensor:
        self.last = w * 2
        return (w * w).sum()


def in_a_list(w: Tensor) -> Tensor:
    LEAKED.append(w * 2)
    return (w * w).sum()


def in_a_dict(w: Tensor) -> Tensor:
    STATE["w"] = w * 2
    return (w * w).sum()


def in_a_closure() -> Callable[..., Any]:
    kept: list[Tensor] = []

    def fn(w: Tensor) -> Tensor:
        kept.append(w * 2)
        return (w * w).sum()

    return fn


def in_a_nonlocal() -> Callable[..., Any]:
    kept: Any = None

    def fn(w: Tensor) -> Tensor:
        nonlocal kept
        kept = w * 2
        return (w * w).sum()

    return fn


LEAKS = {
    "LEAKED": in_a_list,
    "STATE": in_a_dict,
    "kept": in_a_closure(),
    "nonlocal": in_a_nonlocal(),
    "last": Keeps(),
}


@pytest.mark.parametrize(
    "name",
    ["grad", "value_and_grad", "bucketed_grad", "jacrev", "jacfwd", "hessian", "jit", "shard"],
)
@pytest.mark.parametrize("where", LEAKS)
def test_storing_a_traced_value_is_refused_or_done(where: str, name: str) -> None:
    fn, (transform, *_, verb) = LEAKS[where], TABLE[name]
    if name in ("jit", "shard") and where in ("STATE", "last"):
        with simulated(a=1) as mesh, sf.use_mesh(mesh):
            transform(fn)(W)
        stored = STATE.pop("w") if where == "STATE" else fn.last
        fn.__dict__.update(last=None) if where == "last" else None
        assert_close(sf.full(stored), W * 2)
        return
    with simulated(a=1) as mesh, sf.use_mesh(mesh), pytest.raises(sf.CaptureError) as caught:
        transform(fn)(W)
    parts = {"nonlocal": "kept", "last": "Keeps.last", "STATE": "STATE['w']"}
    place = parts.get(where, where)
    said = HERE.sub("HERE", str(caught.value)).splitlines()
    called = getattr(fn, "__name__", "Keeps")
    assert said[0] == f"{verb}({called}): the function changes an object outside of itself: {place}"
    assert said[-2:] == [PURE, "  try: return the new value instead of storing it"]
    assert not LEAKED and not STATE and LEAKS["last"].last is None


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "integers": (lambda w: (w * w).sum().long(), "of torch.int64"),
    "a bool": (lambda w: (w * w).sum() > 0, "of torch.bool"),
    "None": (lambda w: None, "a NoneType"),
    "a number": (lambda w: 3.0, "a float"),
    "a pair": (lambda w: (w.sum(), w), "a tuple"),
    "a vector": (lambda w: w * w, f"of shape {tuple(W.shape)}"),
}


@pytest.mark.parametrize(
    "transform", [sf.grad, sf.value_and_grad, sf.bucketed_grad], ids=lambda t: t.__name__
)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_has_no_gradient_is_refused_by_name(
    kind: str, transform: Callable[..., Any]
) -> None:
    fn, what = LOSSES[kind]
    with pytest.raises(sf.CaptureError) as caught:
        transform(fn)(W)
    fix = "return loss.sum() or loss.mean() of floating values; has_aux=True for (scalar, aux)"
    text = (
        f"the gradient of <lambda>: its value is {what}\n  needed: a floating scalar\n  try: {fix}"
    )
    assert without_line(caught.value) == text


def test_auxiliary_data_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        sf.grad(lambda w: w.sum(), has_aux=True)(W)
    fix = "return (value, aux), or has_aux=False"
    text = (
        f"<lambda>: it returns a Tensor\n  needed: a pair (value, aux): has_aux=True\n  try: {fix}"
    )
    assert without_line(caught.value) == text
