"""Strided shards: an axis that shards an inner factor of a dim, and axes on one dim in any
order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from message import without_line
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardfn as sf
from shardfn import P, _compat
from shardfn.mesh import axes_of
from shardfn.placement import marks_of, names_in, torch_placements

DTYPE = torch.float64
ORDERED = P(("b", "a"))


def drawn(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=g, dtype=DTYPE)


def _attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT, -1) @ k


def _likelihood(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    at = x[..., : w.shape[1]].argmax(-1)
    return F.cross_entropy((x @ w).flatten(0, 1), at.flatten())


def _grouped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def _in_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x @ w, (w.shape[1],)).flatten(0, 1)
    rows = torch.cat([y, y.sin()], 1)
    return (rows * rows.amax(1, keepdim=True)).view(*x.shape[:2], -1)


# (function, shapes, placements): an inner factor of a merged dim is sharded
CARRIED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[P, ...]]] = {
    "x @ w": (torch.matmul, ((3, 5, 4), (4, 7)), (P("b", "a"), P())),
    "eager attention": (_attend, ((3, 5, 2, 3),) * 2, (P("b", "a"),) * 2),
    "grouped heads": (_grouped, ((5, 12, 2, 3), (5, 6, 2, 3)), (P("b", "a"),) * 2),
    "einsum": (
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        ((3, 5, 2, 3),) * 2,
        (P("b", "a"),) * 2,
    ),
    "norms, parts and maxima": (_in_parts, ((3, 5, 4), (4, 2)), (P("b", "a"), P())),
    "cross entropy": (_likelihood, ((3, 5, 4), (4, 3)), (P("b", "a"), P())),
}


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("case", CARRIED)
def test_an_inner_factor_of_a_dim_stays_sharded(case: str, sizes: tuple[int, int]) -> None:
    """Uneven shards. Only sums are sent, of scalars and of the gradients of replicated weights."""
    fn, shapes, specs = CARRIED[case]
    args = [drawn(*shape) for shape in shapes]
    step = sf.value_and_grad(lambda *args: (fn(*args) ** 2).sum(), argnums=(0, 1))
    with sf.fake_world(math.prod(sizes)):
        mesh = sf.make_mesh(sizes, ("a", "b"))
        sharded = sf.shard(step, mesh, specs, backend="aten")
        low = sharded.lower(*args)
        whole = args[1].numel() if specs[1] == P() else 0
        assert {c.kind for c in low.collectives} <= {"all_reduce"}
        assert {c.nbytes for c in low.collectives} <= {8, 8 * whole}
        assert not low.fallbacks
        got = sf.full(sharded(*args))
    torch.testing.assert_close(got, step(*args), rtol=1e-12, atol=1e-12)


def test_a_strided_shard_prints_with_its_number_of_blocks() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        fn = sf.shard(torch.matmul, mesh, (P(None, "a"), P()), backend="aten")
        text = fn.lower(drawn(3, 5, 4), drawn(4, 7)).verbose(0)
    assert "-> f64[15@a*3, 4] (9, 4)" in text
    assert "@axis*n: each rank holds a shard of each of n equal blocks (strided)" in text


def test_a_result_leaves_in_plain_chunks() -> None:
    x = drawn(3, 5, 4)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        fn = sf.shard(lambda x: x.flatten(0, 1), mesh, P(None, "a"), backend="aten")
        out = fn(x)
        assert out.placements == (Shard(0),)
        assert torch.equal(sf.full(out), x.flatten(0, 1))


# Of axes a and b, and of the dim. Its chunks over b are uneven in the last four: some ranks
# have nothing in the last two.
SIZES = (
    (2, 2, 8), (2, 3, 9), (3, 2, 10), (2, 2, 7), (3, 2, 5), (2, 2, 1), (2, 3, 2)
)  # fmt: skip


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_axes_on_one_dim_go_in_any_order(case: tuple[int, int, int]) -> None:
    """In and out, inside, and for gradients; the last axis may be uneven."""
    a, b, n = case
    x, w = drawn(n, 3), drawn(5, n)
    fn = lambda x, w: (w @ sf.constrain(x * 2, P(("a", "b")))).sin()
    step = sf.value_and_grad(lambda x, w: (fn(x, w) ** 2).sum())
    wanted = step(x, w)
    with sf.fake_world(a * b):
        mesh = sf.make_mesh((a, b), ("a", "b"))
        placed = sf.distribute(x, mesh, ORDERED)
        assert torch.equal(sf.full(placed), x)
        for spec in (ORDERED, P(("a", "b")), P("a"), P(None, "b")):
            sharded = sf.shard(step, mesh, (spec, P("a")), backend="aten")
            loss, gradient = sharded(x, w)
            assert marks_of(list(gradient.placements), x.shape, axes_of(mesh)) == (
                marks_of(spec, x.shape, axes_of(mesh))
            )
            torch.testing.assert_close(sf.full((loss, gradient)), wanted, rtol=1e-12, atol=1e-12)
        for spec, out in itertools.product((ORDERED, None), (ORDERED, P("b", "a"))):
            moved = sf.shard(lambda x: x + 1, mesh, spec, out, backend="aten")
            assert torch.equal(sf.full(moved(placed)), x + 1)


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_an_order_of_axes_is_torchs_strided_shard(case: tuple[int, int, int]) -> None:
    """torch splits the dim, and then what that gives, as our ranks hold it."""
    a, b, n = case
    x = torch.arange(n)
    with sf.fake_world(a * b):
        mesh = sf.make_mesh((a, b), ("a", "b"))
        marks = marks_of(ORDERED, x.shape, axes_of(mesh))
        strided, plain = torch_placements(marks)
        assert marks_of([strided, plain], x.shape, axes_of(mesh)) == marks
        assert names_in(0, marks, axes_of(mesh)) == ("b", "a")
        local = _compat.local_tensor(sf.distribute(x, mesh, ORDERED)).shards
    outer, _ = strided._split_tensor(x, a, with_padding=False)
    wanted = [
        inner for part in outer for inner in plain._split_tensor(part, b, with_padding=False)[0]
    ]
    for got, part in zip(local, wanted, strict=True):
        assert torch.equal(got, part)


def test_three_axes_in_an_order_of_their_own() -> None:
    """Each rank holds the chunk whose number its indices spell in that order."""
    x = drawn(16, 2)
    everyone = list(itertools.product((0, 1), repeat=3))
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 2, 2), tuple("abc"))
        for order in itertools.permutations(range(3)):
            placed = sf.distribute(x, mesh, P(tuple("abc"[k] for k in order)))
            assert torch.equal(sf.full(placed), x)
            shards = _compat.local_tensor(placed).shards
            for at, shard in zip(everyone, shards, strict=True):
                number = everyone.index(tuple(at[k] for k in order))
                assert torch.equal(shard, x.chunk(8)[number])


def test_a_strided_shard_that_no_order_gives_is_refused_by_name() -> None:
    strided = _compat.strided_shard(0, 5)
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        with pytest.raises(sf.PlacementError) as caught:
            sf.distribute(drawn(12, 2), mesh, [strided, Replicate()])
    assert without_line(caught.value).splitlines()[0] == (
        "distribute: the tensor: [_StridedShard(dim=0, sf=5), Replicate()] has a strided "
        "shard that shardfn cannot express for shape (12, 2), neither by an order of axes nor "
        "by equal blocks; redistribute it to Shard"
    )


def _on_two_ranks() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = sf.make_mesh((2,), ("a",))
    step = sf.value_and_grad(lambda x, w: ((x @ w).sin() ** 2).sum(), argnums=(0, 1))
    sharded = sf.shard(step, mesh, (P(None, "a"), P()), backend="aten")
    x, w = drawn(3, 5, 4), drawn(4, 7)
    low = sharded.lower(x, w)
    assert {c.kind for c in low.collectives} == {"all_reduce"}
    flat = sf.shard(lambda x: x.flatten(0, 1) * 2, mesh, P(None, "a"), backend="aten")
    out = flat(x)
    assert isinstance(out, DTensor)
    return sf.full((sharded(x, w), out))


def test_two_processes_compute_what_the_simulator_does() -> None:
    with sf.fake_world(2):
        simulated = _on_two_ranks()
    for real in run_ranks(2, _on_two_ranks):
        torch.testing.assert_close(real, simulated, rtol=0, atol=0)
    x = drawn(3, 5, 4)
    torch.testing.assert_close(simulated[1], x.flatten(0, 1) * 2)


def _on_four_ranks() -> list[torch.Tensor]:
    """A step and a constraint with uneven shards over two axes in another order than the mesh's,
    and what torch gathers of its results.
    """
    mesh = sf.make_mesh((2, 2), ("a", "b"))
    x, w = drawn(7, 3), drawn(5, 7)
    fn = lambda x, w: (w @ sf.constrain(x * 2, P(("a", "b")))).sin()
    step = sf.value_and_grad(lambda x, w: (fn(x, w) ** 2).sum(), argnums=(0, 1))
    specs = (ORDERED, P(None, ("b", "a")))
    loss, gradients = sf.shard(step, mesh, specs, backend="aten")(x, w)
    assert all(isinstance(g, DTensor) for g in gradients)
    gathered = [g.full_tensor() for g in gradients]
    return [*sf.full((loss, *gradients)), *gathered]


def test_four_processes_hold_uneven_shards_in_another_order() -> None:
    x, w = drawn(7, 3), drawn(5, 7)
    fn = lambda x, w: ((w @ (x * 2)).sin() ** 2).sum()
    loss, gradients = sf.value_and_grad(fn, argnums=(0, 1))(x, w)
    for real in run_ranks(4, _on_four_ranks):
        wanted = [loss, *gradients, *gradients]
        torch.testing.assert_close(real, wanted, rtol=1e-12, atol=1e-12)
