"""What is sent, counted: nothing more than the placements ask for."""

from __future__ import annotations

import collections
from typing import Any

import models
import pytest
import schemes
import torch

import shardfn as sf
from shardfn import P
from shardfn._tree import leaves, paths

SCALAR = 8  # bytes of the float64 loss


def lowered(model: str, axes: dict[str, int], scheme: str, batch: Any, batch_size: int = 8) -> Any:
    _, make_params, make_batch = models.LOSSES[model]
    params, (x, y) = make_params(), make_batch(batch_size)
    size = 1
    for n in axes.values():
        size *= n
    with sf.fake_world(size):
        mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
        placed = getattr(schemes, scheme)(params)
        return params, sf.shard(
            models.STEPS[model], mesh, (placed, batch, batch), backend="aten"
        ).lower(params, x, y)


def nbytes(params: Any) -> list[int]:
    return sorted(p.numel() * p.element_size() for p in leaves(params))


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("n", [2, 8])
def test_data_parallel_sends_one_reduction_per_parameter_of_its_bytes_and_nothing_else(
    model: str, n: int
) -> None:
    params, low = lowered(model, {"dp": n}, "replicated", P("dp"))
    assert {c.kind for c in low.collectives} == {"all_reduce"}
    sent = sorted(c.nbytes for c in low.collectives)
    scalars = [s for s in sent if s == SCALAR]
    assert len(scalars) <= 2, "the loss, and the number of tokens it is the mean over"
    assert sent[len(scalars) :] == nbytes(params)


def test_data_parallel_convnet_sends_the_batch_statistics_besides() -> None:
    params, low = lowered("conv", {"dp": 2}, "replicated", P("dp"))
    sent = collections.Counter(c.nbytes for c in low.collectives)
    statistics = sent - collections.Counter(nbytes(params))
    assert set(statistics) <= {SCALAR, 6 * 8}, (
        "per channel sums, as one device takes them over the whole batch"
    )


def test_tensor_parallel_sends_two_all_reduces_per_layer_forward_and_two_backward() -> None:
    counts = {}
    for layers in (1, 2, 4):
        params, (x, y) = models.gpt_params(layers), models.tokens(8)
        with sf.fake_world(3):
            mesh = sf.make_mesh((3,), ("tp",))
            low = sf.shard(
                models.STEPS["gpt"],
                mesh,
                (schemes.tensor_parallel(params), P(), P()),
                backend="aten",
            ).lower(params, x, y)
        assert {c.kind for c in low.collectives} <= {"all_reduce", "all_gather"}
        reduces = [
            n
            for n in low.program.graph.nodes
            if "collective" in n.meta and n.meta["collective"].kind == "all_reduce"
        ]
        whole = x.numel() * models.WIDTH * 8
        counts[layers] = collections.Counter(
            n.meta["phase"] for n in reduces if n.meta["collective"].nbytes == whole
        )
    per_layer = {
        phase: (counts[4][phase] - counts[1][phase]) / 3 for phase in ("forward", "backward")
    }
    assert per_layer == {"forward": 2, "backward": 2}
    assert counts[2]["forward"] == 2 * 2 + 1, "and one for the vocabulary-parallel embedding"
    assert counts[2]["backward"] == 2 * 2 + 1, "and one for the vocabulary-parallel head"


def test_vocabulary_parallel_cross_entropy_sends_no_logits() -> None:
    params, (x, y) = models.gpt_params(), models.tokens(8)
    with sf.fake_world(11):
        mesh = sf.make_mesh((11,), ("tp",))
        placed = schemes.by_name(params, lambda name, p: P(None, "tp") if name == "head" else P())
        low = sf.shard(models.STEPS["gpt"], mesh, (placed, P(), P()), backend="aten").lower(
            params, x, y
        )
    tokens = x.numel()
    forward = [
        n.meta["collective"].nbytes
        for n in low.program.graph.nodes
        if "collective" in n.meta and n.meta["phase"] == "forward"
    ]
    assert sorted(forward, reverse=True) == [tokens * 8] * 2 + [SCALAR] * (len(forward) - 2), (
        "a maximum and a sum for each token"
    )


def test_fully_sharded_sends_one_all_gather_per_use_and_one_reduce_scatter_per_parameter() -> None:
    params, low = lowered("gpt", {"dp": 2}, "fully_sharded", P("dp"), batch_size=64)
    kinds = collections.Counter(c.kind for c in low.collectives if c.nbytes > SCALAR)
    names = paths(params)
    lookups = [n for n in names if n in ("['tok']", "['pos']")]  # read in the forward only
    assert kinds == {"all_gather": 2 * len(names) - len(lookups), "reduce_scatter": len(names)}
    phases = collections.Counter(
        n.meta["phase"]
        for n in low.program.graph.nodes
        if n.meta.get("collective") and "gather" in str(n.target)
    )
    assert phases == {"forward": len(names), "backward": len(names) - len(lookups)}


def test_a_gradient_has_its_parameters_placement() -> None:
    for scheme, axes in (("fully_sharded", {"dp": 2}), ("mixed", {"dp": 2, "tp": 2})):
        params, low = lowered("gpt", axes, scheme, P("dp"))
        count = len(leaves(params))
        out = low.program.out_placements
        assert out[:count] == out[count : 2 * count] == low.program.in_placements[:count]


def test_s1_2_all_reduce_and_wait_stay_above_one_rank_and_are_elided_at_one() -> None:
    for n in (1, 2):
        _, low = lowered("gpt", {"dp": n}, "replicated", P("dp"))
        waits = sum("wait_tensor" in str(node.target) for node in low.program.graph.nodes)
        assert (
            waits == len(low.collectives) == (0 if n == 1 else len(nbytes(models.gpt_params())) + 2)
        )
        said = "collectives over axes of size 1 were removed" in str(low)
        assert said == (n == 1)


def test_backward_collectives_know_the_forward_line_they_belong_to() -> None:
    _, low = lowered("gpt", {"tp": 3}, "tensor_parallel", P())
    backward = [
        n
        for n in low.program.graph.nodes
        if "collective" in n.meta and n.meta["phase"] == "backward"
    ]
    assert backward
    assert all("models.py" in n.meta["collective"].source for n in backward)
    lines = {int(n.meta["collective"].source.rsplit(":", 1)[1]) for n in backward}
    first = models.gpt_loss.__code__.co_firstlineno
    assert all(first - 6 <= line <= first + 12 for line in lines), (
        "in gpt_loss or its norm, not at the call of grad"
    )


@pytest.mark.parametrize("n", [2, 3])
def test_a_parameter_that_is_read_as_it_is_and_turned_around_is_gathered_once(n: int) -> None:
    w, x = (
        torch.ones(6, 6, dtype=torch.float64),
        torch.arange(42.0, dtype=torch.float64).reshape(7, 6),
    )
    fn = lambda w, x: (x @ w) @ w.t()
    with sf.fake_world(n):
        made = sf.shard(
            fn, sf.make_mesh((n,), ("dp",)), (P("dp"), P("dp")), P("dp"), backend="aten"
        )
        assert [(c.kind, c.nbytes) for c in made.lower(w, x).collectives] == [
            ("all_gather", 6 * 6 * 8)
        ]
        torch.testing.assert_close(sf.full(made(w, x)), fn(w, x), rtol=1e-12, atol=1e-12)
