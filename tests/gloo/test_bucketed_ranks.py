"""bucketed_grad on real gloo processes: what one device computes, and what the simulator
computes, to the last bit.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import schemes
import torch
from equality import close
from ranks import run_ranks
from stagings import counts, forget
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P

LOSSES = {
    "gpt": (models.gpt_loss, lambda: models.gpt_params(1), models.tokens),
    "mlp": (
        models.mlp_loss,
        models.mlp_params,
        lambda: (models._weights(8)(7, 6), models._weights(9)(7, 3)),
    ),
}
# (model, mesh, scheme, batch placement, options of bucketed_grad)
CASES: dict[int, dict[str, tuple[str, dict[str, int], str, Any, dict[str, Any]]]] = {
    2: {
        "gpt data parallel": (
            "gpt",
            {"dp": 2},
            "replicated",
            P("dp"),
            {"cap": 1000, "first_cap": 200},
        ),
        "gpt fully sharded": (
            "gpt",
            {"dp": 2},
            "fully_sharded",
            P("dp"),
            {"cap": 1000, "first_cap": 200},
        ),
        "mlp in flight": (
            "mlp",
            {"dp": 2},
            "fully_sharded",
            P("dp"),
            {"cap": 100, "first_cap": 1, "max_in_flight": 200},
        ),
        "mlp ignored": (
            "mlp",
            {"dp": 2},
            "replicated",
            P("dp"),
            {"cap": 100, "first_cap": 1, "ignore": "w"},
        ),
    },
    4: {
        "gpt dp x tp": (
            "gpt",
            {"dp": 2, "tp": 2},
            "tensor_parallel",
            P("dp"),
            {"cap": 1000, "first_cap": 200},
        ),
        "mlp data parallel": (
            "mlp",
            {"dp": 4},
            "replicated",
            P("dp"),
            {"cap": 200, "first_cap": 1},
        ),
        "mlp both axes": (
            "mlp",
            {"dp": 2, "tp": 2},
            "replicated",
            P(("dp", "tp")),
            {"cap": 100, "first_cap": 1},
        ),
    },
}


def step_of(model: str, options: dict[str, Any]) -> Any:
    """(params, x, y) -> (new params, gradients, loss), with bucketed_grad."""
    name = options.get("ignore")
    told = options | ({"ignore": lambda path: path.endswith(f"[{name!r}]")} if name else {})

    def step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = sf.bucketed_grad(LOSSES[model][0], **told)(params, x, y)
        return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), grads, loss

    return step


def run_case(case: Any, backend: str = "aten", rows: int | None = None) -> Any:
    """(this rank's local results, the whole results, the plan) of two steps, the second fed by
    the first, on the first rows of the batch.
    """
    model, axes, scheme, batch, options = case
    _, make_params, make_batch = LOSSES[model]
    params, (x, y) = make_params(), (part[:rows] for part in make_batch())
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    placed = getattr(schemes, scheme)(params)
    params = sf.distribute(params, mesh, placed)
    low = sf.shard(step_of(model, options), mesh, (placed, batch, batch), backend=backend).lower(
        params, x, y
    )
    step = low.compile()
    out = step(step(params, x, y)[0], x, y)
    return [d.to_local() for d in tree_leaves(out)], sf.full(out), low.plan


def wanted(case: Any, rows: int | None = None) -> Any:
    loss_fn, make_params, make_batch = LOSSES[case[0]]
    batch = [part[:rows] for part in make_batch()]
    first = models.oracle(loss_fn, make_params(), *batch)
    return models.oracle(loss_fn, first[0], *batch)


def equal_one_device(whole: Any, case: Any, rows: int | None = None) -> None:
    for a, b in zip(tree_leaves(whole), tree_leaves(wanted(case, rows)), strict=True):
        close(a, b)


NAMES = [(n, name) for n, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("n", "name"), NAMES)
def test_s9_2_buckets_on_gloo_equal_one_device_and_the_simulator_to_the_last_bit_and_have_its_plan(
    n: int, name: str
) -> None:
    case = CASES[n][name]
    ranks = run_ranks(n, run_case, case)
    torch.set_num_threads(1)  # as the ranks have: some kernels add up per thread
    with sf.fake_world(n):
        simulated = run_case(case)
    for rank, got in enumerate(ranks):
        equal_one_device(got[1], case)
        for a, b in zip(got[0], simulated[0], strict=True):
            assert torch.equal(a, b.shards[rank]), (
                f"rank {rank}: off by {(a - b.shards[rank]).abs().max()}"
            )
    plans = {simulated[2], *(got[2] for got in ranks)}
    assert len(plans) == 1 and len(plans.pop().buckets) > 1


EVEN = 6  # rows over two ranks: most kernels of one rank are those of the other


def compiled(case: Any) -> Any:
    forget()
    return run_case(case, "inductor", EVEN)[1], dict(counts)


def test_compiled_with_inductor_buckets_on_gloo_equal_one_device() -> None:
    case = CASES[2]["mlp in flight"]
    for whole, added in run_ranks(2, compiled, case):
        equal_one_device(whole, case, EVEN)
        assert (added["captures"], added["compilations"]) == (1, 1), (
            "one graph, one compilation, however many buckets"
        )


def disagreeing() -> str:
    mesh = sf.make_mesh((2,), ("dp",))
    cap = 100 + 1000 * mesh.get_rank()
    _, make_params, make_batch = LOSSES["mlp"]
    try:
        sf.shard(
            step_of("mlp", {"cap": cap, "first_cap": 1}),
            mesh,
            (P(), P("dp"), P("dp")),
            backend="aten",
        )(make_params(), *make_batch())
    except sf.DivergenceError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_caps_are_told_before_they_wait_for_each_other() -> None:
    said = run_ranks(2, disagreeing)
    assert said[0] == said[1]
    assert "ranks hold different programs" in said[0], said[0]
