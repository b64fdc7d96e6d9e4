"""Reductions by hand: derivatives through a tensor that is overwritten, and dtypes that an op does
not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equality import close
from message import without_line
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf

Op = dist.ReduceOp
DRAWN = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).double()


def vocabulary(x: Any, group: Any) -> Any:
    """Cross entropy over logits that ranks share: each has 5 classes."""
    classes = torch.tensor([1, 7, 3])
    top = x.amax(-1)
    dist.all_reduce(top, op=Op.MAX, group=group)
    total = (x - top[:, None]).exp().sum(-1)
    dist.all_reduce(total, group=group)
    mine = classes - dist.get_rank(group) * 5
    found = (x - top[:, None]).gather(1, mine.clamp(0, 4)[:, None])[:, 0]
    found = torch.where((mine >= 0) & (mine < 5), found, 0.0)
    dist.all_reduce(found, group=group)
    product = x.exp()  # its derivative reads what the collective overwrites
    dist.all_reduce(product, op=Op.PRODUCT, group=group)
    return (total.log() - found).mean() + product.sum()


def plain(logits: Any) -> Any:
    classes = torch.tensor([1, 7, 3])
    whole = torch.nn.functional.cross_entropy(torch.cat([*logits], 1), classes)
    return whole + logits.sum(0).exp().sum()


def test_s7_3_a_derivative_reads_what_a_collective_overwrites() -> None:
    with sf.fake_world(2):
        group = sf.make_mesh((2,), ("tp",)).get_group()
        loss = lambda x: vocabulary(x, group)
        found = sf.jit(sf.grad(loss), backend="aten")(SimulatedTensor([*DRAWN]))
    wanted = torch.func.grad(plain)(DRAWN)
    close(found.shards, [*wanted])


def test_a_sum_in_place_counts_once_as_one_device_has_it() -> None:
    a, b = DRAWN[0][:, :4], DRAWN[1][:2, :].T[:4]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))

        def product(a: Any, b: Any) -> Any:
            y = a @ b
            dist.all_reduce(y)
            return y

        mapped = local_map(
            product,
            out_placements=([Replicate()],),
            in_placements=([Shard(1)], [Shard(0)]),
            device_mesh=mesh,
        )
        loss = lambda a, b: mapped(a, b).square().sum().full_tensor()
        args = [
            distribute_tensor(a.contiguous(), mesh, [Shard(1)]),
            distribute_tensor(b.contiguous(), mesh, [Shard(0)]),
        ]
        found = sf.jit(sf.grad(loss), backend="aten")(*args)
        assert_close(sf.full(found), 2 * a @ b @ b.T)


def no_grad(x: Any) -> Any:
    """A tensor that is overwritten without a derivative keeps that of what it was."""
    y = x * 3
    with torch.no_grad():
        dist.all_reduce(y)
    return y.sum()


def test_without_grad_a_tensor_keeps_its_derivative() -> None:
    with sf.fake_world(2):
        sf.make_mesh((2,), ("tp",))
        found = sf.grad(no_grad)(SimulatedTensor([*DRAWN]))
    assert_close(found.shards, [torch.full_like(DRAWN[0], 3.0)] * 2)


def shown(x: Any) -> Any:
    y = x.exp()
    view = y.view(-1)
    dist.all_reduce(y)
    return view


def test_a_view_shows_the_sum() -> None:
    with sf.fake_world(2):
        sf.make_mesh((2,), ("tp",))
        found = sf.jit(shown, backend="aten")(SimulatedTensor([*DRAWN]))
    assert_close(found.shards, [DRAWN.exp().sum(0).view(-1)] * 2)


def read_twice(x: Any) -> Any:
    y = x.exp()
    y.view(-1)[0]
    dist.all_reduce(y)
    return y.sum()


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bits of floats": (
        lambda x: dist.all_reduce(x * 1, op=Op.BAND),
        """torch.distributed.all_reduce: op is band, of torch.float64
  needed: integers or bool
  try: x.view(dtype) with an integer dtype, or another reduction""",
    ),
    "the largest complex number": (
        lambda x: dist.all_reduce(x * 1j, op=Op.MAX),
        """torch.distributed.all_reduce: op is max, of torch.complex128
  needed: real numbers
  try: op=max of torch.view_as_real(x), or of x.abs()""",
    ),
    "a mean of integers": (
        lambda x: dist.all_reduce(x.int(), op=Op.AVG),
        """torch.distributed.all_reduce: op is avg, of torch.int32
  needed: floating numbers
  try: op=dist.ReduceOp.SUM, and divide by dist.get_world_size(group)""",
    ),
    "a write to what a derivative reads": (
        sf.grad(read_twice),
        """jit(grad(read_twice)): the function writes in place to a tensor that a derivative reads
  needed: one pure graph of tensor ops
  try: write to a copy, after y = y.clone(); or compute a new value""",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named_with_what_to_do(case: str) -> None:
    fn, text = CASES[case]
    with sf.fake_world(2):
        sf.make_mesh((2,), ("tp",))
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(fn, backend="aten")(DRAWN[0])
    assert without_line(caught.value) == text


OF_ONE_RANK: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "tp": (lambda group: dist.get_global_rank(group, 1), [1, 1, 1, 4, 4, 4]),
    "dp": (lambda group: dist.get_process_group_ranks(group)[1], [3, 4, 5, 3, 4, 5]),
}


def sent_by(find: Callable[[Any], Any], axis: str) -> Any:
    """What the ranks of a mesh (2, 3) have after a broadcast over an axis."""
    mesh = sf.make_mesh((2, 3), ("dp", "tp"))
    group = mesh.get_group(axis)

    def fn(y: Any) -> Any:
        y = y.clone()
        dist.broadcast(y, src=find(group), group=group)
        return y

    spec = sf.P(("dp", "tp"))
    per_rank = sf.shard_map(fn, mesh, (spec,), spec)
    x = torch.arange(6.0, dtype=torch.float64)
    return sf.full(sf.jit(per_rank, backend="aten")(x)).tolist()


@pytest.mark.parametrize("axis", OF_ONE_RANK)
def test_s7_3_a_rank_of_the_world_that_differs_between_groups(axis: str) -> None:
    find, wanted = OF_ONE_RANK[axis]
    with sf.fake_world(6):
        assert sent_by(find, axis) == wanted


DIFFERING: dict[str, Callable[[Any], Any]] = {
    "its own number": lambda group: dist.get_rank(),
    "the next one's": lambda group: (
        dist.get_global_rank(group, 0) + (dist.get_rank(group) + 1) % dist.get_world_size(group)
    ),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_ranks_of_a_group_that_name_different_ranks_are_refused(name: str) -> None:
    with sf.fake_world(6), pytest.raises(sf.CaptureError) as caught:
        sent_by(DIFFERING[name], "tp")
    assert without_line(str(caught.value)) == (
        "torch.distributed.broadcast: src or dst varies over tp, so ranks of one group would "
        "name different ranks\n  needed: the same src or dst on all ranks of the group\n  "
        "try: dist.get_global_rank(group, 0); or group_src= or group_dst= with a Python number"
    )
