"""Any call from any thread is right, or refused by name; and torch in other threads notices
nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import effort
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from stagings import counts, forget
from together import apart, together
from torch import nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from shardfn.world import current_world

F64 = torch.float64


def values(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(seed))


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def waves(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.flip(0)).sum()


def copied(f: Any) -> Any:
    """Another function that does the same."""
    return types.FunctionType(f.__code__, f.__globals__, f.__name__)


PLAIN = {"square": square, "waves": waves}
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # ours, and torch's
    "jit": (lambda f, mesh: sf.jit(f, backend="aten"), lambda f: f),
    "grad": (lambda f, mesh: sf.grad(f), torch.func.grad),
    "jvp": (
        lambda f, mesh: lambda x: sf.jvp(f, (x,), (x,))[1],
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ),
    "shard": (lambda f, mesh: sf.shard(f, mesh, P("a"), backend="aten"), lambda f: f),
    "shard of grad": (
        lambda f, mesh: sf.shard(sf.grad(f), mesh, P("a"), backend="aten"),
        torch.func.grad,
    ),
    "vmap": (
        lambda f, mesh: lambda x: sf.vmap(f)(torch.stack([x, x])),
        lambda f: lambda x: torch.stack([f(x), f(x)]),
    ),
}
CALLS = st.tuples(
    st.sampled_from(list(PLAIN)), st.sampled_from(list(WAYS)), st.sampled_from([2, 3, 5])
)


@effort.examples(12)
@given(st.lists(st.lists(CALLS, min_size=1, max_size=2), min_size=2, max_size=4), st.booleans())
def test_threads_that_stage_and_call_at_once_get_what_one_thread_gets(
    plan: list[list[Any]], shared: bool
) -> None:
    forget()
    made: dict[Any, Any] = {}

    def transformed(name: str, way: str, mesh: Any, thread: int) -> Any:
        key = name, way, None if shared else thread
        if key not in made:
            f = PLAIN[name] if shared else copied(PLAIN[name])
            made[key] = WAYS[way][0](f, mesh)
        return made[key]

    def job(thread: int, calls: list[Any], mesh: Any) -> Any:
        return [
            sf.full(transformed(f, way, mesh, thread)(values(n, seed=n)))
            for f, way, n in calls
            for _ in range(2)
        ]

    with simulated(a=3) as mesh:
        results = together(
            [lambda i=i, calls=calls: job(i, calls, mesh) for i, calls in enumerate(plan)]
        )
    wanted = [
        [WAYS[way][1](PLAIN[f])(values(n, seed=n)) for f, way, n in calls for _ in range(2)]
        for calls in plan
    ]
    assert_close(results, wanted)


def test_one_signature_is_staged_once_however_many_threads_ask_for_it() -> None:
    f = sf.jit(lambda x: x.exp().sum(), backend="aten")
    before = counts["captures"], counts["partitions"]
    results = together([lambda: f(values(5))] * 4)
    assert_close(results, [values(5).exp().sum()] * 4)
    assert (counts["captures"], counts["partitions"]) == (before[0] + 1, before[1] + 1)


def test_threads_compile_at_once() -> None:
    fs = [sf.jit(lambda x, k=k: (x * k).cos().sum(), backend="inductor") for k in (2, 3)]
    results = together([lambda f=f: f(values(5)) for f in fs])
    assert_close(results, [(values(5) * k).cos().sum() for k in (2, 3)])


def test_a_thread_started_inside_a_world_is_in_it() -> None:
    x = values(7)
    with simulated(a=4) as mesh:
        total = sf.shard(square, mesh, P("a"), backend="aten")
        placed = sf.distribute(x, mesh, P("a"))
        for job in (
            lambda: total(x),
            lambda: total(placed),
            lambda: sf.distribute(x, mesh, P("a")) * 1,
        ):
            assert_close(sf.full(apart(job)), sf.full(job()))
        assert_close(apart(lambda: sf.full(total(x))), square(x))
        assert apart(lambda: sf.make_mesh((4,), ("b",)).size()) == 4
        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(lambda n: sf.full(total(values(n))), range(4, 9)))
        assert_close(got, [square(values(n)) for n in range(4, 9)])


def test_tasks_are_in_the_world_and_see_the_mesh_of_their_context() -> None:
    async def one(n: int) -> Any:
        await asyncio.sleep(0)
        double = sf.shard(lambda x: x * n, in_placements=P("a"), backend="aten")
        here = sf.full(double(values(5)))
        return here, await asyncio.to_thread(lambda: sf.full(double(values(5))))

    async def every() -> Any:
        return await asyncio.gather(*(one(n) for n in (2, 3)))

    with simulated(a=2) as mesh, sf.use_mesh(mesh):
        got = asyncio.run(every())
    assert_close(got, [(values(5) * n, values(5) * n) for n in (2, 3)])


def test_use_mesh_is_of_its_thread() -> None:
    with simulated(a=2) as mesh, sf.use_mesh(mesh):
        call = sf.shard(square, in_placements=P("a"), backend="aten")
        with pytest.raises(sf.PlacementError, match="no mesh is given, and no current mesh is set"):
            apart(lambda: call(values(4)))


def test_two_worlds_at_once_are_refused_by_name() -> None:
    def enter() -> None:
        with sf.fake_world(2):
            pass

    with sf.fake_world(4):
        text = (
            r"a world of 4 ranks exists already, entered in thread MainThread\n  try: use one "
            r"fake_world around all threads"
        )
        with pytest.raises(sf.ShardError, match=text):
            apart(enter)
        assert current_world().size == 4
    worlds, held = [sf.fake_world(2), sf.fake_world(3)], threading.Barrier(2)

    def hold(world: Any) -> None:
        try:
            world.__enter__()
        finally:
            held.wait()

    results = together([lambda w=w: hold(w) for w in worlds])
    (winner,) = [i for i, x in enumerate(results) if x is None]
    assert "exists already" in str(results[1 - winner])
    assert current_world().size == worlds[winner].world.size
    with pytest.raises(sf.ShardError, match="was not entered or was already left"):
        worlds[1 - winner].__exit__(None, None, None)
    apart(lambda: worlds[winner].__exit__(None, None, None))  # left by whichever thread
    assert not torch.distributed.is_initialized() and current_world().size == 1
    with pytest.raises(sf.ShardError, match="was not entered or was already left"):
        worlds[winner].__exit__(None, None, None)


def test_a_thread_that_outlives_its_world_is_told_so() -> None:
    left, x = threading.Event(), values(8)
    caught: list[BaseException] = []

    def late(calls: list[Callable[[], Any]]) -> None:
        assert left.wait(60)
        for call in calls:
            with pytest.raises(sf.PlacementError) as error:
                call()
            caught.append(error.value)

    with simulated(a=4) as mesh:
        total = sf.shard(square, mesh, P("a"), backend="aten")
        placed = sf.distribute(x, mesh, P("a"))
        assert_close(sf.full(total(x)), square(x))
        calls = [lambda: total(x), lambda: total(placed), lambda: sf.jit(square)(placed)]
        calls += [lambda: sf.distribute(x, mesh, P("a")), lambda: sf.from_local(x, mesh, P("a"))]
        thread = threading.Thread(target=late, args=(calls,))
        thread.start()
    left.set()
    thread.join()
    assert len(caught) == len(calls) and all(
        "the mesh has 4 ranks, but the world has 1" in str(e) for e in caught
    )
    assert_close(sf.full(placed), x)  # its values are its own


class Waiting(nn.Module):
    """A module that, while it is captured, waits until another thread is done."""

    def __init__(self, inside: threading.Event, done: threading.Event) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=F64))
        self.events = inside, done

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events[0].set()
        assert self.events[1].wait(60)
        return x * self.w


def hooked_gradients() -> Any:
    module = nn.Linear(3, 2).double()
    with torch.no_grad():
        module.weight.fill_(0.5), module.bias.fill_(0.25)
    module.register_full_backward_hook(
        lambda m, i, o: tuple(None if g is None else g * 2 for g in i)
    )
    x = values(3).requires_grad_()
    module(x).square().sum().backward()
    return x.grad, module.weight.grad


def checkpointed() -> Any:
    x = values(3).requires_grad_()
    torch.utils.checkpoint.checkpoint(
        lambda x: x.sin().square(), x, use_reentrant=False
    ).sum().backward()
    return x.grad


def trained() -> Any:
    p = values(3).requires_grad_()
    adam = torch.optim.Adam([p], lr=0.1)
    for _ in range(3):
        adam.zero_grad()
        p.cos().sum().backward()
        adam.step()
    return p.detach()


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "autograd": hooked_gradients,
    "checkpoint": checkpointed,
    "optimizer": trained,
    "torch.func": lambda: torch.func.vmap(torch.func.grad(waves))(
        torch.stack([values(3), values(3, 1)])
    ),
    "attention": lambda: nn.functional.scaled_dot_product_attention(
        *[values(24).reshape(1, 2, 4, 3)] * 3
    ),
    "a view of zeros": lambda: torch._efficientzerotensor(6, dtype=F64).view(2, 3) + 1,
    "kinds": lambda: (torch.compiler.is_compiling(), type(values(3)), torch.is_grad_enabled()),
    "a warm call": lambda: WARM(values(3)),
}
WARM = sf.jit(waves, backend="aten")


@pytest.mark.parametrize("what", list(ELSEWHERE))
def test_torch_in_another_thread_notices_nothing_of_a_capture(what: str) -> None:
    wanted = ELSEWHERE[what]()
    inside, done = threading.Event(), threading.Event()
    fn, params, buffers = sf.functionalize(Waiting(inside, done))

    def elsewhere() -> Any:
        assert inside.wait(60)
        try:
            return ELSEWHERE[what]()
        finally:
            done.set()

    x, grad = values(3), sf.grad(lambda p, x: fn(p, buffers, x)[0].sum())
    grads, got = together([lambda: grad(params, x), elsewhere])
    assert_close(got, wanted) if what != "kinds" else None
    assert what != "kinds" or got == wanted
    assert_close(grads, {"w": values(3)})
    assert torch.nn.modules.module.BackwardHook.__module__.startswith("torch")


def test_torch_compile_in_another_thread_is_right() -> None:
    fs = [
        torch.compile(lambda x, k=k: (x * k).sin().sum(), backend="eager", fullgraph=True)
        for k in (2, 3)
    ]
    ours = [sf.grad(lambda x, k=k: (x * k).sin().sum()) for k in (2, 3)]
    results = together([lambda f=f: f(values(4)) for f in (*fs, *ours)])
    wanted = [(values(4) * k).sin().sum() for k in (2, 3)] + [
        (values(4) * k).cos() * k for k in (2, 3)
    ]
    assert_close(results, wanted)


def test_a_tensor_is_donated_once() -> None:
    f = sf.jit(lambda x: x + 1, backend="aten", donate_argnums=0)
    f(values(5))
    x = values(5)
    results = together([lambda: f(x)] * 4)
    right = [r for r in results if isinstance(r, torch.Tensor)]
    assert_close(right, [values(5) + 1])
    assert all(
        "was donated to this call" in str(r) for r in results if not isinstance(r, torch.Tensor)
    )


def _in_a_fork(x: torch.Tensor, queue: Any) -> None:
    with simulated(a=2) as mesh:
        queue.put(sf.full(sf.shard(square, mesh, P("a"), backend="aten")(x)).item())


def test_a_forked_process_has_worlds_of_its_own() -> None:
    x, context = values(5), multiprocessing.get_context("fork")
    WARM(x)
    queue = context.Queue()
    process = context.Process(target=_in_a_fork, args=(x, queue))
    process.start()
    got = queue.get(timeout=120)
    process.join()
    assert process.exitcode == 0 and got == pytest.approx(square(x).item())
