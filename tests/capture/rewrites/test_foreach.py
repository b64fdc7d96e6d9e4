"""torch._foreach ops: equal to one op for each tensor, and placed so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.capture.rewrites.foreach import table

F64 = torch.float64
TORCH: Any = torch
G = torch.Generator().manual_seed(0)
A, B, C = (
    [torch.rand(*s, generator=G, dtype=F64) + 0.1 for s in ((3, 3), (5, 5))] for _ in range(3)
)


def arguments(op: Any) -> tuple[Any, ...]:
    """An argument for each that the schema of an op needs."""
    lists = iter([A, B, C])
    values: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or argument.has_default_value():
            continue
        values.append(
            next(lists)
            if kind == "List[Tensor]"
            else [0.5, 2.0]
            if kind == "List[number]"
            else torch.tensor(0.5, dtype=F64)
            if kind == "Tensor"
            else 2.0
        )
    return tuple(values)


OPS = [op for op in table() if "_amp_" not in str(op)]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_a_decomposition_equals_its_op(op: Any) -> None:
    args = arguments(op)
    torch.testing.assert_close(table()[op](*args), op(*args), equal_nan=True)


def test_options_count() -> None:
    for op, args, options in (
        (torch.ops.aten._foreach_add.List, (A, B), {"alpha": 3}),
        (torch.ops.aten._foreach_norm.Scalar, (A, 1), {"dtype": F64}),
        (torch.ops.aten._foreach_addcmul.Scalar, (A, B, C, 0.5), {}),
        (torch.ops.aten._foreach_copy.default, (A, B), {}),
    ):
        torch.testing.assert_close(table()[op](*args, **options), op(*args, **options))


def test_a_norm_of_shards_gathers_nothing() -> None:
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        placed = [P("a"), P()]
        fn = sf.shard(torch.nn.utils.get_total_norm, mesh, (placed,), P())
        (sent,) = fn.lower(A).collectives
        assert sent.kind == "all_reduce"
        norm = sf.full(fn(A))
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(A))


def test_writing_to_lists_keeps_their_placements() -> None:
    def stepped(params: Any, grads: Any) -> Any:
        params = [p.clone() for p in params]
        TORCH._foreach_mul_(params, 0.9)
        TORCH._foreach_addcdiv_(params, grads, C, -0.1)
        TORCH._foreach_lerp_(params, grads, 0.25)
        return params

    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        fn = sf.shard(stepped, mesh, (P("a"), P("a")), backend="aten")
        assert fn.lower(A, B).collectives == ()
        torch.testing.assert_close(sf.full(fn(A, B)), stepped(A, B))


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
def test_unscaling_says_whether_any_element_of_any_shard_is_not_finite(value: float) -> None:
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale.default
    grads = [x.clone() for x in A]
    grads[1][4, 4] = value
    zero = torch.zeros(())
    inverse = torch.tensor(0.5)

    def found(grads: Any) -> Any:
        grads = [g.clone() for g in grads]
        found = zero.clone()
        TORCH._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        return grads, found

    wanted = op(grads, zero, inverse)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        got = sf.full(sf.shard(found, mesh, (P("a"),), backend="aten")(grads))
    torch.testing.assert_close(list(got), list(wanted), equal_nan=True)
