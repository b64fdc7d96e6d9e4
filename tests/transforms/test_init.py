"""sf.init: each rank makes only its shards of what one device would draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P, random
from shardfn.errors import CaptureError, PlacementError, ShardError, TreeError

SEED = 11
KEY = random.key(SEED)
OF_TORCH: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda w: nn.init.uniform_(w, -2.0, 3.0),
    "normal_": lambda w: nn.init.normal_(w, 1.0, 0.02),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, -1.0, 2.0),
    "constant_": lambda w: nn.init.constant_(w, 0.3),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.4),
    "data.normal_": lambda w: w.data.normal_(0.0, 0.02),
    "data.copy_": lambda w: w.data.copy_(torch.randn(w.shape)),
}


ROUNDED = ("orthogonal_", "trunc_normal_")  # by kernels whose rounding depends on the shape
MESHES = (
    ((8,), ("dp",), P("dp")),
    ((2, 2, 2), ("a", "b", "c"), P(("a", "c"), "b")),
    ((3,), ("dp",), P(None, "dp")),
)


class One(nn.Module):
    """A weight with an initialisation."""

    def __init__(self, start: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5, dtype=torch.float64))
        start(self.weight)


class Model(nn.Module):
    """Modules of torch, a tied and a frozen weight, buffers, and rates read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=2)
        rates = [x.item() for x in torch.linspace(0, 0.3, 2)]
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 9, rate, batch_first=True) for rate in rates
        )
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("table", torch.randn(5, 2) + torch.arange(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _on_one_device(module_fn: Callable[[], nn.Module]) -> nn.Module:
    """The module with the numbers that plain torch gives it under the same law."""
    before = random.state.get()
    random.state.seed(SEED)
    with random.plain():
        module = module_fn()
    random.state.set(before)
    return module


def _values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _assert_same(made: dict[str, Any], module: nn.Module, rounded: float = 0.0) -> None:
    expected = _values_of(module)
    assert made.keys() == expected.keys()
    for name, x in made.items():
        assert_close(
            sf.full(x),
            expected[name].detach(),
            rtol=rounded,
            atol=rounded,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("name", OF_TORCH)
def test_initialisations_of_torch_make_shards_of_what_one_device_draws(name: str) -> None:
    def build() -> nn.Module:
        return One(OF_TORCH[name])

    alone = _on_one_device(build)
    for sizes, axes, p in MESHES:
        with sf.fake_world(math.prod(sizes)):
            mesh = sf.make_mesh(sizes, axes)
            _, params, buffers = sf.init(build, mesh, p, KEY)
            assert not buffers
            if name in ROUNDED:
                made = sf.full(params["weight"])
                assert_close(made, alone.weight.detach())
            else:
                _assert_same(params, alone)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_module_on_one_device_is_that_of_plain_torch(backend: str) -> None:
    alone = _on_one_device(Model)
    fn, params, buffers = sf.init(Model, key=KEY, backend=backend)
    assert "fixed" in buffers
    _assert_same(params | buffers, alone, 3e-7 if backend == "inductor" else 0.0)
    assert "head.weight" not in params  # tied
    random.state.seed(0)
    out = sf.jit(fn, backend="aten")(params, buffers, torch.tensor([[1, 2, 0]]))[0]
    random.state.seed(0)
    with random.plain():
        expected = alone(torch.tensor([[1, 2, 0]]))
    assert_close(out, expected.detach())


def test_a_module_on_a_mesh_is_placed_by_the_first_pattern_that_fits() -> None:
    alone = _on_one_device(Model)
    with simulated(dp=2, tp=3) as mesh:
        placements = {
            "**.linear1.*": P("tp"),
            "**.linear2.weight": P(None, "tp"),
            "table": P("dp"),
            "**.weight": P("dp"),
        }
        fn, params, buffers = sf.init(Model, mesh, placements, KEY)
        _assert_same(params | buffers, alone)
        placed = {n: tuple(x.placements) for n, x in (params | buffers).items()}
        whole = sf.Replicate(), sf.Replicate()
        assert placed["blocks.0.linear1.bias"] == (sf.Replicate(), sf.Shard(0))
        assert placed["blocks.1.linear2.weight"] == (sf.Replicate(), sf.Shard(1))
        assert placed["embed.weight"] == (sf.Shard(0), sf.Replicate())
        assert placed["table"] == (sf.Shard(0), sf.Replicate())
        assert placed["blocks.0.self_attn.in_proj_weight"] == whole
        loss = sf.shard(lambda p, b, t: fn(p, b, t)[0].sum(), mesh, (None, None, P("dp")))
        tokens = torch.tensor([[1, 2, 0], [3, 4, 5]])
        assert sf.full(loss(params, buffers, tokens)).isfinite()


def test_parameters_are_made_on_their_stages() -> None:
    alone = _on_one_device(Model)
    with simulated(pp=2, tp=2) as mesh:
        first, last = P(pp=0), [sf.Stage(1), sf.Shard(0)]
        placements = {"blocks.0.**": first, "blocks.1.**": P(pp=1), "embed.weight": last}
        _, params, buffers = sf.init(Model, mesh, placements, KEY, backend="aten")
        _assert_same(params | buffers, alone)
        assert params["embed.weight"].placements == tuple(last)
        shapes = [tuple(x.shape) for x in params["blocks.0.linear1.bias"].to_local().shards]
        assert shapes[2:] == [(0,)] * 2 and shapes[0] == shapes[1] != (0,)


def test_a_rank_makes_no_more_than_its_shard_and_sends_nothing() -> None:
    def build() -> nn.Module:
        return nn.Linear(64, 64, bias=False)

    with simulated(dp=8) as mesh:
        _, params, _ = sf.init(build, mesh, P("dp"), KEY)
        assert params["weight"].to_local().shape == (8, 64)
        drawn = sf.shard(lambda key: random.uniform(key, (64, 64)), mesh, (P(),), P("dp"))
        text = drawn.lower(KEY).text()
        assert "no communication" in text


def _on_ranks() -> dict[str, torch.Tensor]:
    mesh = sf.make_mesh((2,), ("dp",))
    _, params, buffers = sf.init(Model, mesh, P("dp"), KEY, backend="aten")
    return {name: sf.full(x) for name, x in (params | buffers).items()}


def test_two_processes_hold_what_one_device_draws() -> None:
    alone = _on_one_device(Model)
    for made in run_ranks(2, _on_ranks):
        _assert_same(made, alone)


def _holding() -> nn.Module:
    module = nn.Linear(2, 2)
    module.scale = torch.ones(2)  # type: ignore[assignment]
    return module


def _deciding() -> nn.Module:
    module = nn.Linear(2, 2)
    if module.weight.sum() > 0:
        module.eval()
    return module


def test_bad_input_is_refused_by_name() -> None:
    def build() -> nn.Module:
        return nn.Linear(2, 2)

    with simulated(dp=2) as mesh:
        with pytest.raises(ShardError, match="init: key is a NoneType"):
            sf.init(build, mesh, P())
        with pytest.raises(TreeError, match=r"init\(_holding\): scale is a tensor"):
            sf.init(_holding, mesh, P(), KEY)
        with pytest.raises(TreeError, match="'bias2' matches no parameter and no buffer"):
            sf.init(build, mesh, {"bias2": P("dp")}, KEY)
        with pytest.raises(TreeError, match="module_fn returns a list"):
            sf.init(lambda: [1], mesh, P(), KEY)  # type: ignore[arg-type, return-value]
        with pytest.raises(PlacementError, match=r"init\(build\).*out_placements"):
            sf.init(build, mesh, P(None, "dp"), KEY)
        with pytest.raises(CaptureError, match="_deciding"):
            sf.init(_deciding, mesh, P(), KEY)
    with pytest.raises(TreeError, match="placements are given, but no mesh"):
        sf.init(build, None, P("dp"), KEY)


def test_a_truncated_normal_in_a_function_is_that_of_plain_torch() -> None:
    def drawn(x: torch.Tensor) -> torch.Tensor:
        return nn.init.trunc_normal_(torch.empty_like(x), 1.0, 2.0, -0.5, 4.0)

    x = torch.empty(50, 3)
    random.state.seed(5)
    with random.plain():
        alone = drawn(x)
    random.state.seed(5)
    made = sf.jit(drawn, backend="aten")(x)
    assert_close(made, alone)
    assert made.min() >= -0.5
    assert made.max() <= 4.0
    before = nn.init.trunc_normal_(torch.empty(3))  # torch's own again
    assert before.isfinite().all()
    assert "chosen" not in nn.init._no_grad_trunc_normal_.__qualname__


class Rates(nn.Module):
    """Buffers made with numbers that the constructor reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(4.0)
        rates = (steps * 0.5 + 1).tolist()
        steps[0] = 7.0  # a value that was read before
        self.register_buffer("rates", torch.tensor(rates))
        last = float(torch.linspace(0, 1, 5)[-1])
        self.register_buffer("last", torch.full((2,), last))
        if torch.ones(2).sum() > 1:
            self.register_buffer("seen", torch.rand(2))


class Written(nn.Module):
    """Reads a number from a tensor after writing random values to it."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.zeros(2)
        x.uniform_()
        self.register_buffer("first", torch.full((2,), x[0].item()))


def test_numbers_that_a_constructor_reads_are_known() -> None:
    alone = _on_one_device(Rates)
    _, _, buffers = sf.init(Rates, key=KEY, backend="aten")
    _assert_same(buffers, alone)
    with pytest.raises(CaptureError, match=r"init\(Written\): .item\(\) reads"):
        sf.init(Written, key=KEY)


CONVERSIONS: dict[str, Callable[[Any], nn.Module]] = {
    "double": lambda module: module.double(),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to dtype": lambda module: module.to(torch.float64),
    "to device": lambda module: module.to("cpu"),
    "to and back": lambda module: module.double().to(torch.float32),
    "to empty": lambda module: module.to_empty(device="cpu"),
    "one part": lambda module: (module[0].double(), module)[1],
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_constructor_may_convert_the_module(name: str) -> None:
    def build() -> nn.Module:
        linear = nn.Linear(3, 3)
        tied = nn.Linear(3, 3, bias=False)
        tied.weight = linear.weight
        tied.requires_grad_(False)
        return CONVERSIONS[name](nn.Sequential(linear, tied, nn.BatchNorm1d(3)))

    _, params, buffers = sf.init(build, key=random.key(SEED), backend="aten")
    alone = _on_one_device(build)
    if name == "to empty":  # which leaves any values
        assert (params | buffers).keys() == _values_of(alone).keys()
        return
    _assert_same(params | buffers, alone)
