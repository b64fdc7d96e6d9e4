"""The prims of per-rank code: the sizes of local and global tensors, and collectives of vmap."""

from __future__ import annotations

import torch

from shardfn import _compat
from shardfn.ops import shard_map
from shardfn.ops.prims import CALLS


def on_fakes(call: object, shape: tuple[int, ...], *constants: object) -> torch.Tensor:
    """The result of a prim of a transposed fake tensor."""
    with _compat.FakeTensorMode():
        x = torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))
        return CALLS[call].op(x, *constants)


def test_a_local_tensor_divides_the_sharded_dims_and_a_global_one_multiplies() -> None:
    text = "a:2=0,b:3=0,c:5="
    local = on_fakes(shard_map.to_local, (12, 7), text)
    assert local.shape == (2, 7)
    assert on_fakes(shard_map.from_local, (2, 7), text).shape == (12, 7)


def test_the_order_of_dims_in_memory_is_that_of_the_argument() -> None:
    for call, constants, shape in (
        (shard_map.to_local, ("a:2=0",), (2, 6)),
        (shard_map.all_gather, ("a", 3, 1), (4, 18)),
        (shard_map.own_piece, ("a", 2, 1), (4, 3)),
        (shard_map.all_to_all, ("a", 2, 0, 1), (2, 12)),
    ):
        x = on_fakes(call, (4, 6), *constants)
        assert (x.shape, x.stride()) == (shape, (1, shape[0]))


def test_the_transpose_of_a_permute_sends_everything_back() -> None:
    row = CALLS[shard_map.ppermute]
    with _compat.FakeTensorMode():
        x = torch.empty(3)
        traced: list[object] = []
        assert row.transpose is not None
        with _Recorder(traced):
            row.transpose(x, "a", "0>1,1>2")
    assert ("a", "1>0,2>1") in traced


class _Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the constants of each op."""

    def __init__(self, constants: list[object]) -> None:
        super().__init__()
        self.constants = constants

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.constants.append(tuple(args[1:]))
        return func(*args, **(kwargs or {}))


def test_a_gather_over_a_vmap_gives_each_sample_all_values() -> None:
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    gather = lambda row: shard_map.mapped_gather(row, 3, 1)
    assert torch.equal(torch.func.vmap(gather)(x), x.expand(3, 3, 2))
    index = lambda row: row * 0 + shard_map.mapped_index(3, 1, "cpu")
    assert torch.func.vmap(index)(x)[:, 0].tolist() == [0, 1, 2]


def test_the_transpose_of_a_gather_over_a_vmap_sums_over_samples() -> None:
    x = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    weights = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3, 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        mapped = torch.func.vmap(lambda row, w: (shard_map.mapped_gather(row, 3, 2) * w).sum())
        return mapped(x, weights).sum()

    got = torch.func.grad(loss)(x)
    assert torch.equal(got, weights.sum(0).expand(3, 2))
