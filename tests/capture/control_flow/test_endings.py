"""What Dynamo sees of a loop: results of the right shapes, each of which depends on all inputs."""

from __future__ import annotations

import torch

from shardfn.capture.control_flow import endings

C, X = torch.ones(2), torch.ones(3, 2)


def test_a_scan_has_a_row_for_each_step() -> None:
    carry, rows = endings.scan([C, C * 2], [C], [X], 5, False)
    assert carry.shape == (2,) and rows.shape == (5, 2)
    rows[0] = 7
    assert rows[1].tolist() == [2.0, 2.0], "memory of its own"


def test_every_result_depends_on_every_floating_input() -> None:
    carry, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    out, count = endings.while_loop([], [carry * 2, torch.tensor(3)], [other])
    assert out.requires_grad and not count.requires_grad
    _, found = torch.autograd.grad(out.sum(), [carry, other], allow_unused=False)
    assert found.tolist() == [0.0, 0.0]


def test_values_are_those_of_one_run() -> None:
    yes, no = [C, torch.tensor(1)], [C * 2, torch.tensor(2)]
    first, second = endings.cond(torch.tensor(False), yes, no)
    assert first.tolist() == [2.0, 2.0] and int(second) == 2
    assert endings.custom_vjp("f", [C], [], [], [X], [True])[0].tolist() == [1.0, 1.0]
    assert endings.custom_jvp("f", [C], [C], [X])[0].tolist() == [1.0, 1.0]


def test_each_ending_is_replaced_when_the_graph_is_replayed() -> None:
    ours = (endings.scan, endings.cond, endings.while_loop)
    rules = (endings.custom_vjp, endings.custom_jvp)
    assert set(ours) | set(rules) < set(endings.REPLAYED)
