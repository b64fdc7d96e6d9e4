"""Convolutions over a cut dim of space: equal to one device, and only the rows that windows
overlap are sent.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import equal
from ranks import run_ranks
from torch.utils._pytree import tree_leaves

import shardfn as sf
from shardfn import P
from shardfn.compile.collective_order import collective_events

Net = Callable[..., torch.Tensor]
FLOAT = 8  # bytes


def f(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def conv(space: int, **walk: Any) -> Net:
    return lambda x, w, b: [F.conv1d, F.conv2d, F.conv3d][space - 1](x, w, b, **walk)


def padded(pad: tuple[int, ...], **walk: Any) -> Net:
    """A convolution of an input that is padded first."""

    def net(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return conv(x.dim() - 2, **walk)(F.pad(x, pad), w, b)

    return net


def causal(kernel: int, dilation: int = 1, groups: int = 1) -> Net:
    """A convolution whose input is padded before its first element."""
    return padded((dilation * (kernel - 1), 0), dilation=dilation, groups=groups)


def sliced(kernel: int, groups: int = 1) -> Net:
    """The same, as the first elements of a convolution that is padded on both sides."""
    return lambda x, w, b: F.conv1d(x, w, b, padding=kernel - 1, groups=groups)[..., : x.shape[-1]]


# (net, image, weight): every one of them leaves chunks that line up
NETS: dict[str, tuple[Net, tuple[int, ...], tuple[int, ...]]] = {
    "1-D": (conv(1, padding=1), (2, 3, 13), (5, 3, 3)),
    "1-D, wide and dilated": (conv(1, padding=4, dilation=2), (2, 3, 24), (5, 3, 5)),
    "1-D, every second": (conv(1, padding=1, stride=2), (2, 3, 24), (5, 3, 4)),
    "1-D, every third, lopsided": (conv(1, padding=1, stride=3), (2, 3, 36), (4, 3, 5)),
    "2-D": (conv(2, padding=1), (2, 3, 13, 9), (5, 3, 3, 3)),
    "2-D, uneven kernel": (conv(2, padding=(2, 1)), (2, 3, 11, 7), (5, 3, 5, 3)),
    "2-D, by group": (conv(2, padding=1, groups=2), (2, 4, 9, 7), (6, 2, 3, 3)),
    "2-D, every second": (conv(2, padding=1, stride=2), (2, 3, 16, 8), (5, 3, 3, 3)),
    "2-D, points alone": (conv(2, stride=2), (2, 3, 16, 8), (5, 3, 1, 1)),
    "1-D, causal": (causal(4), (2, 3, 13), (5, 3, 4)),
    "1-D, causal and dilated": (causal(3, dilation=2), (2, 3, 24), (5, 3, 3)),
    "1-D, causal, by channel": (causal(4, groups=3), (2, 3, 24), (3, 1, 4)),
    "1-D, a slice": (sliced(4), (2, 3, 13), (5, 3, 4)),
    "1-D, a slice, of groups": (sliced(3, groups=2), (2, 4, 24), (6, 2, 3)),
    "1-D, lopsided, every second": (padded((2, 1), stride=2), (2, 3, 24), (5, 3, 5)),
    "2-D, causal": (padded((1, 1, 2, 0)), (2, 3, 13, 9), (5, 3, 3, 3)),
    "3-D": (conv(3, padding=1), (1, 2, 8, 5, 4), (3, 2, 3, 3, 3)),
}
MESHES = {
    "2": ((2,), ("h",), P(None, None, "h")),
    "3": ((3,), ("h",), P(None, None, "h")),
    "4": ((4,), ("h",), P(None, None, "h")),
    "2 x 2, batch and rows": ((2, 2), ("d", "h"), P("d", None, "h")),
    "2 x 2, rows and columns": ((2, 2), ("h", "w"), P(None, None, "h", "w")),
    "2 x 2, both on rows": ((2, 2), ("h", "w"), P(None, None, ("h", "w"))),
}


@functools.cache  # one function for all meshes, which share its captures
def loss(net: Net) -> Net:
    return lambda *args: net(*args).square().sum()


def on(mesh: str, fn: Net, placements: Any = None, backend: str = "aten") -> Any:
    sizes, names, cut = MESHES[mesh]
    return sf.shard(fn, sf.make_mesh(sizes, names), placements or (cut, P(), P()), backend=backend)


def world(mesh: str) -> Any:
    n = 1
    for size in MESHES[mesh][0]:
        n *= size
    return sf.fake_world(n)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("name", list(NETS))
def test_a_convolution_over_a_cut_dim_of_space_equals_one_device(name: str, mesh: str) -> None:
    net, image, weight = NETS[name]
    if "columns" in mesh and len(image) < 4:
        pytest.skip("it has no columns")
    args = f(*image), f(*weight), f(weight[0])
    gradient = sf.value_and_grad(loss(net), argnums=(0, 1, 2))
    with world(mesh):
        equal(sf.full(on(mesh, net)(*args)), net(*args))
        equal(sf.full(on(mesh, gradient)(*args)), gradient(*args))


@pytest.mark.parametrize(("channels", "name"), [(1, "1-D"), (3, "2-D")])
def test_a_rank_without_input_channels_has_no_rows_of_its_neighbours_in_its_gradient(
    channels: int, name: str
) -> None:
    net, image, weight = NETS[name]
    args = (f(image[0], channels, *image[2:]), f(weight[0], channels, *weight[2:]), f(weight[0]))
    gradient = sf.value_and_grad(loss(net), argnums=(0, 1, 2))
    with sf.fake_world(8):
        mesh = sf.make_mesh((2, 4), ("h", "c"))
        for placements in (
            (P(None, "c", "h"), P(None, "c"), P()),
            (P(None, None, "h"), P("h", "c"), P()),
            (P(None, None, "h"), P(), P()),
        ):
            equal(
                sf.full(sf.shard(gradient, mesh, placements, backend="aten")(*args)),
                gradient(*args),
            )


def sent(lowered: Any) -> list[tuple[str, str, int]]:
    return [(c.kind, c.axis, c.nbytes) for c in lowered.collectives]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_forward_sends_the_rows_that_windows_overlap_and_nothing_else(n: int) -> None:
    for name, rows in {
        "1-D": 2,
        "2-D": 2,
        "2-D, every second": 1,
        "2-D, by group": 2,
        "3-D": 2,
        "1-D, causal": 3,
        "1-D, causal, by channel": 3,
        "1-D, a slice": 3,
        "2-D, causal": 2,
    }.items():
        net, image, weight = NETS[name]
        image = (image[0], image[1], 24, *image[3:])
        halo = rows * FLOAT
        for size in (*image[:2], *image[3:]):
            halo *= size
        with sf.fake_world(n):
            assert sent(on(str(n), net).lower(f(*image), f(*weight), f(weight[0]))) == [
                ("halo", "h", halo)
            ], name


def test_two_cut_dims_of_space_send_two_halos_the_second_with_the_corners() -> None:
    mesh = "2 x 2, rows and columns"
    with world(mesh):
        low = on(mesh, conv(2, padding=1)).lower(f(2, 3, 12, 8), f(5, 3, 3, 3), f(5))
    first, second = {"h": 2 * 4, "w": 2 * 6}, {"h": 2 * (4 + 2), "w": 2 * (6 + 2)}
    (_, a, inner), (_, b, outer) = sent(low)
    assert {c.kind for c in low.collectives} == {"halo"}
    assert {a, b} == {"h", "w"}
    assert (inner, outer) == (first[a] * 2 * 3 * FLOAT, second[b] * 2 * 3 * FLOAT)


def test_the_backward_sends_the_halo_of_the_gradient_and_the_sums_of_the_parameters() -> None:
    x, w, b = f(2, 3, 24, 16), f(5, 3, 3, 3), f(5)
    with sf.fake_world(3):
        low = on(
            "3",
            sf.grad(lambda x, w, b: conv(2, padding=1)(x, w, b).square().sum(), argnums=(0, 1, 2)),
        ).lower(x, w, b)
    row = 2 * 16 * FLOAT
    assert collections.Counter(sent(low)) == collections.Counter([
        ("halo", "h", 2 * 3 * row), ("halo", "h", 2 * 5 * row),
        ("all_reduce", "h", w.numel() * FLOAT), ("all_reduce", "h", b.numel() * FLOAT),
    ])  # fmt: skip
    assert low.schedule.holds


def test_windows_that_do_not_cross_an_edge_need_nobody() -> None:
    weight = f(5, 3, 3, 2)
    pools = {
        "max": lambda x: F.max_pool2d(x, 2),
        "mean": lambda x: F.avg_pool2d(x, (3, 2)),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, (8, 6)),
        "a patch": lambda x: F.conv2d(x, weight, stride=(3, 2)),
        "3-D": lambda x: F.max_pool3d(x, (1, 2, 2)),
    }
    x = f(2, 3, 24, 12)
    for (name, pool), (mesh, (_, _, cut)) in itertools.product(pools.items(), MESHES.items()):
        if mesh in ("3", "2 x 2, both on rows"):
            continue
        gradient = sf.value_and_grad(loss(pool))
        with world(mesh):
            assert sent(on(mesh, pool, (cut,)).lower(x)) == [], f"{name} on {mesh}"
            assert {n for _, _, n in sent(on(mesh, gradient, (cut,)).lower(x))} == {FLOAT}, (
                f"{name} on {mesh}: the loss alone"
            )
            equal(sf.full(on(mesh, gradient, (cut,))(x)), gradient(x))


def test_the_places_of_maxima_are_counted_through_the_whole_image() -> None:
    x = f(2, 3, 12, 8)
    for mesh in ("2", "2 x 2, rows and columns"):
        with world(mesh):
            got = sf.full(
                on(mesh, lambda x: F.max_pool2d(x, 2, return_indices=True), (MESHES[mesh][2],))(x)
            )
            equal(got, F.max_pool2d(x, 2, return_indices=True))


ELSEWHERE = {
    "no padding": (conv(1), 12, 3),
    "more padding than it needs": (conv(1, padding=2), 12, 3),
    "a stride that leaves a remainder": (conv(1, padding=1, stride=2), 13, 3),
    "a halo longer than a chunk": (conv(1, padding=4), 6, 9),
    "transposed": (lambda x, w, b: F.conv_transpose1d(x, w.transpose(0, 1), b, padding=1), 12, 3),
}


@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_where_chunks_do_not_line_up_the_input_is_gathered(name: str) -> None:
    net, size, kernel = ELSEWHERE[name]
    args, gradient = (
        (f(2, 3, size), f(5, 3, kernel), f(5)),
        sf.value_and_grad(loss(net), argnums=(0, 1, 2)),
    )
    with sf.fake_world(3):
        assert {c.kind for c in on("3", net).lower(*args).collectives} == {"all_gather"}
        equal(sf.full(on("3", gradient)(*args)), gradient(*args))


def test_a_convolution_over_input_channels_adds_its_bias_once() -> None:
    channels, net = (P(None, "h"), P(None, "h"), P()), conv(2, padding=1)
    args, gradient = (
        (f(2, 5, 6, 7), f(3, 5, 3, 3), f(3)),
        sf.value_and_grad(loss(net), argnums=(0, 1, 2)),
    )
    for n in (2, 3, 4):
        with sf.fake_world(n):
            mine = lambda fn: on(str(n), fn, channels)  # noqa: B023
            assert sent(mine(net).lower(*args)) == [("all_reduce", "h", 2 * 3 * 6 * 7 * FLOAT)]
            equal(sf.full(mine(gradient)(*args)), gradient(*args))


def twice(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (
        F.conv2d(F.max_pool2d(F.relu(F.conv2d(x, v, padding=1)), 2), w, padding=2, dilation=2) ** 2
    ).mean()


ARGS = f(2, 3, 24, 16), f(4, 3, 3, 3), f(5, 4, 3, 3)


def real(backend: str) -> tuple[Any, Any, str]:
    """(whole results, local results, the text that is run) on real ranks."""
    fn = on("2", sf.value_and_grad(twice, argnums=(0, 1, 2)), backend=backend)
    out = fn(*ARGS)
    return (sf.full(out), [d.to_local() for d in tree_leaves(out)], fn.compile(*ARGS).code)


def checked(backend: str) -> list[Any]:
    """The local results of each real rank, where all of them equal one device."""
    wanted = sf.value_and_grad(twice, argnums=(0, 1, 2))(*ARGS)
    found = run_ranks(2, real, backend)
    for whole, _, code in found:
        equal(whole, wanted)
        started = [kind for what, kind in collective_events(code) if what == "start"]
        count = started.count("halo")
        assert count == 4, "one for each convolution and each gradient"
    return [local for _, local, _ in found]


def test_gloo_equals_one_device_and_the_simulator() -> None:
    torch.set_num_threads(1)  # as the ranks have
    with sf.fake_world(2):
        simulated = tree_leaves(on("2", sf.value_and_grad(twice, argnums=(0, 1, 2)))(*ARGS))
    for rank, local in enumerate(checked("aten")):
        for a, b in zip(local, simulated, strict=True):
            assert torch.equal(a, b.to_local().shards[rank])


def test_compiled_on_gloo_it_equals_one_device() -> None:
    checked("inductor")
