"""torch.distributed.nn.functional inside `vmap`, forward derivatives and `shard_map`. Next to torch
on real ranks: tests/dtensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.nn import functional as forms
from torch.testing import assert_close
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P

ROWS = [torch.arange(6.0).view(2, 3) / 7 + k for k in range(2)]


def mixed(x: Any) -> Any:
    every = torch.stack(forms.all_gather(x.sin()))
    return forms.all_reduce(x) * every.sum(0) + forms.broadcast(x, 1)


def plain(x: Any) -> Any:
    return x.sum(0) * x.sin().sum(0) + x[1]


def test_s7_3_forms_under_vmap_and_forward_derivatives() -> None:
    own = SimulatedTensor(ROWS)
    wanted, tangent = torch.func.jvp(plain, *[(torch.stack(ROWS),)] * 2)
    with sf.fake_world(2):
        sf.make_mesh((2,), ("dp",))
        rows = sf.jit(sf.vmap(mixed), backend="aten")(own)
        pair = sf.jit(lambda x: sf.jvp(mixed, (x,), (x,)), backend="aten")(own)
    assert_close(rows.shards, [wanted] * 2)
    assert_close(pair[0].shards, [wanted] * 2)
    assert_close(pair[1].shards, [tangent] * 2)


def test_s7_3_forms_in_a_shard_map() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        mapped = sf.shard_map(mixed, mesh, P("dp"), P(), backend="aten")
        found = sf.full(mapped(torch.cat(ROWS)))
        loss = lambda x: mapped(x).square().sum()
        gradient = sf.full(sf.grad(loss)(torch.cat(ROWS)))
    stacked = torch.stack(ROWS)
    assert_close(found, plain(stacked))
    wanted = torch.func.grad(lambda x: plain(x).square().sum())(stacked)
    assert_close(gradient, wanted.flatten(0, 1))
