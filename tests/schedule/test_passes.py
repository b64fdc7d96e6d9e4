"""Every pass before and after, in text; and what `check` refuses."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pieces
import pytest
import torch

from shardfn import _compat, schedule
from shardfn.partition import Plan, emit
from shardfn.partition import plan as steps
from shardfn.partition.printing import local_text
from shardfn.partition.redistribute import route
from shardfn.types import LocalProgram, Marks

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
SIZES = (2, 3)
AXES = pieces.mesh_axes(SIZES)


def text(graph: torch.fx.Graph, axes: Any = AXES) -> str:
    """The ops of a local graph, as a printed program has them."""
    (output,) = graph.find_nodes(op="output")
    count = len(graph.find_nodes(op="placeholder")) - len(axes.names)
    program = LocalProgram(
        name="f",
        axes=axes,
        graph=graph,
        unordered=graph,
        in_paths=tuple(f"x{i}" for i in range(count)),
        in_marks=(),
        out_marks=((),) * len(output.args[0]),
        out_paths=tuple(f"out{i}" for i in range(len(output.args[0]))),
        elided=(),
        show=local_text,
    )
    before, after = str(program).split("\n  return")
    ops = [
        line.split("  #")[0]
        for line in before.splitlines()
        if line.startswith("  %")
    ]
    returned = ", ".join(re.findall(r"out\d+ = (%[\w.]+):", after))
    return "\n".join(
        [" ".join(line.split()) for line in ops] + [f"return {returned}"]
    )


def graph_of(
    src: Marks,
    targets: Sequence[tuple[Marks, str]],
    sizes: tuple[int, ...] = SIZES,
) -> torch.fx.Graph:
    """One value of 6 elements brought from one placement to others, each on behalf of a phase."""
    axes, fake = (
        pieces.mesh_axes(sizes),
        _compat.FakeTensorMode().from_tensor(torch.zeros(6, dtype=torch.float64)),
    )
    source, made = steps.Slot(0, fake, src), []
    for k, (dst, phase) in enumerate(targets):
        node = torch.fx.Graph().placeholder(f"user{k}")
        node.meta.update(phase=phase, source=f"model.py:{k + 1}")
        found = route((6,), 8, src, dst, axes)
        assert found is not None
        made.append(
            steps.Redistribute(
                node, source, steps.Slot(k + 1, fake, dst), found[1], False
            )
        )
    plan = Plan(
        axes=axes,
        steps=tuple(made),
        ins=(source,),
        outs=tuple(step.target for step in made),
    )
    return emit(
        plan, (0,) * len(sizes), tuple(f"group:{a}" for a in axes.names), "cpu"
    )


def nothing_agreed(axes: Any = AXES) -> schedule.Agenda:
    """The agenda of a program that sends nothing: what these passes read of it is the mesh."""
    return schedule.agenda(Plan(axes=axes, steps=(), ins=(), outs=()), "f")


def add(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    """One more op before the output, with its value."""
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        node = graph.call_function(target, args)
    node.meta["val"] = target(
        *torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    )
    return node


def returns(graph: torch.fx.Graph, *nodes: torch.fx.Node) -> None:
    graph.find_nodes(op="output")[0].args = (list(nodes),)


def same_text(got: str, wanted: str) -> None:
    assert got == textwrap.dedent(wanted).strip()


def before_and_after(
    run: Callable[..., Any], graph: torch.fx.Graph, axes: Any = AXES
) -> tuple[str, str]:
    """The text before and after a pass, which leaves the graph that it is given alone."""
    before, metas = (
        text(graph, axes),
        [(n.name, dict(n.meta)) for n in graph.nodes],
    )
    schedule.check(graph, axes)
    after = run(graph, nothing_agreed(axes))
    schedule.check(after, axes)
    assert text(graph, axes) == before
    assert [(n.name, n.meta) for n in graph.nodes] == metas
    assert text(run(after, nothing_agreed(axes)), axes) == text(after, axes), (
        "once is enough"
    )
    return before, text(after, axes)


def dead() -> torch.fx.Graph:
    graph = graph_of(("sum", "R"), [(("R", "R"), "forward")])
    (x,) = [n for n in graph.find_nodes(op="placeholder") if n.name == "x0"]
    doubled = add(graph, aten.mul.Tensor, x, 2)
    add(graph, aten.neg.default, doubled)
    returns(graph, x)
    return graph


def test_drop_dead_takes_local_ops_that_nobody_reads_and_keeps_collectives() -> (
    None
):
    before, after = before_and_after(schedule.drop_dead, dead())
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        %mul = mul(%x0, 2): f64[6]
        %neg = neg(%mul): f64[6]
        return %x0
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        return %x0
        """,
    )


def test_elide_size_one_takes_collectives_over_an_axis_of_one_rank() -> None:
    graph = graph_of(("sum", "sum"), [(("R", "R"), "forward")], (1, 3))
    before, after = before_and_after(
        schedule.elide_size_one, graph, pieces.mesh_axes((1, 3))
    )
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        return %wait_tensor_1
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, b](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6]
        return %wait_tensor
        """,
    )


def test_merge_equal_shares_the_first_step_of_two_redistributions_of_one_value() -> (
    None
):
    graph = graph_of(
        ("sum", "sum"), [(("R", "R"), "forward"), (("R", "sum"), "forward")]
    )
    before, after = before_and_after(schedule.merge_equal, graph)
    same_text(
        before,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        %all_reduce_2 = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor_2 = wait_tensor(%all_reduce_2): f64[6; sum@b]
        return %wait_tensor_1, %wait_tensor_2
        """,
    )
    same_text(
        after,
        """
        %all_reduce = all_reduce[sum, a](%x0): f64[6] 48 B
        %wait_tensor = wait_tensor(%all_reduce): f64[6; sum@b]
        %all_reduce_1 = all_reduce[sum, b](%wait_tensor): f64[6] 48 B
        %wait_tensor_1 = wait_tensor(%all_reduce_1): f64[6]
        return %wait_tensor_1, %wait_tensor
        """,
    )


def test_merge_equal_keeps_the_gathers_of_a_forward_and_of_its_backward_apart() -> (
    None
):
    graph = graph_of((0, "R"), [(("R", "R"), "forward"), (("R", "R"), "backward")])
    before, after = before_and_after(schedule.merge_equal, graph)
    assert before == after
    assert before.count("all_gather[a]") == 2


def test_a_pass_with_nothing_to_do_returns_the_graph_itself() -> None:
    graph = graph_of((0, "R"), [(("R", "R"), "forward")])
    for run in (schedule.merge_equal, schedule.elide_size_one, schedule.drop_dead):
        assert run(graph, nothing_agreed()) is graph


def test_a_copy_has_the_same_text_and_shares_no_metadata() -> None:
    graph = graph_of((0, 0), [(("R", "R"), "forward")])
    copy = schedule.copied(graph)
    assert text(copy) == text(graph) and copy is not graph
    for a, b in zip(copy.nodes, graph.nodes, strict=True):
        assert a is not b and a.name == b.name
        assert a.meta == b.meta and a.meta is not b.meta


def test_the_schedule_runs_every_pass_and_checks_after_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        schedule, "check", lambda graph, axes: seen.append("check")
    )
    noting = lambda name: lambda graph, agenda: seen.append(name) or graph
    names = [run.__name__ for run in schedule.PIPELINE]
    assert names == [
        "merge_equal",
        "elide_size_one",
        "bucket",
        "drop_dead",
        "overlap",
    ]
    monkeypatch.setattr(schedule, "PIPELINE", tuple(map(noting, names)))
    schedule.schedule(torch.fx.Graph(), nothing_agreed())
    assert seen == ["check", *(said for name in names for said in (name, "check"))]


def gathering() -> tuple[torch.fx.Graph, torch.fx.Node, torch.fx.Node]:
    """A graph with one collective: the graph, the collective, its wait."""
    graph = graph_of((0, "R"), [(("R", "R"), "forward")])
    (started,) = [n for n in graph.nodes if "collective" in n.meta]
    return graph, started, next(iter(started.users))


def test_check_refuses_a_collective_that_nobody_waits_for() -> None:
    graph, started, wait = gathering()
    wait.replace_all_uses_with(started)
    graph.erase_node(wait)
    refuses(graph, f"{started} must be read by one wait, and by nothing else")


def test_check_refuses_a_second_reader_of_a_collective() -> None:
    graph, started, _ = gathering()
    add(graph, aten.neg.default, started)
    refuses(graph, f"{started} must be read by one wait, and by nothing else")


def test_check_refuses_an_unknown_axis() -> None:
    graph, started, _ = gathering()
    started.meta["collective"] = attrs.evolve(started.meta["collective"], axis="z")
    refuses(graph, f"{started} is over z, which is not an axis of (a=2, b=3)")


def test_check_refuses_a_node_without_a_value() -> None:
    graph, _, wait = gathering()
    del wait.meta["val"]
    refuses(graph, f"{wait} has no value")


def test_check_refuses_a_collective_without_a_record_and_a_record_without_a_collective() -> (
    None
):
    graph, started, _ = gathering()
    record = started.meta.pop("collective")
    refuses(
        graph,
        f"{started} is a collective without a record, or the other way round",
    )
    graph, _, wait = gathering()
    wait.meta["collective"] = record
    refuses(
        graph, f"{wait} is a collective without a record, or the other way round"
    )


def refuses(graph: torch.fx.Graph, said: str) -> None:
    with pytest.raises(AssertionError) as error:
        schedule.check(graph, AXES)
    assert str(error.value).split("\n")[0] == said


def test_check_refuses_a_node_that_is_read_before_it_is_made() -> None:
    graph, started, wait = gathering()
    started.prepend(wait)
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        schedule.check(graph, AXES)
