"""`torch.manual_seed` seeds what is drawn inside of functions, in every world, until
`sf.random.state.seed`; and `plain`, the oracle, lets torch's checkpoint and DataLoader be.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch.distributed._composable.checkpoint_activation import checkpoint as of_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shardfn as sf
from shardfn import P
from shardfn.random import ambient

X = torch.ones(4, 6, dtype=torch.float64)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) + torch.rand(4, 6, dtype=x.dtype) + torch.randn_like(x)


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that nothing has seeded."""
    fresh = ambient.States()
    for module in ("shardfn.random.ambient", "shardfn.random", "shardfn.random.plain"):
        monkeypatch.setattr(sys.modules[module], "state", fresh)


def alone() -> Any:
    return sf.jit(noisy, backend="aten")


def sharded() -> Any:
    mesh = sf.make_mesh((torch.distributed.get_world_size(),), ("a",))
    step = sf.shard(noisy, mesh, (P("a"),), backend="aten")
    return lambda x: sf.full(step(x))


def eager() -> Any:
    return sf.random.plain()(noisy)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    with sf.fake_world(2):
        yield


WORLDS = {
    "none": (contextlib.nullcontext, alone),
    "simulated": (simulated, sharded),
    "plain": (contextlib.nullcontext, eager),
}


def seeded(fn: Any) -> list[torch.Tensor]:
    """The numbers after each of several seeds, two calls each."""
    found = []
    for seed in (3, 3, 4, 3, -1):
        torch.manual_seed(seed)
        torch.rand(seed % 5)
        found.append(torch.stack([fn(X), fn(X)]))
    return found


def judge(found: list[torch.Tensor]) -> None:
    first, again, other, third, negative = found
    assert torch.equal(first, again) and torch.equal(first, third)
    assert not torch.equal(first, other) and not torch.equal(first, negative)
    assert not torch.equal(first[0], first[1]), "each call draws others"


@pytest.mark.parametrize("world", WORLDS)
def test_s8_torchs_seed_seeds_what_is_drawn_inside(world: str) -> None:
    inside, make = WORLDS[world]
    with inside():
        judge(seeded(make()))


def test_s8_all_worlds_draw_the_same_from_a_seed() -> None:
    found = []
    for inside, make in WORLDS.values():
        with inside():
            found.append(seeded(make()))
    for other in found[1:]:
        assert_close(found[0], other, rtol=0, atol=0)


def _on_rank() -> list[torch.Tensor]:
    return seeded(sharded())


def _with_own_seed() -> str:
    torch.manual_seed(torch.distributed.get_rank())
    fn = sharded()
    try:
        fn(X)
    except sf.DivergenceError as error:
        return str(error)
    return ""


def test_s8_real_ranks_draw_the_same() -> None:
    wanted = seeded(alone())
    for found in run_ranks(2, _on_rank):
        assert_close(found, wanted, rtol=0, atol=0)


def test_s8_a_seed_for_each_rank_is_refused() -> None:
    for text in run_ranks(2, _with_own_seed):
        assert "torch's seed is 0 on rank 0, but 1 on rank 1" in text
        assert "or sf.random.state.seed(seed)" in text


def test_s8_a_state_that_is_seeded_follows_torch_no_more() -> None:
    fn = alone()
    sf.random.state.seed(5)
    wanted = fn(X), fn(X)
    for seed in (5, 6):
        torch.manual_seed(seed)
        sf.random.state.seed(5)
        torch.manual_seed(7)
        assert torch.equal(fn(X), wanted[0])
        torch.manual_seed(8)
        assert torch.equal(fn(X), wanted[1])


def test_s8_states_are_those_of_the_seed() -> None:
    torch.manual_seed(9)
    assert sf.random.state.get()["default"].tolist() == [9, 0, 0]
    fn = alone()
    with sf.random.state.fork("other"):
        first = fn(X)
    saved = sf.random.state.get()
    torch.manual_seed(9)
    with sf.random.state.fork("other"):
        assert torch.equal(fn(X), first)
    torch.manual_seed(1)
    with sf.random.state.fork("other"):
        assert not torch.equal(fn(X), first)
        sf.random.state.set(saved)
        second = fn(X)
    assert not torch.equal(second, first)


def test_s8_a_seed_inside_of_fork_rng_ends_with_it() -> None:
    fn = alone()
    torch.manual_seed(2)
    wanted = [fn(X) for _ in range(4)]
    torch.manual_seed(2)
    for x in wanted:
        assert torch.equal(fn(X), x)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            fn(X)
        with torch.random.fork_rng():
            torch.manual_seed(1)


def test_s8_a_seed_before_the_import_counts() -> None:
    code = (
        "import torch; torch.manual_seed(3); import shardfn as sf\n"
        "print(sf.random.state.get()['default'].tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[3, 0, 0]"


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ w), 0.5) @ w


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_s8_torchs_checkpoint_draws_the_same_again_under_plain(
    reentrant: bool, inside: bool
) -> None:
    w = torch.eye(6, dtype=torch.float64).requires_grad_()
    x = X.clone().requires_grad_()

    def grads(wrap: Any) -> Any:
        sf.random.state.seed(4)
        with sf.random.plain():
            loss = (wrap(wrap(x)) * torch.rand(6, dtype=x.dtype)).sum()
            if inside:
                return torch.autograd.grad(loss, (x, w)) if not reentrant else backward(loss)
        return torch.autograd.grad(loss, (x, w)) if not reentrant else backward(loss)

    def backward(loss: torch.Tensor) -> Any:
        x.grad = w.grad = None
        loss.backward()
        return x.grad, w.grad

    wanted = grads(lambda x: block(x, w))
    found = grads(lambda x: checkpoint(block, x, w, use_reentrant=reentrant))
    assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), first), "outside torch draws as always"


def test_s8_a_checkpointed_module_draws_the_same_again_under_plain() -> None:
    def grads(wrap: Any) -> list[torch.Tensor]:
        inner = torch.nn.Linear(3, 3, dtype=torch.float64)
        torch.nn.init.eye_(inner.weight)
        torch.nn.init.zeros_(inner.bias)
        module = torch.nn.Sequential(torch.nn.Dropout(0.5), inner, torch.nn.Tanh())
        wrap(module)
        torch.manual_seed(4)
        with sf.random.plain():
            loss = module(module(torch.ones(5, 3, dtype=torch.float64))).sum()
        torch.manual_seed(5)
        return [*torch.autograd.grad(loss, [*module.parameters()])]

    assert_close(grads(of_module), grads(lambda module: None), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("workers", [0, 2])
def test_s8_a_shuffled_loader_stands_under_plain(workers: int) -> None:
    data = TensorDataset(torch.arange(12.0, dtype=torch.float64).reshape(6, 2))
    loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    own = DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    drop = lambda x: F.dropout(x, 0.5)
    step = sf.jit(drop, backend="aten")

    def batches(fn: Any) -> list[torch.Tensor]:
        sf.random.state.seed(1)
        torch.manual_seed(2)
        rows = [fn(x) for (x,) in loader]
        return [*rows, *[fn(x) for (x,) in own]]

    own.generator.manual_seed(1)
    wanted = batches(step)
    own.generator.manual_seed(1)
    with sf.random.plain():
        found = batches(drop)
    assert_close(found, wanted, rtol=0, atol=0)
