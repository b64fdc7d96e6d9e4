"""DTensors on a stage of a pipeline, and zigzags, in code outside of functions: right, or refused
by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from worlds import simulated

import shardfn as sf
from shardfn import P

X = torch.arange(1.0, 13.0).reshape(4, 3)

RIGHT: dict[str, Callable[[Any], Any]] = {
    "a number": lambda x: 2 - x * 3,
    "itself": lambda x: x * x / (x + 1),
    "a comparison": lambda x: torch.where(x > 5, x, -x),
    "a cast": lambda x: x.to(torch.float64).sqrt().to(torch.bfloat16),
    "a clone": lambda x: x.clone(),
    "a clone of strides": lambda x: x.clone(memory_format=torch.contiguous_format),
    "a deep copy": copy.deepcopy,
    "zeros": lambda x: torch.zeros_like(x) + torch.ones_like(x),
    "filled": lambda x: torch.full_like(x, 3, dtype=torch.int64),
    "in place": lambda x: x.clone().mul_(2).add_(x, alpha=3),
    "an optimizer": lambda x: stepped(x),
}


def stepped(x: Any) -> Any:
    """A parameter after two steps of AdamW."""
    w = torch.nn.Parameter(x)
    opt = torch.optim.AdamW([w], lr=0.1)
    for _ in range(2):
        w.grad = w.detach() * w.detach()
        opt.step()
    return w.detach()


@pytest.mark.parametrize("name", RIGHT)
def test_ops_on_each_element_keep_the_stage(name: str) -> None:
    with simulated(pp=2, tp=2) as mesh:
        got = RIGHT[name](sf.distribute(X.t(), mesh, P("tp", pp=1)))
        wanted = RIGHT[name](X.t().clone())
        assert got.placements == (sf.Stage(1), Shard(0))
        assert got.stride() == wanted.stride()
        whole = sf.full(got)
        assert whole.dtype == wanted.dtype and torch.equal(whole, wanted)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.sum.default": lambda x: x.sum(),
    "aten.mm.default": lambda x: x @ x,
    "aten.view.default": lambda x: x.view(-1),
    "aten.transpose.int": lambda x: x.transpose(0, 1),
    "aten.select.int": lambda x: x[0],
    "aten.cat.default": lambda x: torch.cat([x, x]),
    "aten._softmax.default": lambda x: x.softmax(0),
    "aten.equal.default": lambda x: torch.equal(x, x),
    "aten.rand_like.default": lambda x: torch.rand_like(x),
    "aten.linalg_vector_norm.default": lambda x: x.norm(),
    "aten.add.Tensor": lambda x: x + sf.distribute(X, x.device_mesh, P()),
    "aten.mul.Tensor": lambda x: sf.distribute(X, x.device_mesh, P(pp=0)) * x,
    "aten.sub.Tensor": lambda x: x - torch.ones(()),
    "aten.copy_.default": lambda x: sf.distribute(X, x.device_mesh, P()).copy_(x),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("numerics", [True, False])
def test_other_ops_are_refused(name: str, numerics: bool) -> None:
    with sf.fake_world(2, numerics=numerics):
        mesh = sf.make_mesh((2,), ("pp",))
        x = sf.distribute(X, mesh, P(pp=1))
        with pytest.raises(sf.PlacementError) as error:
            REFUSED[name](x)
        placed = "[Stage(0)]" if name == "aten.mul.Tensor" else "[Stage(1)]"
        assert str(error.value) == (
            f"{name} of a DTensor: the DTensor is placed {placed}, but torch's DTensor ops do "
            "not support sf.Stage\n  try: run the op inside a sharded function: sf.shard(f, "
            "mesh)(x)"
        )


def test_terms_of_a_sum_are_refused_by_ops_on_each_element() -> None:
    with simulated(pp=2, tp=2) as mesh:
        shards = [torch.empty(0)] * 2 + [torch.ones(3)] * 2
        x = sf.from_local(shards, mesh, [sf.Stage(1), sf.Partial()])
        with pytest.raises(sf.PlacementError, match=r"aten\.mul\.Tensor of a DTensor"):
            x * x


@pytest.mark.parametrize("numerics", [True, False])
def test_torchs_redistribution_from_and_to_a_stage_is_refused(numerics: bool) -> None:
    fix = "  try: sf.shard(lambda x: x, mesh, None, placements)(x), which redistributes x"
    with sf.fake_world(2, numerics=numerics):
        mesh = sf.make_mesh((2,), ("pp",))
        x = sf.distribute(X, mesh, P(pp=1))
        for there in (Replicate(), Shard(0), sf.Stage(0)):
            with pytest.raises(sf.PlacementError) as error:
                x.redistribute(placements=[there])
            assert str(error.value) == (
                "redistribute of a DTensor: the DTensor is placed [Stage(1)], but torch's "
                f"DTensor ops do not support sf.Stage\n{fix}"
            )
        for here in (Replicate(), Shard(0), sf.Partial()):
            with pytest.raises(sf.PlacementError) as error:
                sf.from_local(X, mesh, [here]).redistribute(placements=[sf.Stage(1)])
            assert str(error.value) == (
                (
                    "redistribute of a DTensor: cannot redistribute to Stage(1): torch's DTensor "
                    "does not support sf.Stage\n"
                )
                + fix
            )
        with pytest.raises(sf.PlacementError) as error:
            x.full_tensor()
        assert str(error.value) == (
            "full_tensor of a DTensor: the DTensor is placed [Stage(1)], but torch's DTensor "
            "ops do not support sf.Stage\n  try: sf.full(x)"
        )


@pytest.mark.parametrize("name", RIGHT)
def test_ops_on_each_element_keep_the_zigzag(name: str) -> None:
    with simulated(cp=2, tp=3) as mesh:
        got = RIGHT[name](sf.distribute(X.t(), mesh, P("tp", sf.zigzag("cp"))))
        wanted = RIGHT[name](X.t().clone())
        assert got.placements == (sf.Zigzag(1), Shard(0))
        torch.testing.assert_close(sf.full(got), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("numerics", [True, False])
def test_other_ops_on_a_zigzag_are_refused(numerics: bool) -> None:
    with sf.fake_world(2, numerics=numerics):
        mesh = sf.make_mesh((2,), ("cp",))
        x = sf.distribute(X, mesh, P(sf.zigzag("cp")))
        for call in (
            torch.sum,
            torch.Tensor.t,
            lambda x: x + x.redistribute(placements=[Shard(0)]),
        ):
            with pytest.raises(
                sf.PlacementError, match=r"torch's DTensor ops do not support sf\.Zigzag"
            ):
                call(x)
        for call in (lambda x: x.redistribute(placements=[Replicate()]), lambda x: x.full_tensor()):
            with pytest.raises(sf.PlacementError, match=r"is placed \[Zigzag\(0\)\], but torch's"):
                call(x)
        plain = sf.distribute(X, mesh, P("cp"))
        with pytest.raises(
            sf.PlacementError,
            match=r"to Zigzag\(0\): torch's DTensor does not "
            r"support",
        ):
            plain.redistribute(placements=[sf.Zigzag(0)])
        with pytest.raises(sf.PlacementError, match=r"aten\.add\.Tensor of a DTensor"):
            x + plain


def test_full_of_a_zigzag_is_followed_by_autograd() -> None:
    with simulated(cp=2) as mesh:
        x = sf.distribute(X, mesh, P(sf.zigzag("cp"))).requires_grad_()
        (gradient,) = torch.autograd.grad((sf.full(x) * X).sum(), [x])
        assert gradient.placements == (sf.Zigzag(0),)
        assert torch.equal(sf.full(gradient), X)
        assert torch.equal(x.detach().to_local(rank=1), X[1:3])


def test_to_local_of_a_stage_keeps_its_gradient_there() -> None:
    with simulated(pp=2) as mesh:
        x = sf.distribute(X, mesh, P(pp=1))
        assert [tuple(shard.shape) for shard in x.to_local().shards] == [(0,), (4, 3)]
        assert torch.equal(x.to_local(rank=1), X) and x.to_local(rank=0).shape == (0,)
        with pytest.raises(sf.PlacementError) as error:
            x.to_local(grad_placements=[Replicate()])
        assert str(error.value) == (
            "to_local: grad_placements are [Replicate()], and x is placed [Stage(1)]\n"
            "  try: x.to_local()"
        )
        with pytest.raises(
            sf.PlacementError, match=r"to_local of a DTensor: the DTensor is placed \[Stage"
        ):
            x.requires_grad_().to_local()


def test_a_script_is_followed_by_autograd() -> None:
    with simulated(pp=2, tp=2) as mesh:
        x = sf.distribute(X, mesh, P(None, "tp", pp=0)).requires_grad_()
        y = torch.nn.Parameter(X.clone())
        for _ in range(2):  # the second gradient is added to the first
            sf.full((x * x).sin()).sum().backward()
            (y * y).sin().sum().backward()
        assert isinstance(x.grad, DTensor) and y.grad is not None
        torch.testing.assert_close(sf.full(x.grad), y.grad)
        with torch.no_grad():
            x -= 0.1 * x.grad
            y -= 0.1 * y.grad
        torch.testing.assert_close(sf.full(x.detach()), y.detach())
