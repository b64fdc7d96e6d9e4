"""Blocks that repeat are called: what differs in anything that counts is never one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import shardfn as sf
from shardfn import _tree
from shardfn.compile.repeats import CALL, outline
from tests.support.outlined import copies, outlined, run_outlined

Fn = Callable[..., Any]
N, D = 3, 5


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def block(x: torch.Tensor, w: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Nine ops that compute."""
    y = torch.tanh(x @ w) * scale
    return x + torch.sin(y) + torch.exp(-y.square()) - torch.cos(y)


def stack(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in ws:
        x = block(x, w)
    return x


def lowered_and_checked(fn: Fn, *args: Any, donated: bool = False) -> Any:
    """The lowered function, whose program with calls gives what the function gives."""
    lowered = sf.jit(fn, donate_argnums=0 if donated else ()).lower(*args)
    expected = _tree.leaves(fn(*args))
    own = [x.clone() for x in _tree.leaves(args)]
    for result, wanted in zip(run_outlined(lowered, own), expected, strict=False):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    return lowered


def calls(fn: Fn, *args: Any, **options: Any) -> list[int]:
    graph, _ = outlined(lowered_and_checked(fn, *args, **options))
    return copies(graph)


def test_equal_blocks_are_one_kind() -> None:
    assert calls(stack, [rows(D, D) for _ in range(6)], rows(N, D)) == [6]


def test_forward_and_backward_of_blocks_are_kinds() -> None:
    def loss(ws: Any, x: torch.Tensor) -> torch.Tensor:
        return stack(ws, x).sum()

    found = calls(sf.value_and_grad(loss), [rows(D, D) for _ in range(6)], rows(N, D))
    assert sum(found) >= 10


def test_the_program_of_twice_the_blocks_has_no_more_kinds_and_few_more_ops() -> None:
    sizes = []
    for count in (8, 16):
        lowered = sf.jit(stack).lower([rows(D, D)] * count, rows(N, D))
        graph, kinds = outlined(lowered)
        sizes.append((len(kinds), sum(n.op == "call_function" for n in graph.nodes)))
    assert sizes[0][0] == sizes[1][0] == 1
    assert sizes[1][1] - sizes[0][1] == 8 * 2  # a call and its result


def test_a_block_with_another_constant_is_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for k, w in enumerate(ws):
            x = block(x, w, scale=3.0 if k == 2 else 2.0)
        return x

    assert calls(fn, [rows(D, D) for _ in range(6)], rows(N, D)) == [5]


def test_a_block_with_another_op_is_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for k, w in enumerate(ws):
            y = (torch.sigmoid if k == 3 else torch.tanh)(x @ w)
            x = x + torch.sin(y) + torch.exp(-y.square()) - torch.cos(y) * 2 + 1
        return x

    graph, kinds = outlined(lowered_and_checked(fn, [rows(D, D) for _ in range(6)], rows(N, D)))
    for number, kind in kinds.items():
        of_kind = [n for n in graph.nodes if n.target is CALL and n.args[2] == number]
        if kind.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            assert len(of_kind) <= 5


def test_a_block_of_another_dtype_is_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = block(x.to(w.dtype), w)
        return x

    ws = [rows(D, D, dtype=torch.float32 if k < 5 else torch.float64) for k in range(10)]
    assert calls(fn, ws, rows(N, D)) == [5, 5]


def test_a_block_of_other_shapes_is_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> Any:
        return [stack([w] * 5, x[:, : len(w)]) for w in ws]

    found = calls(fn, [rows(4, 4), rows(5, 5), rows(4, 4)], rows(N, 5))
    assert sum(found) <= 15
    assert max(found) <= 10


def test_a_block_of_other_strides_is_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            y = w + 1
            x = x + (torch.sin(y) * torch.cos(y) - y.square()).tanh().exp() * y
        return x

    ws = [rows(D, D), rows(D, D), rows(D, D).t(), rows(D, D).t()]
    lowered = lowered_and_checked(fn, ws, rows(D, D))
    graph, kinds = outlined(lowered)
    strides = {
        tuple(tuple(x.meta["val"].stride()) for x in kind.graph.find_nodes(op="placeholder"))
        for kind in kinds.values()
    }
    assert len(strides) == len(kinds)
    assert max(copies(graph), default=0) <= 2


def test_views_of_values_of_other_shapes_are_of_another_kind() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            y = w.view(-1)
            x = x + torch.sin(y) * torch.cos(x) + torch.exp(-(y * x).square()) * torch.tanh(y) - 1
        return x

    ws = [rows(2, 8) if k < 5 else rows(4, 4) for k in range(10)]
    assert calls(fn, ws, rows(16)) == [5, 5]


def test_a_value_that_two_blocks_share_and_others_do_not_is_told() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for a, b in ws:
            x = block(block(x, a), b)
        return x

    a, b = rows(D, D), rows(D, D) + 1
    assert sum(calls(fn, [(a, b), (a, a), (b, a), (b, b)], rows(N, D))) in (4, 8)


def test_residuals_across_blocks_are_read_where_they_are() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for w in ws:
            found.append(block(found[-1], w) + found[0])
        return torch.stack(found).sum(0)

    assert max(calls(fn, [rows(D, D) for _ in range(6)], rows(N, D))) >= 5


def test_random_numbers_of_copies_stay_different() -> None:
    def fn(ws: Any, x: torch.Tensor) -> Any:
        found = []
        for w in ws:
            x = block(x, w)
            found.append(F.dropout(torch.ones(2, 64), 0.5))
        return x, found

    sf.random.state.seed(3)
    compiled = sf.jit(fn)
    _, masks = compiled([rows(D, D) for _ in range(6)], rows(N, D))
    texts = {tuple(mask.flatten().tolist()) for mask in masks}
    assert len(texts) == 6


def test_states_are_written_where_they_are_donated() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        return [block(block(w, x), w) for w in state]

    lowered = lowered_and_checked(fn, [rows(D, D) + k for k in range(6)], rows(D, D), donated=True)
    graph, _ = outlined(lowered)
    written = [len(node.args[1]) for node in graph.nodes if node.target is CALL]
    assert sum(written) == 6
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_a_donated_value_that_is_read_later_is_not_written_early() -> None:
    def fn(state: Any, x: torch.Tensor) -> Any:
        new = [block(block(w, x), w) for w in state]
        return new, torch.stack(state).sum()

    lowered = lowered_and_checked(fn, [rows(D, D) + k for k in range(6)], rows(D, D), donated=True)
    graph, _ = outlined(lowered)
    assert not any(node.args[1] for node in graph.nodes if node.target is CALL)


@pytest.mark.parametrize("is_read", ["never", "later", "in the block"])
def test_a_donated_value_is_written_only_if_no_part_of_it_is_read_besides(is_read: str) -> None:
    def fn(x: torch.Tensor, *state: torch.Tensor) -> Any:
        parts = [w.split([2, D - 2])[1] for w in state]
        new = []
        for w, part in zip(state, parts, strict=True):
            y = part.sum() if is_read == "in the block" else x
            new.append(torch.sinh(block(w, x) @ w) * torch.cos(y))
        late = torch.cat(parts).sum() if is_read == "later" else x
        for w, y in zip(state, new, strict=True):
            w.copy_(y)
        return [late]

    state = [rows(D, D) + k for k in range(6)]
    traced = make_fx(fn, tracing_mode="fake")(rows(D, D), *state)
    graph, _ = outline(traced.graph)
    calls = [node for node in graph.nodes if node.target is CALL]
    assert len(calls) == 6
    assert all(bool(node.args[1]) == (is_read == "never") for node in calls)


def test_several_results_of_an_op_are_read_across_the_border_of_blocks() -> None:
    def fn(ws: Any, x: torch.Tensor) -> Any:
        found = []
        for k, w in enumerate(ws):
            x = block(x, w)
            values, places = x.sort(dim=0)
            x = x + values
            found.append(places if k == 3 else places * 2)
        return x, found

    assert max(calls(fn, [rows(D, D) for _ in range(8)], rows(N, D))) >= 7


def test_views_of_results_are_made_outside_of_blocks() -> None:
    def fn(ws: Any, x: torch.Tensor) -> Any:
        found = []
        for w in ws:
            x = block(x, w)
            found.append(x.t().reshape(-1))
        return found, torch.stack(found)

    assert sum(calls(fn, [rows(D, D) for _ in range(6)], rows(D, D))) >= 6


def test_a_collective_is_in_no_block() -> None:
    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = block(x, w)
        return x.sum()

    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("tp",))
        column = sf.P(None, "tp")
        step = sf.shard(fn, mesh, ([column] * 6, sf.P()))
        lowered = step.lower([rows(4, 4) for _ in range(6)], rows(N, 4))
        graph, kinds = outlined(lowered)
        inside = [node for kind in kinds.values() for node in kind.graph.nodes]
        assert not any("collective" in node.meta for node in inside)
        before = [n.target for n in lowered.program.graph.nodes if "collective" in n.meta]
        assert [n.target for n in graph.nodes if "collective" in n.meta] == before


def test_a_collective_of_our_own_is_in_no_block() -> None:
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sf.ppermute(block(x, w), "tp", [(0, 1), (1, 0)])

    def fn(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = sf.shard_map(layer, None, (sf.P(), sf.P("tp")), sf.P("tp"))(w, x)
        return x

    with sf.fake_world(2):
        step = sf.shard(fn, sf.make_mesh((2,), ("tp",)), (sf.P(), sf.P("tp")))
        graph, kinds = outlined(step.lower([rows(D, D) for _ in range(6)], rows(4, D)))
        assert kinds
        inside = [node for kind in kinds.values() for node in kind.graph.nodes]
        assert not any("collective" in node.meta for node in inside)
        assert sum("collective" in node.meta for node in graph.nodes) == 6


def test_compiled_blocks_write_the_state_of_an_optimizer() -> None:
    opt = sf.optim(torch.optim.AdamW, lr=0.1)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        before = sum(p.sum() for p in params.values())
        value, grads = sf.value_and_grad(lambda p: stack([*p.values()], x).square().mean())(params)
        return *opt.update(params, grads, state), value, before

    params = {str(k): rows(D, D) + k / 7 for k in range(4)}
    args = params, opt.init(params), rows(N, D)
    run = sf.jit(step, donate_argnums=(0, 1))
    graph, _ = outlined(run.lower(*args))
    assert any(node.args[1] for node in graph.nodes if node.target is CALL)
    plain, own = args, sf.tree_map(torch.clone, args)
    for _ in range(2):
        wanted, got = step(*plain), run(*own)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        plain, own = (*wanted[:2], args[2]), (*got[:2], own[2])


@pytest.mark.parametrize("donated", [False, True])
def test_compiled_code_calls_blocks(donated: bool) -> None:
    def loss(ws: Any, x: torch.Tensor) -> torch.Tensor:
        return stack(ws, x).square().mean()

    def step(ws: Any, x: torch.Tensor) -> Any:
        value, grads = sf.value_and_grad(loss)(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    args = [rows(D, D) + k / 7 for k in range(6)], rows(N, D)
    wanted, value = step(*args)
    run = sf.jit(step, donate_argnums=0 if donated else ())
    new, got = run([w.clone() for w in args[0]], args[1])
    torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new, wanted, rtol=1e-12, atol=1e-12)


def test_constants_that_repeat_are_made_once() -> None:
    def fn(ts: list[torch.Tensor]) -> torch.Tensor:
        grids = [F.affine_grid(t, [2, 1, 3, 4], align_corners=k < 2) for k, t in enumerate(ts)]
        return torch.stack(grids).square().sum()

    ts = [rows(2, 2, 3) * k for k in range(4)]
    value, grads = sf.jit(sf.value_and_grad(fn), backend="inductor")(ts)
    wanted, gradients = sf.value_and_grad(fn)(ts)
    torch.testing.assert_close((value, grads), (wanted, gradients))
