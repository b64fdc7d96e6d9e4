"""The certificate of a schedule: what it claims is so, and it notices what is not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.hardware import H100, Hardware
from shardfn.inspect.certificate import certify
from shardfn.inspect.memory import peak_bytes
from shardfn.inspect.timeline.clock import Clock
from shardfn.schedule import copied

SLOW = Hardware("slow", flops=1e9, flops32=1e9, memory=1e9, link=1e8, latency=1e-6)


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    for w in params:
        batch = torch.tanh(batch @ w)
    return (batch**2).mean()


def step(params: Any, batch: torch.Tensor) -> Any:
    loss, grads = sf.bucketed_grad(loss_fn, 40_000, 1_000)(params, batch)
    return sf.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss


WHOLE = P()


def lowered(n: int = 4, where: P = WHOLE) -> Any:
    params = [sf.ShapeDtype((64, 64))] * 6
    with sf.fake_world(n):
        mesh = sf.make_mesh((n,), ("dp",), device_type="cpu")
        return sf.shard(step, mesh, (where, P("dp")), backend="aten").lower(
            params, sf.ShapeDtype((30, 64))
        )


@pytest.mark.parametrize("where", [P(), P("dp")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_schedule_holds(n: int, where: P) -> None:
    certificate = lowered(n, where).schedule
    assert certificate.holds and certificate.nodes > 50
    assert str(certificate).count("holds: ") == 3 and "H100" in str(certificate)


def test_overlap_hides_communication_that_the_order_as_written_exposes() -> None:
    certificate = lowered().certify(SLOW)
    assert certificate.after.exposed < 0.6 * certificate.before.exposed
    assert certificate.after.compute == pytest.approx(certificate.before.compute)
    assert certificate.after.communication == pytest.approx(certificate.before.communication)
    assert certificate.exposed_ms == pytest.approx(1e3 * certificate.after.exposed)


def test_every_axis_lists_its_collectives_in_the_order_of_the_program() -> None:
    made = lowered()
    assert made.schedule.order == (("dp", tuple(c.name for c in made.collectives)),)


def broken(change: Any) -> Any:
    """The certificate of a graph that somebody changed."""
    made = lowered()
    graph = copied(made.program.graph)
    change(graph)
    program = attrs.evolve(made.program, graph=graph)
    return certify([program], program, made.schedule_plan, H100)


def starts(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if "collective" in n.meta]


def test_a_wait_after_its_use_is_noticed() -> None:
    def late(graph: torch.fx.Graph) -> None:
        (wait,) = starts(graph)[1].users
        graph.find_nodes(op="output")[0].prepend(wait)

    assert not broken(late).waits_hold and "BROKEN: each wait" in str(broken(late))


def test_collectives_in_another_order_are_noticed() -> None:
    def swap(graph: torch.fx.Graph) -> None:
        first, second = starts(graph)[1:3]
        second.append(first)

    certificate = broken(swap)
    assert not certificate.same_order and not certificate.holds


def test_a_lost_node_is_noticed() -> None:
    def lose(graph: torch.fx.Graph) -> None:
        (wait,) = starts(graph)[0].users
        wait.replace_all_uses_with(starts(graph)[0].args[0])
        graph.erase_node(wait)

    assert not broken(lose).same_nodes


def test_the_timeline_of_a_chain_is_the_sum_of_its_parts() -> None:
    made = lowered(2)
    times = Clock(SLOW, made.program.axes, {}).timeline(made.program.graph)
    sent = sum(SLOW.send(c.kind, c.nbytes, 2) for c in made.collectives)
    assert (
        times.communication == pytest.approx(sent)
        and 0 <= times.exposed <= sent
        and 0 <= times.hidden <= 1
    )


def test_peak_memory_counts_views_once_and_frees_what_is_dead() -> None:
    graph = torch.fx.Graph()
    value = torch.empty(10, 10)

    def add(node: torch.fx.Node, val: torch.Tensor) -> torch.fx.Node:
        node.meta["val"] = val
        return node

    x = add(graph.placeholder("x"), value)
    a = add(graph.call_function(torch.ops.aten.neg.default, (x,)), value)
    b = add(graph.call_function(torch.ops.aten.view.default, (a, [100])), value.view(100))
    c = add(graph.call_function(torch.ops.aten.neg.default, (b,)), value.view(100))
    d = add(graph.call_function(torch.ops.aten.neg.default, (c,)), value.view(100))
    graph.output([d])
    assert peak_bytes(graph) == 3 * 400
