"""custom_jvp: a rule for forward mode, which reverse mode transposes."""

from __future__ import annotations

import torch
from equality import close
from torch import Tensor

import shardfn as sf

F64 = torch.float64


def test_a_rule_that_calls_its_function_counts_at_every_order() -> None:
    @sf.custom_jvp
    def exp(x: Tensor) -> Tensor:
        return x.exp()

    exp.defjvp(lambda primals, tangents: (exp(*primals), exp(*primals) * tangents[0] * 2))
    zero = torch.tensor(0.0, dtype=F64)
    close(sf.grad(exp)(zero), torch.tensor(2.0, dtype=F64))
    close(sf.grad(sf.grad(sf.grad(exp)))(zero), torch.tensor(8.0, dtype=F64))


def test_a_rule_keeps_a_function_from_overflowing() -> None:
    softplus = sf.custom_jvp(lambda x: torch.log1p(torch.exp(x)))
    softplus.defjvp(
        lambda primals, tangents: (softplus(*primals), torch.sigmoid(primals[0]) * tangents[0])
    )
    close(sf.grad(softplus)(torch.tensor(1000.0, dtype=F64)), torch.tensor(1.0, dtype=F64))
