"""The state of torch.func and of a trace: asked about, and left as it was."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import shardfn as sf
from shardfn._compat import tracing

X = torch.ones(2)


def test_transforms_are_counted_and_their_tensors_known() -> None:
    seen: list[tuple[bool, bool, int]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        inside = tracing.inside_transform()
        seen.append((inside, tracing.is_wrapped(x), tracing.derivative_levels()))
        assert not tracing.is_wrapped(tracing.unwrapped(x))
        return x.sum()

    look(X)
    torch.func.vmap(torch.func.grad(look))(torch.ones(3, 2))
    assert seen == [(False, False, 0), (True, True, 1)]


def test_a_tangent_is_seen_at_any_level() -> None:
    assert not tracing.has_tangent(X) and not tracing.in_dual_level()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        assert tracing.has_tangent(dual) and tracing.carries_tangent(dual)
        assert tracing.in_dual_level() and not tracing.has_tangent(X)
    found: list[bool] = []
    torch.func.jvp(lambda x: (found.append(tracing.carries_tangent(x)), x)[1], (X,), (X,))
    assert found == [True]


def test_an_error_leaves_every_level_that_it_entered() -> None:
    functorch = torch._C._functorch
    with pytest.raises(ZeroDivisionError), tracing.unwound():
        functorch._grad_increment_nesting()
        raise ZeroDivisionError
    assert functorch.get_dynamic_layer_stack_depth() == 0


def test_the_users_saved_tensor_hooks_are_off_inside_and_on_again() -> None:
    packed: list[torch.Tensor] = []
    pack = lambda x: (packed.append(x), x)[1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with tracing.without_saved_hooks():
            X.clone().requires_grad_().exp()
            assert not packed
        X.clone().requires_grad_().exp()
        assert len(packed) == 1


def test_the_index_of_a_sample_is_its_number_in_the_mapped_dim() -> None:
    fn = lambda x: tracing.mapped_index(3, 1, "cpu") + 0 * x.sum().long()
    assert torch.func.vmap(fn)(torch.ones(3, 2)).tolist() == [0, 1, 2]


def test_a_function_as_a_graph_of_aten_ops() -> None:
    module = tracing.trace_aten(lambda x: torch.nn.functional.relu(x) + 1, [X], {})
    ops = [n.name for n in module.graph.nodes if n.op == "call_function"]
    assert ops == ["relu", "add"]


def test_a_captured_value_is_described_once() -> None:
    fn = sf.jit(lambda x: (x * 2, x.max(0)), backend="aten")
    nodes = fn.trace(X).program.graph.graph.nodes
    described = [node for node in nodes if node.op == "call_function"]
    assert described
    assert all("val" in n.meta and "tensor_meta" not in n.meta for n in described)
