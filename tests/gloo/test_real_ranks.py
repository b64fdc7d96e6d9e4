"""Real gloo processes compute what the plain function computes, and what the simulator
computes, to the last bit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import models
import pytest
import schemes
import torch
from effort import asked
from ranks import run_ranks
from stagings import counts, forget
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from shardfn.runtime import agreement

# (model, mesh, scheme, batch placement)
CASES: dict[int, dict[str, tuple[str, dict[str, int], str, Any]]] = {
    2: {
        "gpt data parallel": ("gpt", {"dp": 2}, "replicated", P("dp")),
        "gpt fully sharded": ("gpt", {"dp": 2}, "fully_sharded", P("dp")),
        "gpt tensor parallel": ("gpt", {"tp": 2}, "tensor_parallel", P()),
        "llama tensor parallel": ("llama", {"tp": 2}, "tensor_parallel", P()),
        "conv data parallel": ("conv", {"dp": 2}, "replicated", P("dp")),
    },
    4: {
        "gpt data parallel": ("gpt", {"dp": 4}, "replicated", P("dp")),
        "gpt fully sharded": ("gpt", {"dp": 4}, "fully_sharded", P("dp")),
        "gpt dp x tp": ("gpt", {"dp": 2, "tp": 2}, "tensor_parallel", P("dp")),
        "gpt mixed": ("gpt", {"dp": 2, "tp": 2}, "mixed", P("dp")),
        "conv fully sharded": ("conv", {"dp": 2, "tp": 2}, "fully_sharded", P(("dp", "tp"))),
    },
}


def run_case(
    case: Any, backend: str = "aten", rows: int | None = None
) -> tuple[list[torch.Tensor], Any]:
    """(this rank's local results, the whole results) of two steps, the second fed by the first,
    on the first rows of the batch.
    """
    model, axes, scheme, batch = case
    _, make_params, make_batch = models.LOSSES[model]
    params, (x, y) = make_params(), (part[:rows] for part in make_batch())
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    placed = getattr(schemes, scheme)(params)
    step = sf.shard(models.STEPS[model], mesh, (placed, batch, batch), backend=backend)
    out = step(params, x, y)
    out = step(out[0], x, y)
    return [d.to_local() for d in tree_leaves(out)], sf.full(out)


def every_case(cases: Any) -> Any:
    return {name: run_case(case) for name, case in cases.items()}


World = Callable[[int], list[Any]]
NAMES = [(n, name) for n, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> World:
    """What each of n gloo ranks got for the cases that are asked for."""
    names = asked(request, "n", "name")

    @functools.cache
    def of(n: int) -> list[Any]:
        cases = {k: case for k, case in CASES[n].items() if (n, k) in names}
        return run_ranks(n, every_case, cases)

    return of


@pytest.mark.parametrize(("n", "name"), NAMES)
def test_gloo_equals_one_device(n: int, name: str, world: World) -> None:
    loss_fn, make_params, make_batch = models.LOSSES[CASES[n][name][0]]
    first = models.oracle(loss_fn, make_params(), *make_batch())
    wanted = models.oracle(loss_fn, first[0], *make_batch())
    for rank in world(n):
        for a, b in zip(tree_leaves(rank[name][1]), tree_leaves(wanted), strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "name"), NAMES)
def test_gloo_equals_the_simulator_to_the_last_bit(n: int, name: str, world: World) -> None:
    torch.set_num_threads(1)  # as the ranks have: some kernels add up per thread
    with sf.fake_world(n):
        simulated, _ = run_case(CASES[n][name])
        for rank, got in enumerate(world(n)):
            for a, b in zip(got[name][0], simulated, strict=True):
                assert torch.equal(a, b.shards[rank]), (
                    f"rank {rank}: off by {(a - b.shards[rank]).abs().max()}"
                )


EVEN = 6  # rows over two ranks: most kernels of one rank are those of the other


def compiled(case: Any) -> Any:
    forget()
    first = run_case(case, backend="inductor", rows=EVEN)
    return first, dict(counts)


def test_inductor_on_gloo_equals_one_device() -> None:
    ranks = run_ranks(2, compiled, CASES[2]["gpt fully sharded"])
    loss_fn, make_params, make_batch = models.LOSSES["gpt"]
    batch = [part[:EVEN] for part in make_batch()]
    wanted = models.oracle(loss_fn, models.oracle(loss_fn, make_params(), *batch)[0], *batch)
    for (_, whole), _ in ranks:
        for a, b in zip(tree_leaves(whole), tree_leaves(wanted), strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-12)


def differing(check: str) -> str:
    os.environ["SHARDFN_CHECK"] = check
    mesh = sf.make_mesh((2,), ("dp",))
    double = sf.shard(lambda x: x * 2, mesh, P("dp"), backend="aten")
    double(torch.arange(4.0))  # the same on both: no error, and the signature is ready
    try:
        double(torch.arange(4.0) + mesh.get_rank())
    except sf.DivergenceError as error:
        return str(error)
    return "no error"


def test_a_plain_tensor_that_differs_between_ranks_is_found_when_asked() -> None:
    first, second = run_ranks(2, differing, "1")
    assert first == second
    head, source, *rest = first.splitlines()
    assert source.startswith(f"  at: {__file__}:")
    assert "\n".join([head, *rest]) == DIFFERS


DIFFERS = """shard(<lambda>), argument x: a plain tensor that differs between rank 0 and rank 1
  needed: a global value, the same on every rank
  try: use the same value on every rank (set a seed, or broadcast), or sf.from_local if the \
value is this rank's shard"""


def disagreeing() -> str:
    mesh = sf.make_mesh((2,), ("dp",))
    width = 3 + mesh.get_rank()
    try:
        sf.shard(lambda x: x * 2, mesh, P("dp"), backend="aten")(torch.ones(4, width))
    except sf.DivergenceError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_programs_are_told_the_first_line_that_differs() -> None:
    said = run_ranks(2, disagreeing)
    assert said[0] == said[1]
    assert "ranks hold different programs" in said[0]
    assert "rank 0: in (4, 3) torch.float32 placed (0,)" in said[0]
    assert "rank 1: in (4, 4) torch.float32 placed (0,)" in said[0]


WRITTEN = "def f(x):\n    return (x * 3).sum()\n"


def agreeing() -> list[str]:
    """The errors of two ranks that differ in one thing each, after two that do not."""
    mesh = sf.make_mesh((2,), ("dp",))
    rank, x = mesh.get_rank(), torch.ones(5)
    names: dict[str, Any] = {}
    exec(compile(WRITTEN, f"/home/of/{rank}/model.py", "exec"), names)
    shard = lambda f: sf.shard(f, mesh, P("dp"), backend="aten")
    assert sf.full(shard(names["f"])(x)) == 15

    weights = [1.0, 2.0, 3.0, 4.0, 5.0 + rank]
    different = (
        lambda x: (x * torch.tensor(weights)).sum(),
        lambda x: (x * weights[-1]).sum(),
        lambda x: sf.scan(lambda s, r: (s + r * rank, s), x[0], x)[0],
    )
    found = []
    for f in different:
        with pytest.raises(sf.DivergenceError) as error:
            shard(f)(x)
        found.append(str(error.value))
    if rank:
        agreement.VERSIONS = ("torch 1.0", "shardfn 0.1")
    with pytest.raises(sf.DivergenceError) as error:
        shard(lambda x: x.sum())(x)
    return [*found, str(error.value)]


def test_ranks_compare_constants_by_value_and_versions_but_not_the_paths_of_files() -> None:
    first, second = run_ranks(2, agreeing)
    assert first == second
    tensor, number, body, versions = first
    assert "a closed-over tensor of shape (5,): a plain tensor that differs" in tensor
    assert "rank 0: %mul: mul.Tensor [5.0]" in number
    assert "rank 1: %mul: mul.Tensor [6.0]" in number and f"at {__file__}:" in number
    assert "try: use the same number on all ranks: read a setting on rank 0" in number
    assert "rank 0: " in body and "[0]" in body and "[1]" in body
    assert f"rank 0: torch {torch.__version__}\n  rank 1: torch 1.0" in versions
    assert "try: use the same environment on all ranks" in versions
