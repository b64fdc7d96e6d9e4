"""Functions that write to buffers of modules which they close over: the buffers are those of one
device after each call, in the loop that people write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from stagings import counts
from torch import nn
from torch.nn.utils import prune, weight_norm
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from worlds import simulated

import shardfn as sf
from shardfn import P

DRAW = torch.Generator().manual_seed(0)
BATCHES = [
    (
        torch.randn(7, 5, dtype=torch.float64, generator=DRAW),
        torch.randn(7, 3, dtype=torch.float64, generator=DRAW),
    )
    for _ in range(4)
]


class Counted(nn.Module):
    """Buffers that forward writes in place, assigns, leaves as they are, and stores again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.register_buffer("same", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training:
            self.seen += x.shape[0]
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            self.same = self.same.clone()
        return y * self.scale + self.average


def normed() -> nn.Module:
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    return nn.Sequential(*layers)


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))
    return nn.Sequential(layer, nn.Linear(4, 3))


def hooked() -> nn.Module:
    """Weights that hooks compute before each call, from parameters."""
    layers = [nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)]
    weight_norm(layers[0])
    nn.utils.spectral_norm(layers[1])
    prune.l1_unstructured(layers[2], "weight", 0.5)
    return nn.Sequential(*layers)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": normed,
    "spectral_norm": spectral,
    "assigned": Counted,
    "hooks": hooked,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().double()


def loop(model: nn.Module, loss_of: Any, full: Any = lambda x: x) -> Any:
    """Losses in training, in evaluation with and without gradients, and in training again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for i, (x, y) in enumerate(BATCHES):
        model.train(i != 1)
        first = loss_of(x, y)
        (first + 2 * loss_of(x - 1, y)).backward()  # two calls, one backward
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [full(first.detach()), full(loss_of(x, y))]
    computed = [
        x
        for module in model.modules()
        for x in vars(module).values()
        if isinstance(x, torch.Tensor)
    ]
    after = [*model.parameters(), *model.buffers(), *computed]
    return losses, [full(x.detach()) for x in after]


def as_dtensors(model: nn.Module, mesh: Any) -> None:
    """Make DTensors of the buffers, sharded where they have a dim."""
    for module in model.modules():
        for name, x in dict(module.named_buffers(recurse=False)).items():
            spec = P("dp") if x.dim() else P()
            setattr(module, name, sf.distribute(x, mesh, spec))


def compared(name: str, shard: Any, full: Any, mesh: Any = None) -> None:
    model, alone = made(name), made(name)
    if mesh is not None:
        as_dtensors(model, mesh)
    ours = loop(model, shard(lambda x, y: ((model(x) - y) ** 2).mean()), full)
    plain = loop(alone, lambda x, y: ((alone(x) - y) ** 2).mean())
    assert_close(ours, plain)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_buffers_are_those_of_one_device(name: str, world: int) -> None:
    with simulated(dp=world) as mesh:
        shard = lambda fn: sf.shard(fn, mesh, P("dp"), backend="aten")
        compared(name, shard, sf.full)


def _on_a_rank() -> None:
    mesh = sf.make_mesh((2,), ("dp",))
    shard = lambda fn: sf.shard(fn, mesh, P("dp"), backend="aten")
    compared("BatchNorm", shard, sf.full)
    compared("BatchNorm", shard, sf.full, mesh)


def test_buffers_may_be_dtensors() -> None:
    with simulated(dp=4) as mesh:
        shard = lambda fn: sf.shard(fn, mesh, P("dp"), backend="aten")
        compared("BatchNorm", shard, sf.full, mesh)


def test_gloo_ranks_agree() -> None:
    run_ranks(2, _on_a_rank)


def test_only_what_is_written_is_a_result_and_nothing_is_captured_again() -> None:
    model = made("assigned")
    fn = sf.jit(model, backend="aten")
    (x, _), *_ = BATCHES
    fn(x)
    assert len(fn.trace(x).program.out_paths) - len([*model.parameters()]) == 5
    before = dict(counts)
    fn(x + 1)
    assert dict(counts) == before
    fn.compile(x)(x)
    assert model.get_buffer("seen") == 21


def test_another_module_in_its_place_is_written_to() -> None:
    model = made("BatchNorm")
    fn = sf.jit(lambda x: model(x), backend="aten")
    (x, _), *_ = BATCHES
    fn(x)
    old = model[1]
    model[1] = nn.BatchNorm1d(6).double()
    fn(x)
    assert old.num_batches_tracked == model[1].num_batches_tracked == 1


def test_without_values_buffers_stay() -> None:
    model = made("BatchNorm")
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((4,), ("dp",))
        sf.shard(model, mesh, P("dp"), backend="aten")(BATCHES[0][0])
    assert model[1].num_batches_tracked == 0


JIT = functools.partial(sf.jit, backend="aten")


def loss_with_norm(model: nn.Module, x: torch.Tensor, call: Any) -> torch.Tensor:
    norms: list[torch.Tensor] = []

    def layers(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        norms.append(out.square().mean())
        return out

    return (call(layers)(x) - 1).square().mean() + norms[0]


def test_a_checkpointed_call_writes_once_and_may_fill_a_list() -> None:
    def checkpointed(fn: Any) -> Any:
        return functools.partial(checkpoint, fn, use_reentrant=False)

    found = []
    for transform, call in ((lambda fn: fn, lambda fn: fn), (JIT, checkpointed)):
        model = made("assigned")
        fn = functools.partial(loss_with_norm, model, call=call)
        value = transform(lambda x, fn=fn: fn(x))(BATCHES[0][0])
        value.backward()
        grads = [p.grad for p in model.parameters()]
        found.append([value.detach(), *grads, *model.buffers()])
    assert_close(*found)


INNER: dict[str, tuple[Callable[..., Any], str]] = {
    "grad": (lambda fn: sf.grad(lambda x: fn(x).sum()), "has_aux=True"),
    "vmap": (sf.vmap, "under vmap, the function writes to a buffer that all samples share"),
    "scan": (
        lambda fn: lambda x: sf.scan(lambda c, x: (c, fn(x)), x.sum(), x[None]),
        "a per-step input or a closed-over value): the function writes to this tensor in place",
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_inside_of_a_transform_the_way_is_named(name: str) -> None:
    model, (x, _) = made("BatchNorm"), BATCHES[0]
    around, text = INNER[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(around(model), backend="aten")(x[None] if name == "vmap" else x)
    assert text in str(caught.value)
    assert "sf.functionalize(module), whose fn returns" in str(caught.value)
    assert model[1].num_batches_tracked == 0


def _reads_elsewhere(model: Any) -> Any:
    mean = model[1].running_mean
    return lambda x: model(x).sum() + mean.sum()


def _counts(model: Any) -> Any:
    model.calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        model.calls += 1
        return model(x)

    return fn


def _shares(model: Any) -> Any:
    model.other = nn.BatchNorm1d(6).double()
    model.other.running_mean = model[1].running_mean
    return lambda x: model[2](model[1](model[0](x)))


@pytest.mark.parametrize("make", [_reads_elsewhere, _counts, _shares])
def test_what_else_sees_the_write_is_refused_by_name(make: Any) -> None:
    model = made("BatchNorm")
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(make(model), backend="aten")(BATCHES[0][0])
    assert caught.value.fix and "places" not in str(caught.value)
    assert model[1].num_batches_tracked == 0


def test_a_value_of_another_shape_is_refused_by_name() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x * 2
            return x

    fn = sf.jit(Grows(), backend="aten")
    with pytest.raises(sf.TreeError, match="Grows, buffer last: the function stores"):
        fn(torch.ones(2))


class Keeps(nn.Module):
    """Activations that forward stores: a tensor, a list, items of a dict, and an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.last = None
        self.stats: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, keep: bool = True) -> torch.Tensor:
        self.features = []
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            self.features.append(x)
            self.stats[f"mean{i}"] = {"of": x.mean(), "rows": x.shape[0]}
        if keep:
            self.last = x
        self.loss = x.square().mean()
        return self.norm(x)


def kept(net: nn.Module) -> Any:
    return sf.full([net.last, net.features, net.stats, net.loss])


@pytest.mark.parametrize("way", ["jit", "shard"])
def test_a_module_has_the_activations_that_it_stores(way: str) -> None:
    torch.manual_seed(1)
    net, plain = Keeps().double(), Keeps().double()
    plain.load_state_dict(net.state_dict())
    with simulated(dp=3) as mesh:
        jit = functools.partial(sf.jit, backend="aten")
        fn = jit(net) if way == "jit" else sf.shard(net, mesh, (P("dp"), None))
        for x, _ in BATCHES:
            net.zero_grad(), plain.zero_grad()
            got, wanted = fn(x), plain(x)
            assert_close(sf.full(got), wanted)
            assert_close(kept(net), kept(plain))
            assert_close(net.norm.running_mean, plain.norm.running_mean)
            (got.sum() + net.loss).backward(), (wanted.sum() + plain.loss).backward()
            gradients = [[sf.full(p.grad) for p in x.parameters()] for x in (net, plain)]
            assert_close(*gradients)
        before = counts["captures"]
        fn(BATCHES[0][0])
        assert counts["captures"] == before
        fn(BATCHES[1][0], False), plain(BATCHES[0][0]), plain(BATCHES[1][0], False)
        assert_close(kept(net), kept(plain))


def test_hooks_store_in_a_dict_of_ones_own() -> None:
    found: dict[str, Any] = {"other": 1}
    net = normed().requires_grad_(False).double().eval()
    for name, part in net.named_children():
        part.register_forward_hook(lambda _, args, out, name=name: found.update({name: out}))
    net[0].register_forward_hook(lambda _, args, out: found.__setitem__("input", args[0]))
    with simulated(dp=2) as mesh:
        fn = sf.shard(net, mesh, P("dp"))
        for x, _ in BATCHES[:2]:
            fn(x)
            got = sf.full(found)
            net(x)
            assert_close(got, found)
            assert set(found) == {"other", "input", "0", "1", "2"}


class Loss(nn.Linear):
    """A loss beside the result."""

    def __init__(self) -> None:
        super().__init__(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class Recurrent(nn.Module):
    """A state that each call reads and stores."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = (self.state + x).tanh()
        return self.state * 2


@pytest.mark.parametrize("way", ["reads it", "grad", "vmap", "scan"])
def test_what_cannot_be_a_result_is_refused_and_left_as_it_was(way: str) -> None:
    x = torch.ones(3, dtype=torch.float64)
    net: Any = Recurrent() if way == "reads it" else Loss().double().eval()
    x = x if way == "reads it" else BATCHES[0][0]
    fn = {
        "reads it": sf.jit(net),
        "grad": sf.grad(lambda x: net(x).sum()),
        "vmap": sf.jit(sf.vmap(lambda x: net(x[None])[0])),
        "scan": sf.jit(lambda x: sf.scan(lambda c, _: (c + net(c).sum(), None), x, length=2)[0]),
    }[way]
    before = dict(net.__dict__)
    with pytest.raises(sf.CaptureError, match="changes (an object|something) outside"):
        fn(x)
    assert net.__dict__ == before


class Cached(nn.Module):
    """A value that the first call stores, or one that grows, by a test of presence."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen, self.norm = way, {}, nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.norm(x), self.seen
        match self.way:
            case "hasattr":
                if not hasattr(self, "last"):
                    self.last = 2 * x
                return x + self.last
            case "getattr":
                before = getattr(self, "last", None)
                self.last = x if before is None else before + x
                return self.last
            case "__dict__":
                self.last = x if "last" not in self.__dict__ else self.last + x
                return self.last
            case "in":
                seen["x"] = seen["x"] + x if "x" in seen else x
            case "get":
                before = seen.get("x")
                seen["x"] = x if before is None else before + x
            case "len":
                seen["x"] = x + len(seen)
            case "items":
                seen["x"] = x + sum(seen.values())
            case "setdefault":
                seen.setdefault("x", x)
            case "pop":
                seen["x"] = x + seen.pop("x", 0)
            case "truth":
                seen["x"] = x + 1 if seen else x
            case "a new key":
                seen[f"x{len(seen)}"] = x
        return sum(seen.values())


ASKS = ["hasattr", "getattr", "__dict__", "in", "get", "len", "items", "setdefault", "pop"]
ASKS += ["truth", "a new key"]


@pytest.mark.parametrize("way", ASKS)
def test_a_function_that_asks_whether_something_is_stored_is_refused(way: str) -> None:
    net = Cached(way).train(way != "in")
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(
        sf.CaptureError, match="the function reads a value that an earlier call stored: "
    ) as got:
        sf.jit(net, backend="aten")(x)
    assert got.value.fix == "return the value from the function, and pass it to the next call"
    assert not hasattr(net, "last") and not net.seen
    with simulated(dp=2) as mesh, pytest.raises(sf.CaptureError, match="an earlier call"):
        sf.shard(net, mesh, P("dp"))(x)
