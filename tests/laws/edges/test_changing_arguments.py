"""Law: what changes from call to call never passes in silence.

A number that changes is warned of by name. A tensor that differs between ranks and a module's
parameters are refused. Of two failures each is told.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import EFFORT, examples
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(1.0, 4.0, dtype=torch.float64)


def caught(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The warnings of shardfn that a call gives."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [
        w
        for w in seen
        if "a Python number that changes" in str(w.message)
        or "created anew for each call" in str(w.message)
    ]


def first_number(tree: Any) -> Any:
    while isinstance(tree, (dict, list, tuple)):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def step(x: torch.Tensor, lr: Any, flag: bool = True, name: str = "") -> torch.Tensor:
    return x * first_number(lr) + flag + len(name)


PLACES: dict[str, Callable[[Any], Any]] = {
    "lr": lambda v: v,
    "lr['a']": lambda v: {"a": v},
    "lr[0]['b'][0]": lambda v: [{"b": (v,)}],
}


@examples(8)
@given(
    st.sampled_from(list(PLACES)),
    st.sampled_from(["jit", "vmap", "shard"]),
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4),
)
def test_a_float_that_changes_is_warned_of_once_and_by_name(
    path: str, kind: str, values: list[float]
) -> None:
    def run() -> None:
        with simulated(a=2) as mesh:
            make = {"jit": sf.jit, "shard": functools.partial(sf.shard, mesh=mesh)}.get(kind)
            fn = make(step, backend="aten") if make else sf.vmap(step, in_axes=(0, None))
            for v in values:
                assert_close(sf.full(fn(X, PLACES[path](v))), step(X, PLACES[path](v)))

    step.__dict__.clear()
    seen = caught(run)
    assert len(seen) == (len(set(values)) > 1)
    for w in seen:
        assert str(w.message).startswith(
            f"{kind}(step), argument {path}: a Python number that changes: "
        )
        assert f"torch.tensor({path})" in str(w.message)
        assert w.filename == __file__


def test_the_warning_says_which_values_and_where() -> None:
    fn = sf.jit(lambda x, lr: x * lr, backend="aten")
    (w,) = caught(lambda: [fn(X, v) for v in (0.1, 0.2, 0.3)])
    head, *rest = str(w.message).splitlines()
    assert head == (
        "jit(<lambda>), argument lr: a Python number that changes: 0.1, then 0.2; shardfn "
        "captures and compiles a program for each value, which is a constant"
    )
    assert rest[0].startswith(f"  at: {__file__}:")
    static = "or static_argnums of jit or shard, if there are only a few values"
    assert rest[1] == (
        "  try: torch.tensor(lr), so that the value is an input and one program takes any value; "
        f"{static}"
    )


def test_a_counter_is_warned_of_at_its_third_value() -> None:
    fn = sf.jit(lambda x, n: x * n, backend="aten")
    assert caught(lambda: [fn(X, n) for n in (1, 2, 1, 2)]) == []
    (w,) = caught(lambda: [fn(X, n) for n in (3, 4, 5)])
    assert "argument n: a Python number that changes: 2, then 3" in str(w.message)


QUIET: dict[str, Callable[[], Any]] = {
    "a flag": lambda: [sf.jit(step, backend="aten")(X, 1.0, v) for v in (True, False, True)],
    "a name": lambda: [sf.jit(step, backend="aten")(X, 1.0, True, v) for v in ("a", "b", "c")],
    "a type": lambda: [sf.jit(step, backend="aten")(X, v) for v in (1, 1.0, True)],
    "a shape": lambda: [
        sf.jit(step, backend="aten")(torch.ones(n), v) for n, v in ((1, 1.0), (2, 2.0))
    ],
    "static": lambda: [
        sf.jit(step, backend="aten", static_argnums=1)(X, v) for v in (1.0, 2.0, 3.0)
    ],
    "a tensor": lambda: [sf.jit(step, backend="aten")(X, torch.tensor(v)) for v in (1.0, 2.0, 3.0)],
    "the same": lambda: [sf.jit(step, backend="aten")(X, v) for v in (0.25, 0.25, 0.25)],
}


@pytest.mark.parametrize("what", QUIET)
def test_what_is_meant_to_differ_is_not_warned_of(what: str) -> None:
    step.__dict__.clear()
    assert caught(QUIET[what]) == []


def test_a_number_that_is_closed_over_and_changes_is_warned_of() -> None:
    lr = 0.5
    fn = sf.jit(lambda x: x * lr, backend="aten")

    def run() -> None:
        nonlocal lr
        for _ in range(3):
            assert torch.equal(fn(X), X * lr)
            lr /= 2

    (w,) = caught(run)
    assert "jit(<lambda>), closed-over lr: a Python number that changes: 0.5, then 0.25" in str(
        w.message
    )
    assert "try: pass torch.tensor(lr) as an argument" in str(w.message)


def test_a_function_made_at_each_call_is_warned_of() -> None:
    fn = sf.jit(lambda x, g: g(x), backend="aten")
    (w,) = caught(lambda: [fn(X, lambda x: x + 1) for _ in range(4)])
    assert "argument g: the function is created anew for each call" in str(w.message)
    assert "try: define the function once" in str(w.message)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(3, 3, dtype=torch.float64),
    "Sequential": lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(3, dtype=torch.float64)),
}
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "itself": lambda m: m,
    "its forward": lambda m: m.forward,
    "a partial": functools.partial,
    "a transform of it": sf.checkpoint,
}
# ours, and torch's
MAKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "shard": (
        lambda f: sf.shard(f, sf.make_mesh((2,), ("a",)), P("a"), backend="aten"),
        lambda f: f,
    ),
    "jit": (lambda f: sf.jit(f, backend="aten"), lambda f: f),
    "vmap": (sf.vmap, torch.vmap),
    "jacrev": (sf.jacrev, torch.func.jacrev),
}


@examples(12)
@given(st.sampled_from(list(MODULES)), st.sampled_from(list(GIVEN)), st.sampled_from(list(MAKE)))
def test_a_module_is_a_function_whose_parameters_have_gradients(
    module: str, given: str, make: str
) -> None:
    torch.manual_seed(0)
    own = MODULES[module]()
    plain = copy.deepcopy(own)
    x = torch.randn(2, 3, dtype=torch.float64)
    ours, torchs = MAKE[make]
    with sf.fake_world(2):
        got = sf.full(ours(GIVEN[given](own))(x))
        wanted = torchs(plain)(x)
        assert_close(got, wanted)
        got.square().sum().backward()
        wanted.square().sum().backward()
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            assert_close(p.grad, q.grad)


def test_a_module_that_writes_to_its_parameters_is_refused_by_name() -> None:
    table = nn.Embedding(3, 2, max_norm=1.0)
    with pytest.raises(sf.CaptureError, match="max_norm rescales rows of its weight in place"):
        sf.jit(table, backend="aten")(torch.arange(3))


def test_a_module_without_parameters_is_a_function() -> None:
    with sf.fake_world(2):
        for make in ("shard", "jit"):
            assert torch.equal(sf.full(MAKE[make][0](nn.ReLU())(X - 2)), (X - 2).relu())


def test_a_frozen_module_is_read_by_reference() -> None:
    module = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
    with sf.fake_world(2):
        fns = [MAKE[make][0](module) for make in ("jit", "shard")]
        for _ in range(2):
            for fn in fns:
                assert_close(sf.full(fn(X)), module(X))
            module.weight.mul_(2)


# Real ranks. Each case: which arguments are plain tensors, and which of them differs between ranks.
CASES = [(seed, random.Random(seed)) for seed in range(6 * EFFORT)]


def generated(rng: random.Random, rank: int) -> tuple[Any, str | None]:
    """Arguments of a call, and the path of the one that differs between ranks."""
    names = ["x", "tree['a']", "tree['b'][0]"]
    differs = rng.choice([None, *names])
    values = {name: torch.full((4,), 1.0 + rng.randrange(5)) for name in names}
    if differs:
        values[differs] = values[differs] + (rank if rng.random() < 0.5 else rank * 2.0**-20)
    return (values["x"], {"a": values["tree['a']"], "b": [values["tree['b'][0]"]]}), differs


def total(x: torch.Tensor, tree: Any) -> torch.Tensor:
    return (x * tree["a"] + tree["b"][0]).sum()


def said(call: Callable[[], Any]) -> Any:
    try:
        return sf.full(call()).item()
    except sf.DivergenceError as error:
        return str(error), error.arg_path, error.fix


def staging(seeds: list[int]) -> list[Any]:
    """What each case says at its first call."""
    mesh = sf.make_mesh((2,), ("a",))
    rank, found = mesh.get_rank(), []
    for seed in seeds:
        args, differs = generated(random.Random(seed), rank)
        total.__dict__.clear()  # what was staged of it
        fn = sf.shard(total, mesh, (P("a"), P("a")), backend="aten")
        found.append((differs, said(functools.partial(fn, *args))))
    return found


def checked() -> list[Any]:
    """Later calls, closures, own shards, and what is this rank's alone."""
    mesh = sf.make_mesh((2,), ("a",))
    rank, found = mesh.get_rank(), []
    os.environ["SHARDFN_CHECK"] = "1"
    fn = sf.shard(lambda x: x.sum(), mesh, P("a"), backend="aten")
    same, own = torch.ones(4), torch.ones(4) + rank
    found += [said(lambda: fn(same)), said(lambda: fn(own)), said(lambda: fn(same))]
    os.environ["SHARDFN_CHECK"] = "0"
    found.append(
        said(lambda: sf.shard(lambda x: (x * own).sum(), mesh, P("a"), backend="aten")(same))
    )
    local = sf.from_local(own[:2], mesh, P("a"))
    found.append(said(lambda: sf.shard(lambda x: x.sum(), mesh, P("a"), backend="aten")(local)))
    compiled = sf.shard(lambda x: x.sum(), mesh, P("a"), backend="aten").compile(
        sf.ShapeDtype((4,))
    )
    found.append(said(lambda: compiled(own)))
    if rank == 0:  # without a mesh a call is of one rank: nobody is waited for
        found.append(torch.equal(sf.jit(lambda x: x * 2, backend="aten")(own), own * 2))
    return found


def test_a_plain_tensor_that_differs_between_ranks_is_refused_where_it_is_staged() -> None:
    seeds = [seed for seed, _ in CASES]
    first, second = run_ranks(2, staging, seeds)
    assert any(differs for differs, _ in first)
    assert any(not differs for differs, _ in first)
    for seed, (differs, told), (_, other) in zip(seeds, first, second, strict=True):
        assert told == other
        if differs:
            assert (
                f"argument {differs}: a plain tensor that differs between rank 0 and rank 1"
                in told[0]
            ), seed
            assert told[1] == differs
            assert "from_local" in told[2]
        else:
            args, _ = generated(random.Random(seed), 0)
            assert told == total(*args).item()


def test_calls_closures_and_compiled_programs_are_compared_too() -> None:
    first, second = run_ranks(2, checked)
    assert first[:6] == second[:6]
    assert first[0] == first[2] == 4.0
    for told, what in (
        (first[1], "argument x"),
        (first[3], "closed-over own"),
        (first[5], "argument x"),
    ):
        assert f"{what}: a plain tensor that differs between rank 0 and rank 1" in told[0]
        assert "sf.from_local if the value is this rank's shard" in told[2]
    assert first[4] == 2 * 1.0 + 2 * 2.0
    assert first[6] is True
