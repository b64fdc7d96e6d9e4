"""pin: constraints on the layers of a module, by name; plain torch is the judge."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        h = torch.relu(self.up(x)) * scale
        return x + self.down(h), h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, h = block(x, scale)
        return x.square().mean() + h.mean()


def case() -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net().double()
    inputs = torch.randn(7, 5).double(), torch.randn(9).double()
    return net, inputs


def pinned(net: Net) -> Any:
    """The first layers of both blocks on dp and tp; of the second also what it takes."""
    return sf.pin(
        net,
        {"blocks.*.up": P("dp", "tp")},
        inputs={re.compile(r"blocks\.1"): (P(None, "tp"), None)},
    )


def run(net: Net, inputs: Any, shape: tuple[int, int]) -> Any:
    """Loss, gradients, and the axes of the collectives."""
    fn, params, buffers = sf.functionalize(net)
    mesh = sf.make_mesh(shape, ("dp", "tp"))
    step = sf.shard(
        sf.value_and_grad(lambda p, b, *xs: fn(p, b, *xs)[0]),
        mesh,
        (P(), P(), P("dp"), P()),
        backend="aten",
    )
    loss, grads = step(params, buffers, *inputs)
    low = step.lower(params, buffers, *inputs)
    axes = {c.axis for c in low.collectives}
    return sf.full(loss), sf.tree_map(sf.full, grads), axes


def check(found: Any, net: Net, inputs: Any) -> None:
    """Compare with plain torch, outside of shard: pins change nothing there."""
    loss, grads, _ = found
    wanted = net(*inputs)
    expected = torch.autograd.grad(wanted, tuple(net.parameters()))
    assert_close(loss, wanted)
    assert_close(tuple(grads.values()), expected)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_layers_have_the_placements_and_values_stay(shape: tuple[int, int]) -> None:
    net, inputs = case()
    with sf.fake_world(6):
        assert run(net, inputs, shape)[2] == {"dp"}
        with pinned(net) as pins:
            assert pins.paths == ("blocks.0.up", "blocks.1.up", "blocks.1")
            found = run(net, inputs, shape)
            check(found, net, inputs)
            assert found[2] == {"dp", "tp"}
        assert run(net, inputs, shape)[2] == {"dp"}


def _on_a_rank() -> Any:
    net, inputs = case()
    pinned(net)
    found = run(net, inputs, (1, 2))
    check(found, net, inputs)
    return found[2]


def test_on_two_gloo_processes() -> None:
    assert run_ranks(2, _on_a_rank) == [{"tp"}] * 2


def test_an_activation_is_placed_as_it_is_pinned() -> None:
    """The first layer alone: its result comes out on the pinned axes."""
    net = nn.Sequential(nn.Linear(5, 9), nn.ReLU())
    sf.pin(net, {"": P(None, "tp")})
    fn, params, buffers = sf.functionalize(net)
    with simulated(tp=3) as mesh:
        out = sf.shard(fn, mesh, (P(), P(), P()), backend="aten")(
            params, buffers, torch.randn(7, 5)
        )[0]
        assert [p.dim for p in out.placements] == [1]


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (
        {"block.*": P("dp")},
        None,
        sf.TreeError,
        "pin: outputs['block.*'] matches no layer; similar names: blocks.*, blocks.*.up, "
        "blocks\n  try: use paths of module.named_modules(), with * for one name and ** for "
        "several names",
    ),
    (
        None,
        {"blocks.*": (P("dp"), "dp")},
        sf.PlacementError,
        "pin, inputs['blocks.*']: 'dp'\n  needed: a P, a Stage, a tree of them, or None",
    ),
    (
        None,
        None,
        sf.TreeError,
        "pin: neither outputs nor inputs is given\n"
        "  try: sf.pin(module, {'layers.*.mlp': P('dp', 'tp')})",
    ),
]


@pytest.mark.parametrize(("outputs", "inputs", "kind", "said"), WRONG)
def test_a_mistake_is_named_and_leaves_no_hook(
    outputs: Any, inputs: Any, kind: type[Exception], said: str
) -> None:
    net, _ = case()
    with pytest.raises(kind) as error:
        sf.pin(net, outputs, inputs=inputs)
    assert str(error.value) == said
    assert not any(layer._forward_hooks for layer in net.modules())
    assert not any(layer._forward_pre_hooks for layer in net.modules())


SPLIT = P("dp"), P(None, "tp")


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ({"0": SPLIT[0]}, {"*": SPLIT[1]}, "outputs['0']"),
        ({"0": SPLIT}, {"0": (None, SPLIT[0])}, "outputs['0']"),
        ({"0": {"x": SPLIT[0]}}, {"0": SPLIT[1]}, "outputs['0']"),
        ({"0": SPLIT[0]}, {"0": SPLIT[0], "1": SPLIT[1]}, None),
        ({"0": (SPLIT[0], None)}, {"0": (None, SPLIT[1])}, None),
        ({"0": {"x": SPLIT[0]}}, {"0": {"y": SPLIT[1]}}, None),
        ({"0": SPLIT[:1]}, {"0": SPLIT}, None),
    ],
)
def test_one_value_has_one_placement(first: Any, second: Any, wrong: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with sf.pin(net, first):
        if wrong is None:
            sf.pin(net, second).remove()
        else:
            with pytest.raises(sf.PlacementError) as error:
                sf.pin(net, second)
            assert f"pin: {wrong} is pinned to " in str(error.value)
            assert "needed: one placement for each pinned value" in str(error.value)
            assert len(net[0]._forward_hooks) == 1
    sf.pin(net, second).remove()  # the first pins are gone


def test_a_layer_of_two_paths_has_one_placement() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, shared)
    with pytest.raises(sf.PlacementError) as error:
        sf.pin(net, inputs={"0": SPLIT[0], "1": SPLIT[1]})
    assert str(error.value) == (
        "pin: inputs['1'] is pinned to (P('dp'),), and also to (P(None, 'tp'),)\n  needed: one "
        "placement for each pinned value\n  try: call remove() of the earlier pins, or use "
        "patterns that do not match these layers"
    )
    assert not shared._forward_pre_hooks
    sf.pin(net, inputs={"0": SPLIT[0], "1": SPLIT[:1]}).remove()


def test_a_sequential_returns_what_its_last_layer_does_and_takes_what_its_first_takes() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net = nn.Sequential(nn.Linear(2, 2), inner)
    with pytest.raises(sf.PlacementError) as error:
        sf.pin(net, {"1.1": SPLIT[0], "": SPLIT[1]})
    said = "outputs[''] is pinned as outputs['1.1'] to P('dp'), and also to P(None, 'tp')"
    assert said in str(error.value).replace("\n ", "")
    twice = pytest.raises(sf.PlacementError, match="as inputs")
    with sf.pin(net, inputs={"1": SPLIT[0]}), twice:
        sf.pin(net, inputs={"1.0": SPLIT[1]})
    sf.pin(net, {"1.0": SPLIT[0], "": SPLIT[1]}).remove()
    sf.pin(net, {"1.1": SPLIT[0], "": SPLIT[0]}).remove()


def test_a_sequential_with_a_forward_of_its_own_is_another_value() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(super().forward(x)) * 2

    sf.pin(Twice(nn.ReLU()), {"": SPLIT[0], "0": SPLIT[1]}).remove()


def test_what_is_not_a_module_is_refused() -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.pin(case, {"": P("dp")})  # type: ignore[arg-type]
    assert str(error.value).startswith("pin: module is a function\n  needed: an nn.Module")


UNFIT = [
    (P("ep"), "the mesh (dp=2, tp=3) has no axis ep"),
    (P(None, None, "dp"), "a placement of 3 dims for a tensor of 2, shape (7, 9)"),
]


@pytest.mark.parametrize(("placement", "said"), UNFIT)
def test_a_placement_that_does_not_fit_is_refused_at_the_line_of_the_layer(
    placement: P, said: str
) -> None:
    net, inputs = case()
    sf.pin(net, {"blocks.0.up": placement})
    with sf.fake_world(6), pytest.raises(sf.PlacementError) as error:
        run(net, inputs, (2, 3))
    first, at, *_ = str(error.value).splitlines()
    assert first == f"constrain: {said}"
    line = Block.forward.__code__.co_firstlineno + 1
    assert at == f"  at: blocks.0.up ({__file__}:{line})"
