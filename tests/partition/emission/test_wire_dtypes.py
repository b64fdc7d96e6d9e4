"""Values of dtypes that Gloo does not carry cross it all the same, on real processes and
simulated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from shardfn import P

DTYPES = (torch.complex128, torch.complex64, torch.int16, torch.bool, torch.float16, torch.uint8)


def values(dtype: torch.dtype) -> torch.Tensor:
    x = torch.arange(15, dtype=torch.float64).view(5, 3) % 7
    return torch.complex(x, 1 - x).to(dtype) if dtype.is_complex else x.to(dtype)


def moved(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gathered, exchanged, and, where there is a sum, reduced and scattered."""
    out = {"gather": sf.constrain(x, P()), "exchange": sf.constrain(x, P(None, "a"))}
    if x.dtype.is_complex:  # torch conjugates and negates when it reads
        out |= {
            "conjugate": sf.constrain(x.conj(), P()),
            "negative": sf.constrain(x.conj().imag, P()),
            "turned": x.conj().flip(0),
        }
        out |= {"scalar": x.sum()}
    if x.dtype != torch.bool:
        total = x.sum(0, dtype=x.dtype)
        out |= {
            "reduce": total,
            "scatter": sf.constrain(x.T.contiguous().sum(1, dtype=x.dtype), P("a")),
        }
    return out


def everything() -> dict[str, Any]:
    mesh = sf.make_mesh((2,), ("a",))
    return {
        str(d): sf.full(sf.shard(moved, mesh, P("a"), backend="aten")(values(d))) for d in DTYPES
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_gathered_exchanged_reduced_and_scattered(
    dtype: torch.dtype, ranks: list[dict[str, Any]]
) -> None:
    wanted = moved(values(dtype))
    with sf.fake_world(2):
        simulated = everything()
    for found in (*ranks, simulated):
        torch.testing.assert_close(found[str(dtype)], wanted, rtol=0, atol=0)


def test_booleans_are_sent_as_bytes_which_no_compiler_promotes() -> None:
    """Inductor gathers booleans as int64 (torch 2.13)."""
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("a",))
        fn = sf.shard(lambda x: sf.constrain(x, P()), mesh, P("a"))
        lowered = fn.lower(torch.ones(6, dtype=torch.bool))
    nodes = lowered.program.graph.nodes
    sent = [n.all_input_nodes[0] for n in nodes if "collective" in n.meta]
    assert [x.meta["val"].dtype for x in sent] == [torch.uint8]
