"""mixed_precision: casts of the arguments, and the dtype in which gradients are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks

import shardfn as sf
from shardfn import P

random = torch.Generator().manual_seed(0)
DOUBLE = torch.float64


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random, dtype=DOUBLE)


W = {"up": {"w": _randn(17, 33)}, "down": _randn(33, 7), "norm": torch.ones(33).double()}
X, Y = _randn(65, 17), _randn(65, 7)
SINGLE = sf.tree_map(torch.Tensor.float, W)


def _loss(w: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ w["up"]["w"])
    h = torch.nn.functional.layer_norm(h.to(w["norm"].dtype), (33,), w["norm"])
    return (h.to(w["down"].dtype) @ w["down"] - y).double().square().mean()


def _cast(w: Any, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> Any:
    """The loss with casts written out."""
    low = {"up": {"w": w["up"]["w"].to(dtype)}, "down": w["down"].to(dtype)}
    return _loss({**low, "norm": w["norm"]}, x.to(dtype), y.to(dtype))


FLOAT = {"compute": torch.float32, "params": DOUBLE, "keep": ["norm"]}
MESHES = {(3,): (P("dp"), P("dp")), (2, 2): (P(None), P("dp"))}
TP = {"up": {"w": P(None, "tp")}, "down": P("tp"), "norm": P()}


def _close(a: Any, b: Any) -> None:
    sf.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("reduce", [DOUBLE, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_values_and_gradients_equal_casts_written_out(
    shape: tuple[int, ...], reduce: torch.dtype
) -> None:
    wanted = torch.func.grad_and_value(_cast)(W, X, Y, torch.float32)
    f = sf.mixed_precision(_loss, reduce=reduce, **FLOAT)
    with sf.fake_world(torch.Size(shape).numel()):
        mesh = sf.make_mesh(shape, ("dp", "tp")[: len(shape)])
        where = P("dp") if len(shape) == 1 else TP
        step = sf.shard(sf.bucketed_grad(f), mesh, (where, P("dp"), P("dp")))
        value, grads = step(W, X, Y)
        assert grads["down"].dtype == DOUBLE
        _close(sf.full((grads, value)), wanted)


@pytest.mark.parametrize("transform", [sf.jit, sf.checkpoint, lambda f: f])
def test_under_other_transforms(transform: Any) -> None:
    wanted = torch.func.grad(_cast)(W, X, Y, torch.float32)
    f = transform(sf.mixed_precision(_loss, **FLOAT))
    _close(sf.grad(f)(W, X, Y), wanted)


def test_vmap_and_backward_from_outside() -> None:
    f = sf.mixed_precision(_loss, **FLOAT)
    rows = sf.vmap(f, in_axes=(None, 0, 0))(W, X[:, None], Y[:, None])
    torch.testing.assert_close(rows.mean(), _cast(W, X, Y, torch.float32))
    w = sf.tree_map(lambda x: x.clone().requires_grad_(), W)
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        sf.shard(f, mesh, (P(), P("dp"), P("dp")))(w, X, Y).backward()
    wanted = torch.func.grad(_cast)(W, X, Y, torch.float32)
    _close(sf.tree_map(lambda x: x.grad, w), wanted)


def _sent(f: Any, where: Any) -> dict[str, set[str]]:
    """The dtypes that each kind of collective sends; the loss apart."""
    found: dict[str, set[str]] = {}
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        lowered = sf.shard(f, mesh, (where, P("dp"), P("dp"))).lower(SINGLE, X, Y)
    for line in lowered.text().split("\n"):
        _, _, call = line.partition(" = ")
        name, _, rest = call.partition("[")
        dtype = rest.partition("): ")[2].partition("[")[0]
        if name in ("all_gather", "reduce_scatter", "all_reduce") and dtype != "f64":
            found.setdefault(name, set()).add(dtype)
    return found


@pytest.mark.parametrize("transform", [sf.bucketed_grad, sf.value_and_grad])
def test_parameters_are_gathered_in_the_smaller_dtype(transform: Any) -> None:
    for reduce, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        f = transform(sf.mixed_precision(_loss, reduce=reduce))
        sent = _sent(f, P("dp"))
        assert sent == {"all_gather": {"bf16"}, "reduce_scatter": {name}}
        assert _sent(f, P()) == {"all_reduce": {name}}


def test_the_options_of_bucketed_grad_go_before() -> None:
    f = sf.mixed_precision(_loss, reduce=torch.bfloat16)
    sent = _sent(sf.bucketed_grad(f, reduce_dtype=torch.float32), P())
    assert sent == {"all_reduce": {"f32"}}


def test_parameters_that_match_a_pattern_and_other_arguments_are_left_alone() -> None:
    def dtypes(w: Any, n: torch.Tensor, x: torch.Tensor) -> Any:
        return sf.tree_map(lambda a: a[..., :1] * 1, (w, n, x))

    n = torch.arange(3)
    f = sf.mixed_precision(dtypes, keep=["**.w"], argnums=[0, 1])
    w, n, x = f(SINGLE, n, X)
    assert sf.tree_map(lambda a: a.dtype, w) == {
        "up": {"w": torch.float32},
        "down": torch.bfloat16,
        "norm": torch.bfloat16,
    }
    assert (n.dtype, x.dtype) == (torch.int64, DOUBLE)


def test_a_module_computes_in_the_smaller_dtype() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4))
    forward, params, buffers = sf.functionalize(net)
    f = sf.mixed_precision(lambda p, x: forward(p, buffers, x)[0])
    x = torch.ones(3, 5)
    assert f(params, x).dtype == torch.bfloat16
    grads = sf.grad(lambda p: f(p, x).float().sum())(params)
    assert {g.dtype for g in grads.values()} == {torch.float32}


def _on_a_rank() -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    f = sf.mixed_precision(_loss, **FLOAT)
    step = sf.shard(sf.bucketed_grad(f), mesh, (P("dp"), P("dp"), P("dp")), backend="aten")
    value, grads = step(W, X, Y)
    return sf.full((grads, value))


def test_two_processes() -> None:
    wanted = torch.func.grad_and_value(_cast)(W, X, Y, torch.float32)
    for found in run_ranks(2, _on_a_rank):
        _close(found, wanted)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"compute": torch.int8, "reduce": None},
            "mixed_precision: compute is torch.int8\n  reduce is None\n  needed: floating dtypes\n"
            "  try: torch.bfloat16, torch.float16, torch.float32 or torch.float64",
        ),
        (
            {"compute": "bfloat16"},
            "mixed_precision: compute is 'bfloat16'\n  needed: floating dtypes\n"
            "  try: torch.bfloat16, torch.float16, torch.float32 or torch.float64",
        ),
        (
            {"reduce": torch.float64},
            "mixed_precision: reduce is torch.float64\n"
            "  needed: compute (torch.bfloat16) or params (torch.float32)",
        ),
        (
            {"keep": "norm"},
            "mixed_precision: keep is 'norm'\n  needed: a list of patterns\n"
            '  try: keep=["**.norm.weight"]',
        ),
    ],
)
def test_bad_options(options: Any, text: str) -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.mixed_precision(_loss, **options)
    assert without_line(error.value) == text


def test_bad_parameters() -> None:
    with pytest.raises(sf.ShardError) as error:
        sf.mixed_precision(_loss, keep=["nrom"])(SINGLE, X, Y)
    assert str(error.value).startswith(
        "mixed_precision(_loss), keep: 'nrom' matches no parameter; similar paths are norm\n"
    )
    with pytest.raises(sf.ShardError) as error:
        sf.mixed_precision(_loss)(W, X, Y)
    assert "mixed_precision(_loss): up.w is torch.float64\n  down is" in str(error.value)
    with pytest.raises(sf.TreeError, match="mixed_precision: a int"):
        sf.mixed_precision(3)


def test_autocast_inside_of_a_function_casts_before_the_gather() -> None:
    def loss_fn(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.relu(x @ p["up"])
            s = torch.softmax(torch.nn.functional.linear(h, p["down"]), -1)
        with torch.autocast("cpu", enabled=False):
            return (s.float() - y).square().mean()

    generator = torch.Generator().manual_seed(0)
    shapes = (8, 16), (4, 16), (12, 8), (12, 4)
    up, down, x, y = (torch.randn(s, generator=generator) for s in shapes)
    leaves = [w.clone().requires_grad_() for w in (up, down)]
    loss = loss_fn(dict(zip(("up", "down"), leaves, strict=True)), x, y)
    loss.backward()
    where = {"up": P("dp", "tp"), "down": P(None, "tp")}
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        step = sf.shard(sf.bucketed_grad(loss_fn), mesh, (where, P("dp"), P("dp")), backend="aten")
        args = {"up": up, "down": down}, x, y
        gathers = [c for c in step.lower(*args).collectives if c.kind == "all_gather"]
        assert sum(c.nbytes for c in gathers) == 8 * 8 * 2  # half of `up`, in bfloat16
        value, grads = sf.full(step(*args))
    torch.testing.assert_close(value, loss.detach(), rtol=1e-3, atol=0)
    for found, leaf in zip(grads.values(), leaves, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, leaf.grad, rtol=2e-2, atol=1e-3)
