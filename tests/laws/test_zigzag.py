"""Law 0 where a dim is a zigzag: only where elements lie changes, no value of a program. Positions
are global: rotary tables, masks, shifted labels, random numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import schemes
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves
from worlds import simulated

import shardfn as sf
from shardfn import P

LENGTH = 24  # 2n divides it for 2, 3 and 4 ranks
MESHES: dict[str, tuple[dict[str, int], P]] = {
    "2": ({"cp": 2}, P(None, sf.zigzag("cp"))),
    "3": ({"cp": 3}, P(None, sf.zigzag("cp"))),
    "4": ({"cp": 4}, P(None, sf.zigzag("cp"))),
    "1": ({"cp": 1}, P(None, sf.zigzag("cp"))),
    "2x2": ({"dp": 2, "cp": 2}, P("dp", sf.zigzag("cp"))),
    "3x2": ({"cp": 3, "dp": 2}, P("dp", sf.zigzag("cp"))),
    "2x2 features": ({"cp": 2, "tp": 2}, P(None, sf.zigzag("cp"), "tp")),
    "2x3 one dim": ({"cp": 2, "tp": 3}, P(None, (sf.zigzag("cp"), "tp"))),
    "2x2 one dim": ({"tp": 2, "cp": 2}, P(None, (sf.zigzag("cp"), "tp"))),
}


def drawn(*shape: int) -> torch.Tensor:
    """Values that a function may make too."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float64)
    return (numbers * 1.7 + 0.3).sin().view(shape)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (B, T, D)."""
    half = x.shape[-1] // 2
    steps = torch.arange(x.shape[1], dtype=x.dtype)
    angles = steps[:, None] * torch.arange(1, half + 1, dtype=x.dtype)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * angles.cos() - second * angles.sin(), first * angles.sin() + second]
    return torch.cat(turned, -1)


def attended(x: torch.Tensor) -> torch.Tensor:
    """Causal attention of (B, T, D), with a mask of compared positions."""
    at = torch.arange(x.shape[1])
    scores = x @ x.transpose(1, 2)  # (B, T, T)
    masked = scores.masked_fill(at[:, None] < at, float("-inf"))
    return masked.softmax(-1) @ x


def heads(x: torch.Tensor) -> torch.Tensor:
    q = x.view(*x.shape[:2], 2, -1).transpose(1, 2)  # (B, H, T, D / H)
    out = F.scaled_dot_product_attention(q, q * 2, q.sin(), is_causal=True)
    return out.transpose(1, 2).reshape(x.shape)


def layers(x: torch.Tensor) -> torch.Tensor:
    ws = torch.stack([torch.eye(x.shape[-1], dtype=x.dtype) * k for k in (0.5, -0.25, 2)])
    return sf.scan(lambda h, w: (torch.tanh(h @ w) + h, h.sum((0, 1))), x, ws)[0]


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of (B, T, D)
    "elements": lambda x: torch.sin(x * 2 + 1).clamp(-0.5, 0.7) * x,
    "a product": lambda x: x @ drawn(x.shape[-1], 5),
    "products of positions": lambda x: x.transpose(1, 2) @ x,
    "softmax of features": lambda x: x.softmax(-1),
    "softmax of positions": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "embedding": lambda x: F.embedding((x[..., 0] * 3).long() % 5, drawn(5, 4)) * x[..., :1],
    "rotary positions": rotated,
    "shifted": lambda x: x[:, 1:] * x[:, :-1],
    "causal mask": attended,
    "attention": heads,
    "mean": lambda x: x.mean(1) + x.std(),
    "cumsum": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1)[0],
    "largest": lambda x: x * (x.argmax(1, keepdim=True) + x.max(1, keepdim=True)[0]),
    "flipped": lambda x: x.flip(1) + x.roll(1, 1),
    "triangle": lambda x: (x @ x.transpose(1, 2)).tril() @ x,
    "dropout": lambda x: F.dropout(x, 0.4),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(x.shape[1], 1),
    "merged": lambda x: x.reshape(-1, x.shape[-1]) * 2,
    "merged with features": lambda x: x.flatten(1) * 2,
    "split": lambda x: x.view(x.shape[0], 2, -1, x.shape[-1]).sin(),
    "split small": lambda x: x.view(x.shape[0], -1, 2, x.shape[-1]).sin(),
    "transposed": lambda x: x.permute(1, 2, 0).contiguous() + 1,
    "repeated": lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1),
    "joined": lambda x: torch.cat([x, x * 2], 1),
    "stacked": lambda x: torch.stack([x, x.sin()], 1),
    "in parts": lambda x: x.chunk(2, 1)[1] * x.chunk(2, 1)[0],
    "one position": lambda x: x[:, 3] + x[:, -1],
    "every third": lambda x: x[:, ::3],
    "chosen": lambda x: x[:, torch.tensor([5, 0, 7, 7])],
    "gathered": lambda x: x.gather(1, (x[:, :6].abs() * 7).long() % x.shape[1]),
    "written": lambda x: x.index_add(1, torch.tensor([1, 1, 6]), x[:, :3]),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), drawn(2, x.shape[-1], 3), padding=1),
    "windows": lambda x: x.unfold(1, 4, 2).sum(-1),
    "padded": lambda x: F.pad(x, (0, 0, 2, 1)),
    "differences": lambda x: x.diff(dim=1),
    "a Fourier transform": lambda x: torch.fft.fft(x, dim=1).real,
    "layers": layers,
    "each sample": lambda x: sf.vmap(rotated, in_axes=1, out_axes=1)(x[:, :, None]),
    "recomputed": lambda x: sf.checkpoint(rotated)(x) * 2,
    "a constraint": lambda x: sf.constrain(x.sin(), P(None, "cp")).cos(),
    "constrained": lambda x: sf.constrain(x[:, :1] + x, P(None, sf.zigzag("cp"))).cos(),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_a_program_computes_what_it_does_on_one_device(name: str, mesh: str) -> None:
    axes, spec = MESHES[mesh]

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = CASES[name](x)
        return (y * y.detach().sin()).sum(), y

    step = sf.value_and_grad(loss, has_aux=True)
    x = drawn(4, LENGTH, 6)
    sf.random.state.seed(3)
    (wanted_loss, wanted), gradient = sf.jit(step, backend="aten")(x)
    with simulated(**axes) as at:
        sf.random.state.seed(3)
        got = sf.full(sf.shard(step, at, spec, backend="aten")(x))
    torch.testing.assert_close(got, ((wanted_loss, wanted), gradient), rtol=1e-10, atol=1e-10)


KEEPING = ("elements", "a product", "softmax of features", "layer norm", "rotary positions")
KEEPING = (*KEEPING, "dropout", "noise", "layers", "recomputed", "each sample")


@pytest.mark.parametrize("name", KEEPING)
def test_ops_on_each_position_keep_the_zigzag_and_send_nothing(name: str) -> None:
    with simulated(dp=2, cp=2) as mesh:
        f = sf.shard(CASES[name], mesh, P("dp", sf.zigzag("cp")), backend="aten")
        x = drawn(4, LENGTH, 6)
        assert f(x).placements == (Shard(0), sf.Zigzag(1))
        assert not f.lower(x).collectives


@pytest.mark.parametrize("name", [name for name in KEEPING if name not in ("dropout", "noise")])
def test_they_keep_a_zigzag_whose_chunks_another_axis_shards(name: str) -> None:
    with simulated(tp=2, cp=2) as mesh:
        x, spec = drawn(4, LENGTH, 6), P(None, (sf.zigzag("cp"), "tp"))
        f = sf.shard(CASES[name], mesh, spec, backend="aten")
        assert f(x).placements == sf.distribute(x, mesh, spec).placements
        assert not f.lower(x).collectives


def tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = (drawn(4, length + 1) * 100).long() % models.VOCAB
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()


@pytest.mark.parametrize("scheme", ["replicated", "fully_sharded"])
@pytest.mark.parametrize("mesh", ["2", "4", "2x2", "3x2", "2x2 one dim"])
def test_a_step_of_a_gpt_is_that_of_one_device(mesh: str, scheme: str) -> None:
    axes, spec = MESHES[mesh]
    params = models.gpt_params()
    params["pos"] = drawn(LENGTH, models.WIDTH)
    x, y = tokens(LENGTH)
    wanted = models.oracle(models.gpt_loss, params, x, y)
    placed = getattr(schemes, scheme)(params) if "dp" in axes else P()
    with simulated(**axes) as at:
        step = sf.shard(models.sgd_step(models.gpt_loss), at, (placed, spec, spec), backend="aten")
        got = sf.full(step(params, x, y))
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_inductor_computes_what_one_device_does() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        at_positions = rotated(x) * F.dropout(x, 0.3)
        return (attended(at_positions).cumsum(1) * x).sum()

    step = sf.value_and_grad(loss)
    x = drawn(4, LENGTH, 6)
    sf.random.state.seed(5)
    wanted = sf.jit(step, backend="aten")(x)
    with simulated(dp=2, cp=2) as mesh:
        sf.random.state.seed(5)
        got = sf.full(sf.shard(step, mesh, P("dp", sf.zigzag("cp")), backend="inductor")(x))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_redistribution_holds_between_any_placements() -> None:
    turning = (sf.zigzag("cp"), "tp"), (sf.zigzag("tp"), "cp")
    parts = (None, "cp", sf.zigzag("cp"), "tp", sf.zigzag("tp"), "cp*3", ("cp", "tp"), *turning)
    pairs = itertools.product(parts, parts)
    specs = [P(a, b) for a, b in pairs if not {*_axes(a)} & {*_axes(b)}]
    x = drawn(24, 24)
    with simulated(cp=2, tp=3) as mesh:
        for before, after in itertools.product(specs[::2], specs[1::2]):
            given = sf.distribute(x, mesh, before)
            move = sf.shard(lambda x: x, mesh, None, after, backend="aten")
            moved = move(given)
            assert torch.equal(sf.full(moved), x), (before, after)
            wanted = sf.distribute(x, mesh, after)
            assert moved.placements == wanted.placements
            for rank in range(6):
                assert torch.equal(moved.to_local(rank=rank), wanted.to_local(rank=rank))


def _axes(part: Any) -> tuple[str, ...]:
    names = part if isinstance(part, tuple) else () if part is None else (part,)
    return tuple(n.axis if isinstance(n, sf.zigzag) else n.partition("*")[0] for n in names)


EXPERTS, CHOICES = 4, 2  # experts, and those of each token


def experts(
    x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Tokens (B, T, D), sorted by expert and put back."""
    rows = x.flatten(0, 1)
    weights, ids = torch.topk(torch.softmax(rows @ router, -1), CHOICES, -1)
    ids, perm = torch.sort(ids.flatten())
    h = torch.bmm(rows[perm // CHOICES].unsqueeze(1), up[ids]).tanh()
    y = torch.bmm(h, down[ids]).squeeze(1) * weights.flatten()[perm].unsqueeze(-1)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return y[inverse].view(-1, CHOICES, x.shape[-1]).sum(1).view(x.shape)


@pytest.mark.parametrize("over", [None, "cp", "dp"])
def test_experts_take_the_tokens_of_a_balanced_sequence_where_they_are(over: str | None) -> None:
    loss = lambda x, *args: (experts(rotated(x), *args) * drawn(8, 6)).sin().sum()
    step = sf.value_and_grad(loss, argnums=(0, 1, 2, 3))
    sizes = (4, 8, 6), (6, EXPERTS), (EXPERTS, 6, 5), (EXPERTS, 5, 6)
    args = [drawn(*shape) for shape in sizes]
    wanted = step(*args)
    sent = []
    with simulated(dp=2, cp=2) as mesh:
        for part in ("cp", sf.zigzag("cp")):
            specs = P("dp", part), P(), P(over), P(over)
            f = sf.shard(step, mesh, specs, backend="aten")
            torch.testing.assert_close(sf.full(f(*args)), wanted, rtol=1e-10, atol=1e-10)
            sent.append(sorted((c.kind, c.axis, c.nbytes) for c in f.lower(*args).collectives))
    assert sent[0] == sent[1], "what plain chunks send"
