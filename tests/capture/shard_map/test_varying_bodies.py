"""The varying axes of loops and branches: on which their bodies and arguments agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.capture.control_flow import endings
from shardfn.capture.shard_map.gradients import axes_in
from shardfn.capture.shard_map.varying import Kinds
from shardfn.capture.shard_map.varying_bodies import ENDINGS, Body, ending_of, is_wrap
from shardfn.ops import shard_map
from tests.support.stages.loop_code import Code, varied

DP, TP, NONE = frozenset({"dp"}), frozenset({"tp"}), frozenset()


def scan(carry: Any, row: Any, free: Any, step: Any) -> tuple[Code, Any]:
    """A scan of one carry, one row and one closed-over value, which vary over these axes."""
    code = Code(c=carry, xs=row, w=free)
    c, xs, w = code.inputs
    outs = code.body("step", step, [c, xs], [w])
    return code, code.ending(endings.scan, outs, [c], [xs], 3, False)


def agreed(code: Code, node: Any) -> Any:
    kinds = Kinds(code.module())
    kinds.result(code.axes)
    return ENDINGS[node.target](kinds, node)


def test_a_carry_varies_as_what_is_added_to_it() -> None:
    step = lambda g, c, x, w: [g(torch.add, c, x), g(torch.mul, w, w)]
    code, node = scan(NONE, DP, NONE, step)
    found = agreed(code, node)
    assert found.result == [DP, NONE] and found.brought == {1: [DP]}
    assert list(found.entering.values()) == [[DP, DP]]
    assert varied(code.settled()) == ["c over dp"]


def test_a_closed_over_value_is_made_varying_outside_of_the_body() -> None:
    step = lambda g, c, x, w: [g(torch.add, c, g(torch.mul, x, w)), x]
    code, node = scan(DP, DP, NONE, step)
    assert set(agreed(code, node).free.values()) == {DP}
    module = code.settled()
    assert varied(module) == ["w over dp"] and varied(module.step) == []


def test_an_unread_closed_over_value_stays_invariant() -> None:
    step = lambda g, c, x, w: [g(torch.add, c, x), g(torch.mul, w, 2)]
    assert varied(scan(DP, DP, NONE, step)[0].settled()) == []


def test_axes_go_around_the_loop_until_they_stay() -> None:
    code = Code(a=NONE, b=NONE, c=DP)
    body = lambda g, a, b, c: [b, c, c]
    outs = code.body("step", body, code.inputs, [])
    node = code.ending(endings.scan, outs, code.inputs, [], 3, False)
    assert agreed(code, node).result == [DP] * 3
    assert varied(code.settled()) == ["a over dp", "b over dp"]


def cond(truth: Any, value: Any, branch: Any = None) -> tuple[Code, Any]:
    code = Code(t=truth, x=value, w=NONE)
    t, x, w = code.inputs
    yes = code.body("yes", branch or (lambda g, x: [g(torch.neg, x)]), [], [x])
    no = code.body("no", lambda g, w: [g(torch.sin, w)], [], [w])
    return code, code.ending(endings.cond, t, yes, no)


def test_a_branch_varies_if_either_side_or_the_condition_does() -> None:
    assert agreed(*cond(NONE, DP)).result == [DP]
    assert agreed(*cond(TP, DP)).result == [DP | TP]
    assert agreed(*cond(NONE, NONE)).result == [NONE]
    module = cond(NONE, DP)[0].settled()
    assert varied(module.no) == ["sin over dp"], "its result is as that of the other"


def test_under_a_varying_condition_all_that_is_read_varies() -> None:
    found = agreed(*cond(TP, DP))
    assert sorted(map(sorted, found.free.values())) == [["dp", "tp"], ["tp"]]
    assert varied(cond(TP, NONE)[0].settled()) == ["w over tp", "x over tp"]


def test_a_collective_that_not_all_ranks_reach_is_refused() -> None:
    send = lambda g, x: [g(shard_map.psum, x, "dp", False)]
    with pytest.raises(sf.CaptureError) as caught:
        agreed(*cond(TP, DP, send))
    text = str(caught.value)
    assert text.startswith("cond: psum inside it, and its condition varies over tp")
    assert "psum or pmax it" in text
    (result,) = agreed(*cond(NONE, DP, send)).result
    assert axes_in(result) == NONE


def loop(carry: Any, limit: Any, step: Any = None) -> tuple[Code, Any]:
    code = Code(c=carry, n=limit)
    c, n = code.inputs
    test = code.body("test", lambda g, c, n: [g(torch.lt, c, n)], [c], [n])
    body = code.body("step", step or (lambda g, c: [g(torch.neg, c)]), [c], [])
    return code, code.ending(endings.while_loop, test, body, [c])


def test_a_loop_whose_condition_varies_varies() -> None:
    assert agreed(*loop(NONE, NONE)).result == [NONE]
    assert agreed(*loop(NONE, TP)).result == [TP]
    assert agreed(*loop(DP, TP)).result == [DP | TP]
    assert varied(loop(NONE, TP)[0].settled()) == ["c over tp"]
    send = lambda g, c: [g(shard_map.psum, c, "dp", False)]
    with pytest.raises(sf.CaptureError, match="while_loop: psum inside it"):
        agreed(*loop(DP, NONE, lambda g, c: send(g, g(shard_map.vary, c, "dp"))))


def custom(x: Any, w: Any, rule: Any = None) -> tuple[Code, Any]:
    code = Code(x=x, w=w)
    x, w = code.inputs
    outs = code.body("fn", rule or (lambda g, x, w: [g(torch.mul, x, w)]), [x], [w])
    push = code.body("push", lambda g, x, d: [x, d], [x, x], [])
    return code, code.ending(endings.custom_jvp, "f", outs, push, [x])


def test_if_any_value_of_a_function_with_a_rule_varies_all_do() -> None:
    assert agreed(*custom(DP, NONE)).result == [DP]
    assert agreed(*custom(NONE, TP)).result == [TP]
    assert varied(custom(NONE, TP)[0].settled()) == ["x over tp"]


def test_a_collective_in_a_function_with_a_rule_is_refused() -> None:
    rule = lambda g, x, w: [g(shard_map.psum, x, "dp", False)]
    with pytest.raises(sf.CaptureError, match="psum inside of it"):
        agreed(*custom(DP, NONE, rule))


def test_the_parts_of_a_body_are_found() -> None:
    code, node = scan(NONE, DP, NONE, lambda g, c, x, w: [c, w])
    (run,) = [n for n in code.graph.nodes if is_wrap(n)]
    body = Body(run, code.module().step)
    assert [body.entered(k) for k in range(3)] == [0, 1, None]
    assert body.free == [code.inputs[2]]
    assert ending_of(run) is node and ending_of(body.given[0]) is node
    assert ending_of(body.graph.graph.find_nodes(op="placeholder")[0]) is None
