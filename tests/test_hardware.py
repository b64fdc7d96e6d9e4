"""Figures of hardware: the time of an op and of a collective, and the links of a mesh."""

from __future__ import annotations

import attrs
import pytest
import torch

import shardfn as sf
from shardfn.hardware import H100, HARDWARE, Hardware, Link, costs_of_links, hardware_of, links_of
from shardfn.types import MeshAxes

NODE = Hardware(
    "a node of 4", flops=100.0, flops32=50.0, memory=10.0, link=8.0, latency=0.5,
    node=4, network=1.0, network_latency=2.0,
)  # fmt: skip


def test_an_op_takes_as_long_as_its_arithmetic_or_its_memory() -> None:
    assert NODE.compute(1000.0, 10.0, torch.bfloat16) == 10.0
    assert NODE.compute(1000.0, 10.0, torch.float32) == 20.0
    assert NODE.compute(1.0, 100.0, torch.bfloat16) == 10.0


def test_a_ring_sends_all_but_one_part_once_or_twice() -> None:
    link = Link(latency=0.5, bandwidth=8.0)
    assert link.send("all_gather", 64.0, 4) == 0.5 + 3 / 4 * 64 / 8
    assert link.send("all_reduce", 64.0, 4) == 0.5 + 2 * 3 / 4 * 64 / 8
    assert NODE.send("all_reduce", 64.0, 4) == link.send("all_reduce", 64.0, 4)


def test_costs_are_relative_to_the_fastest_link() -> None:
    slow, fast = costs_of_links([Link(0.5, 2.0), Link(0.01, 8.0)])
    assert (slow.start, slow.byte) == (4.0, 4.0)
    assert (fast.start, fast.byte) == (1.0, 1.0), "a start costs a byte at least"
    assert costs_of_links([]) == ()


def test_axes_inside_a_node_use_its_links_and_others_the_network() -> None:
    links = NODE.links(MeshAxes(("dp", "tp"), (2, 4)))
    assert links == {"tp": Link(0.5, 8.0), "dp": Link(2.0, 1.0)}
    links = NODE.links(MeshAxes(("dp", "tp"), (2, 2)))
    assert set(links.values()) == {Link(0.5, 8.0)}, "4 ranks in one node"


def test_ranks_of_a_node_share_the_network_side_by_side() -> None:
    (link,) = NODE.links(MeshAxes(("dp",), (8,))).values()
    assert link.bandwidth == 4.0, "four cards of a node at once"
    links = NODE.links(MeshAxes(("dp", "tp"), (8, 8)))
    assert links["dp"].bandwidth == 1.0


def test_without_nodes_all_ranks_are_joined() -> None:
    flat = attrs.evolve(NODE, node=None)
    links = flat.links(MeshAxes(("dp", "tp"), (64, 8)))
    assert set(links.values()) == {Link(0.5, 8.0)}


def test_hardware_is_given_or_named() -> None:
    assert hardware_of("H100") is hardware_of("h100") is H100 and hardware_of(NODE) is NODE
    with pytest.raises(sf.ShardError) as caught:
        hardware_of("TPU")
    known = "A100, H100, H100-96GB, H200, B200, GB200"
    assert str(caught.value).startswith(
        f"Lowered.time: hardware is 'TPU'\n  needed: the name of a known device ({known}), or"
    )
    assert set(HARDWARE) == {"A100", "H100", "H100-96GB", "H200", "B200", "GB200"}


def test_links_are_of_axes_of_the_mesh() -> None:
    given = {"dp": Link(1.0, 1.0)}
    assert links_of(given, ["dp", "tp"]) == given
    assert links_of(None, ["dp"]) == {}
    for wrong in ({"pp": Link(1.0, 1.0)}, {"dp": 3}):
        with pytest.raises(sf.ShardError, match="an sf.Link for one of the axes dp"):
            links_of(wrong, ["dp"])


def test_programs_reach_a_share_of_each_figure() -> None:
    shares = sf.Efficiency(
        product8=0.5, product16=0.2, product32=0.1, attention=0.25, memory=0.4, link=0.8,
        network=0.5,
    )  # fmt: skip
    card = attrs.evolve(NODE, flops8=200.0, efficiency=shares)
    products = {torch.float8_e4m3fn: 100.0, torch.bfloat16: 20.0, torch.float32: 5.0}
    for dtype, reached in products.items():
        assert card.compute(1000.0, 0.0, dtype) == pytest.approx(1000.0 / reached)
    assert card.compute(1000.0, 0.0, torch.bfloat16, is_attention=True) == 40.0
    assert card.compute(0.0, 100.0, torch.bfloat16) == 25.0
    assert card.links(MeshAxes(("dp", "tp"), (2, 4))) == {
        "tp": Link(0.5, 6.4),
        "dp": Link(2.0, 0.5),
    }
    assert card.send("all_gather", 64.0, 4) == Link(0.5, 6.4).send("all_gather", 64.0, 4)


def test_a_limit_of_power_slows_arithmetic_alone() -> None:
    card = attrs.evolve(NODE, power=0.5)
    assert card.compute(1000.0, 10.0, torch.bfloat16) == 20.0
    assert card.compute(1000.0, 10.0, torch.float32, is_attention=True) == 40.0
    assert card.compute(1.0, 100.0, torch.bfloat16) == 10.0
    assert card.send("all_gather", 64.0, 4) == NODE.send("all_gather", 64.0, 4)
    assert card.peak(torch.bfloat16) == NODE.peak(torch.bfloat16)
    with pytest.raises(sf.ShardError, match="power is 0, a int, and must be a number above 0"):
        attrs.evolve(NODE, power=0)


def test_a_kernel_takes_its_start_beside_its_work() -> None:
    card = attrs.evolve(NODE, launch=3.0)
    assert card.compute(1000.0, 10.0, torch.bfloat16) == 13.0


def test_a_card_without_8_bit_products_runs_them_as_wider_ones() -> None:
    assert NODE.peak(torch.float8_e5m2) == NODE.peak(torch.bfloat16) == 100.0


@pytest.mark.parametrize("share", [0.0, 1.5, "half"])
def test_a_share_is_above_0_and_at_most_1(share: object) -> None:
    with pytest.raises(sf.ShardError) as caught:
        sf.Efficiency(memory=share)  # pyright: ignore[reportArgumentType]
    assert "Efficiency, memory" in str(caught.value)
    with pytest.raises(sf.ShardError, match="an sf.Efficiency"):
        attrs.evolve(NODE, efficiency=share)
