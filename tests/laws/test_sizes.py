"""A program that was captured with symbols for its sizes gives the values of one that was
captured for them alone, at sizes that neither has seen; or neither runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from programs import Drawn, programs
from torch.testing import assert_close

import shardfn as sf
from shardfn import P

RTOL = 1e-9


def arguments(drawn: Drawn, more: int) -> list[torch.Tensor]:
    """Inputs whose sizes of 2 and more have grown."""
    g = torch.Generator().manual_seed(more)
    shapes = [[n + more if n > 1 else n for n in shape] for shape, _ in drawn.inputs.values()]
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


REFUSED = object()


def tried(fn: Any, args: list[torch.Tensor], errors: type[Exception]) -> Any:
    """The results of a call, or REFUSED where it raises one of these errors."""
    try:
        return sf.full(fn(*args))
    except errors:
        return REFUSED


def errors_of(program: Any, args: list[torch.Tensor]) -> type[Exception]:
    """What a sharded call may raise: any error of torch's, where the plain program raises one."""
    return Exception if tried(program, args, Exception) is REFUSED else sf.ShardError


@given(programs(), st.sampled_from((1, 2)))
@examples(8)
def test_symbols_for_sizes_change_no_value(drawn: Drawn, more: int) -> None:
    program = drawn.function()
    placed = [spec if isinstance(spec, P) else None for _, spec in drawn.inputs.values()]
    with sf.fake_world(math.prod(drawn.mesh.values())):
        mesh = sf.make_mesh(tuple(drawn.mesh.values()), tuple(drawn.mesh))
        many, alone = (
            sf.shard(lambda *xs: program(*xs), mesh, tuple(placed), backend="aten", dynamic=d)
            for d in (True, None)
        )
        for args in (drawn.arguments(), arguments(drawn, more)):
            errors = errors_of(program, args)
            got, wanted = (tried(fn, args, errors) for fn in (many, alone))
            if wanted is REFUSED or got is REFUSED:
                assert got is wanted
                continue
            assert_close(got, wanted, rtol=RTOL, atol=RTOL, equal_nan=True)
