"""Capture: one functional program that computes what the function does, each node with its line
and its phase.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import _tree
from shardfn.capture import Arguments, Captured, capture
from shardfn.types import TENSOR

G = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, generator=G, dtype=torch.float64)
Y = torch.randn(5, 3, generator=G, dtype=torch.float64)
W = torch.randn(3, 2, generator=G, dtype=torch.float64)
CLOSED = torch.randn(3, generator=G, dtype=torch.float64)


def captured(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    paths = _tree.argument_paths(fn, args, kwargs)
    return capture(fn, "f", Arguments.of(args, kwargs, paths))


def ops(found: Captured) -> list[torch.fx.Node]:
    return [n for n in found.program.graph.graph.nodes if n.op == "call_function"]


def computed(found: Captured, *args: Any, **kwargs: Any) -> Any:
    """What the program computes, as the tree that the function returns."""
    inputs = [x for x in _tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    feed = iter(torch.fx.Interpreter(found.program.graph).run(*inputs, *found.closed_over))
    return _tree.unflatten(
        found.program.out_tree,
        [next(feed) if leaf is TENSOR else leaf for leaf in found.program.out_leaves],
    )


def same(got: Any, wanted: Any) -> None:
    assert _tree.flatten(got)[1] == _tree.flatten(wanted)[1]
    for a, b in zip(_tree.leaves(got), _tree.leaves(wanted), strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert a == b


def check(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """Capture, and compare with the function itself."""
    found = captured(fn, *args, **kwargs)
    same(computed(found, *args, **kwargs), fn(*args, **kwargs))
    assert not [n for n in ops(found) if n.target is not getitem and n.target._schema.is_mutable], (
        "no in-place op remains"
    )
    return found


# in-place writes to values of the function's own


def writes_rows(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0] = 1
    x.relu_()
    return x


def writes_through_views(x: torch.Tensor) -> Any:
    y = x * 1
    column = y[:, 1]
    column.add_(2)
    y.t()[0].mul_(3)
    return y, column


def writes_to_a_new_tensor(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(5, 3, dtype=x.dtype)
    out[1:3] += x[1:3]
    out.masked_fill_(x > 1, 7.0)
    out[:, torch.tensor([0, 2])] = x[:, :2]
    return out


def writes_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(3, 3)
    for k in range(3):
        out[k] = x[k] * k
    return out


def writes_what_it_later_reads(x: torch.Tensor) -> Any:
    y = x + 1
    before = y * 2
    y.zero_()
    return before, y, y + x


WRITERS = (
    writes_rows,
    writes_through_views,
    writes_to_a_new_tensor,
    writes_in_a_loop,
    writes_what_it_later_reads,
)


@pytest.mark.parametrize("fn", WRITERS, ids=lambda fn: fn.__name__)
def test_writes_to_values_of_its_own_become_functional(fn: Callable[..., Any]) -> None:
    before = X.clone()
    check(fn, X)
    assert torch.equal(X, before)


def test_gradients_flow_through_writes_in_place() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (writes_rows(x) * writes_what_it_later_reads(x)[2]).sum()

    found = captured(sf.grad(loss), X)
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    same(computed(found, X), wanted)


# results


def test_results_may_be_inputs_views_and_the_same_value_twice() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x * y
        return {"x": x, "view": x.t(), "z": z, "again": z, "part": z[1:], "nothing": None}

    found = check(fn, X, Y)
    wanted = tuple(f"result['{name}']" for name in ("x", "view", "z", "again", "part"))
    assert found.program.out_paths == wanted


def test_constants_stand_in_the_result_where_they_were() -> None:
    def fn(x: torch.Tensor, k: int, name: str = "a") -> Any:
        return [x * k, k, (name, None, True), {"dtype": torch.float64, "size": x.shape[0]}]

    found = check(fn, X, 3, name="b")
    assert found.program.in_paths == ("x",)
    assert len(found.program.out_paths) == 1


def test_a_function_without_any_op_and_one_without_any_tensor_result() -> None:
    check(lambda x: x, X)
    check(lambda x, k: (k, x.shape[0], "done"), X, 2)
    check(lambda x: torch.ones(2, dtype=x.dtype), X)


# inputs


def test_arguments_and_keywords_are_inputs_in_the_order_of_the_tree() -> None:
    def fn(
        params: Any, x: torch.Tensor, *rest: torch.Tensor, scale: float, bias: torch.Tensor
    ) -> Any:
        return x @ params["w"] * scale + bias + sum(r.sum() for r in rest)

    args, kwargs = ({"w": W, "unused": Y}, X, Y, Y), {"scale": 2.0, "bias": W[0]}
    found = check(fn, *args, **kwargs)
    assert found.program.in_paths == (
        "params['w']",
        "params['unused']",
        "x",
        "rest[0]",
        "rest[1]",
        "bias",
    )


def test_tensors_that_it_closes_over_become_inputs_and_keep_their_identity() -> None:
    found = check(lambda x: x * CLOSED + CLOSED, X)
    assert found.program.in_paths == ("x", "<closed over 0>")
    assert found.closed_over[0] is CLOSED

    inner = torch.ones(3, dtype=torch.float64)
    found = check(lambda x: (x * inner, CLOSED), X)
    assert {id(t) for t in found.closed_over} == {id(inner), id(CLOSED)}


def test_tensors_that_it_writes_out_become_inputs_with_their_values() -> None:
    found = check(lambda x: x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3), X)
    assert [t.tolist() for t in found.closed_over] == [[1.0, 2.0, 3.0]]


def test_the_same_tensor_twice_is_two_inputs() -> None:
    found = check(lambda a, b: a * 2 + b, X, X)
    assert found.program.in_paths == ("a", "b")
    same(computed(found, X, Y), X * 2 + Y)


def test_shapes_without_values_are_enough() -> None:
    found = captured(lambda x: (x @ x.t()).sum(0), sf.ShapeDtype((5, 3), torch.float64))
    assert [
        tuple(n.meta["val"].shape)
        for n in found.program.graph.graph.find_nodes(op="output")[0].args[0]
    ] == [(5,)]
    same(torch.fx.Interpreter(found.program.graph).run(X)[0], (X @ X.t()).sum(0))


def test_strides_of_arguments_are_kept() -> None:
    found = check(lambda x: x.reshape(-1) + 1, X.t())
    (holder,) = found.program.graph.graph.find_nodes(op="placeholder")
    assert holder.meta["val"].stride() == X.t().stride()


# lines and phases


def two_layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ params["w"])
    h = F.layer_norm(h, (2,), params["g"])
    return (h * h).sum()


def two_layers_written_in_place(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = (x @ params["w"]).tanh_()
    h = F.layer_norm(h, (2,), params["g"])
    h[0] = 0
    return (h * h).sum()


def gradient_twice(params: Any, x: torch.Tensor) -> torch.Tensor:
    inner = lambda w: (torch.tanh(x @ w) ** 2).sum()
    return (sf.grad(inner)(params["w"]) ** 2).sum() + params["g"].sum()


PARAMS = {"w": W, "g": torch.ones(2, dtype=torch.float64)}


def line_of(node: torch.fx.Node) -> int:
    file, line = node.meta["source"].rsplit(":", 1)
    assert file == __file__, f"{node} is said to come from {file}"
    return int(line)


@pytest.mark.parametrize(
    "fn", [two_layers, two_layers_written_in_place, gradient_twice], ids=lambda fn: fn.__name__
)
def test_every_node_has_a_phase_and_a_line_of_the_function_or_of_the_call_of_grad(
    fn: Callable[..., Any],
) -> None:
    def step(params: Any, x: torch.Tensor) -> Any:
        return sf.value_and_grad(fn)(params, x)

    first = fn.__code__.co_firstlineno
    lines = {*range(first + 1, first + 6), step.__code__.co_firstlineno + 1}
    for found in (captured(fn, PARAMS, X), captured(step, PARAMS, X)):
        assert {n.meta["phase"] for n in ops(found)} <= {"forward", "backward"}
        lost = [n.name for n in ops(found) if n.meta["source"] is None]
        assert not lost, f"without a line: {lost}"
        assert {line_of(n) for n in ops(found)} <= lines
    assert {n.meta["phase"] for n in ops(found)} == {"forward", "backward"}


@pytest.mark.parametrize(
    "fn", [two_layers, two_layers_written_in_place, gradient_twice], ids=lambda fn: fn.__name__
)
def test_a_node_of_the_backward_has_the_line_of_its_forward_op(fn: Callable[..., Any]) -> None:
    found = captured(sf.grad(fn), PARAMS, X)
    first, aten = fn.__code__.co_firstlineno, torch.ops.aten
    backward = [n for n in ops(found) if n.meta["phase"] == "backward"]
    places = {
        aten.mm.default: first + 1,
        aten.tanh_backward.default: first + 1,
        aten.native_layer_norm_backward.default: first + 2,
    }
    said = {n.name: n.meta["source"] for n in backward if n.target in places}
    assert said == {
        n.name: f"{__file__}:{places[n.target]}" for n in backward if n.target in places
    }


@pytest.mark.parametrize(
    "fn", [two_layers, two_layers_written_in_place], ids=lambda fn: fn.__name__
)
def test_every_collective_of_a_gradient_has_a_line_of_the_function(fn: Callable[..., Any]) -> None:
    with sf.fake_world(2):
        step = sf.shard(
            sf.grad(fn), sf.make_mesh((2,), ("dp",)), (sf.P(), sf.P("dp")), backend="aten"
        )
        found = step.lower(PARAMS, X).collectives
    first = fn.__code__.co_firstlineno
    said = [(c.kind, c.name, c.source) for c in found]
    assert said and all(
        source in {f"{__file__}:{first + k}" for k in range(1, 5)} for _, _, source in said
    ), said


def test_the_graph_module_of_a_program_runs_as_it_prints() -> None:
    found = captured(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), X)
    assert torch.equal(
        found.program.graph(X, *found.closed_over)[0], X * torch.tensor([1.0, 2.0, 3.0])
    )


def test_every_value_is_known() -> None:
    found = captured(sf.value_and_grad(two_layers_written_in_place), PARAMS, X)
    assert all("val" in n.meta for n in found.program.graph.graph.nodes if n.op != "output")


# decompositions

POSITIVE = X.abs() + 0.1
DECOMPOSED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "mean": (lambda x: x.mean(), (X,)),
    "mean of a dim": (lambda x: x.mean(-1, keepdim=True), (X,)),
    "mean of dims": (lambda x: x.mean((0, 1)), (X,)),
    "mean of no dims": (lambda x: x.mean([]), (X,)),
    "mean of a scalar": (lambda x: x.sum().mean(0), (X,)),
    "mean in another dtype": (lambda x: x.mean(0, dtype=torch.float32), (X,)),
    "mean of nothing": (lambda x: x[:0].mean(), (X,)),
    "var": (lambda x: x.var(), (X,)),
    "var of a dim": (lambda x: x.var(0, correction=2), (X,)),
    "var of a row": (lambda x: x[:1].var(1, unbiased=False), (X,)),
    "var and mean": (lambda x: torch.cat(torch.var_mean(x, 1, keepdim=True)), (X,)),
    "std": (lambda x: x.std(0), (X,)),
    "std and mean": (lambda x: torch.stack(torch.std_mean(x, correction=0)), (X,)),
    "norm": (lambda x: x.norm(), (X,)),
    "norm of a dim": (lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True), (X,)),
    "norm of dims": (lambda x: torch.linalg.vector_norm(x, dim=(0, -1)), (X,)),
    "norm 1": (lambda x: x.norm(1), (X,)),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, float("inf"), 0), (X,)),
    "norm of zeros": (lambda x: (x * 0).norm(), (X,)),
    "matrix norm": (torch.linalg.matrix_norm, (X,)),
    "max": (lambda x: x.max(), (X,)),
    "min": (lambda x: x.min(), (X,)),
    "max of ties": (lambda x: torch.relu(x - 9).max(), (X,)),
    "amax of ties": (lambda x: torch.relu(x - 9).amax(0), (X,)),
    "max of a dim": (lambda x: x.max(0)[0], (X,)),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), (W[0], X, W)),
    "addmm without its bias": (
        lambda x, w: torch.addmm(torch.full((2,), torch.nan, dtype=x.dtype), x, w, beta=0),
        (X, W),
    ),
    "baddbmm": (
        lambda b, x: torch.baddbmm(b, x[None], x.t()[None], beta=0.5, alpha=-1),
        (X[:, 0], X),
    ),
    "addmv": (lambda b, x, v: torch.addmv(b, x, v, beta=2, alpha=3), (X[:, 0], X, CLOSED)),
    "linear": (lambda x, w, b: F.linear(x, w.t(), b), (X, W, W[0])),
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), (X, CLOSED)),
    "batch norm in use": (lambda x: F.batch_norm(x, CLOSED, CLOSED.abs()), (X,)),
    "group norm": (lambda x: F.group_norm(x, 3), (X,)),
    "instance norm": (lambda x: F.instance_norm(x[None]), (X,)),
    "layer norm": (lambda x, w: F.layer_norm(x, (3,), w, w), (X, CLOSED)),
    "mse": (F.mse_loss, (X, Y)),
    "huber": (F.huber_loss, (X, Y)),
    "smooth l1": (F.smooth_l1_loss, (X, Y)),
    "binary cross entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (X, Y)),
    "with logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (X, Y)),
    "soft margin": (lambda x: F.soft_margin_loss(x, Y.sign()), (X,)),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (X, Y)),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(5) % 3, label_smoothing=0.1), (X,)),
    "ignored targets": (lambda x: F.cross_entropy(x, torch.arange(5) % 3, ignore_index=1), (X,)),
    "log sum exp": (lambda x: x.logsumexp(1), (X,)),
    "prod": (lambda x: x.prod(), (X,)),
    "cumulative": (lambda x: x.cumsum(0) + x.cumprod(1), (X,)),
    "power": (lambda x: x**2 + x**-1 + 2**x, (POSITIVE,)),
    "einsum": (lambda x, w: torch.einsum("bi,ij,bj->b", x, w, x[:, :2]), (X, W)),
    "gelu and silu": (lambda x: F.gelu(x) + F.silu(x) + F.softplus(x) + F.elu(x), (X,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (X,)),
    "pad": (lambda x: F.pad(x, (1, -1, 0, 2)), (X,)),
    "index": (lambda x: x[torch.tensor([4, 0, 0])] * x[:3], (X,)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [2], [1], [1], [0]])), (X,)),
}


@pytest.mark.parametrize("case", list(DECOMPOSED))
def test_the_value_and_the_gradient_are_torchs(case: str) -> None:
    fn, args = DECOMPOSED[case]

    def loss(*xs: torch.Tensor) -> torch.Tensor:
        out = fn(*xs)
        return (
            out.double() * torch.linspace(0.5, 2, out.numel(), dtype=torch.float64).view(out.shape)
        ).sum()

    found = captured(sf.value_and_grad(loss, argnums=tuple(range(len(args)))), *args)
    inputs = [x.clone().requires_grad_() for x in args]
    value = loss(*inputs)
    grads = torch.autograd.grad(value, inputs, allow_unused=True)
    same(
        computed(found, *args),
        (
            value.detach(),
            tuple(
                torch.zeros_like(x) if g is None else g for x, g in zip(args, grads, strict=True)
            ),
        ),
    )


HALF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(0),
    "norm": lambda x: x.norm(),
    "var": lambda x: (x / 1000).var(),
    "mse": lambda x: F.mse_loss(x, x - 3),
}


@pytest.mark.parametrize("case", list(HALF))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_reductions_are_as_exact_as_torchs(case: str, dtype: torch.dtype) -> None:
    x = torch.linspace(290, 310, 1001).to(dtype)  # the sum and the squares overflow float16
    found = captured(HALF[case], x)
    wanted = HALF[case](x)
    torch.testing.assert_close(computed(found, x), wanted, rtol=torch.finfo(dtype).eps, atol=0.0)


def cube(x: torch.Tensor) -> torch.Tensor:
    return (
        (x**3 * torch.sin(x)).sum() + (x @ x.t()).tanh().sum() + F.layer_norm(x, (3,)).pow(2).mean()
    )


def test_the_gradient_of_a_gradient_is_torchs() -> None:
    def of_gradient(x: torch.Tensor) -> torch.Tensor:
        return (sf.grad(cube)(x) ** 2).sum()

    found = captured(sf.grad(of_gradient), X)
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(cube(x), x, create_graph=True)
    (wanted,) = torch.autograd.grad((g**2).sum(), x)
    torch.testing.assert_close(computed(found, X), wanted, rtol=1e-10, atol=1e-10)
    assert {n.meta["phase"] for n in ops(found)} == {"forward", "backward"}


def test_prims_are_identities_in_value_and_gradient() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (sf.constrain(x * x, sf.P("dp")) * x).sum()

    found = captured(sf.value_and_grad(loss), X)
    assert {n.target._opname for n in ops(found) if "shardfn" in str(n.target)} == {
        "prim_redistribute",
        "prim_align",
    }
    same(computed(found, X), ((X**3).sum(), 3 * X**2))


def test_a_program_prints_short_and_whole() -> None:
    found = captured(lambda x: torch.relu(x @ W) + 1, X)
    text = str(found.program).splitlines()
    assert text[0] == "f: 3 ops over global shapes"
    assert text[1:3] == [
        "  in    %x: f64[5, 3]",
        "  in    %closed_over_0: f64[3, 2]   # <closed over 0>",
    ]
    assert text[-1] == "  return result = %add: f64[5, 2]"
    assert all("# test_capture.py:" in line for line in text[3:-1])

    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(70):
            x = x + 1
        return x

    found = captured(long, X)
    assert str(found.program).splitlines()[2] == "  ... 70 local ops"
    assert len(found.program.show(found.program, full=True).splitlines()) == 73
