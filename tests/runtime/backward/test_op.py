"""A call under autograd is one of its ops: hooks, freed graphs, writes in place, optimizers."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stagings import counts
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from shardfn.partition.split_backward import SAVED

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(7, 5, dtype=F64, generator=GENERATOR)
W = torch.randn(5, 3, dtype=F64, generator=GENERATOR)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
HERE = re.compile(re.escape(__file__) + r":\d+")


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().square().sum()


def gradient(x: torch.Tensor = X, scale: float = 1.0) -> torch.Tensor:
    w = W.clone().requires_grad_()
    (loss(w, x) * scale).backward()
    assert w.grad is not None
    return w.grad


STEP = sf.jit(loss, backend="aten")


@pytest.fixture(params=["alone", "sharded"])
def step(request: Any) -> Iterator[tuple[Callable[..., Any], torch.Tensor]]:
    """A step and its parameter, which is a DTensor if it is sharded."""
    if request.param == "alone":
        yield STEP, W.clone().requires_grad_()
        return
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("dp",))
        w = sf.distribute(W, mesh, P("dp")).requires_grad_()
        yield sf.shard(loss, mesh, (P("dp"), P("dp"))), w


def full(x: Any) -> torch.Tensor:
    return sf.full(x.detach())


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(full(found), wanted)


def test_gradients_of_several_calls_accumulate(step: Any) -> None:
    fn, w = step
    for scale in (1.0, 2.0):
        (fn(w, X) * scale).backward()
    close(w.grad, gradient(scale=3.0))
    (fn(w, X) + fn(w, 2 * X)).backward()
    close(w.grad, gradient(scale=4.0) + gradient(2 * X))


def test_torch_autograd_grad_and_a_retained_graph(step: Any) -> None:
    fn, w = step
    value = fn(w, X)
    for _ in range(2):
        (found,) = torch.autograd.grad(value, w, retain_graph=True)
        close(found, gradient())
    assert w.grad is None
    value.backward()
    close(w.grad, gradient())


def test_hooks_of_tensors_and_of_accumulation_are_called(step: Any) -> None:
    fn, w = step
    seen: list[str] = []
    w.register_hook(lambda g: seen.append("gradient") or g * 2)
    w.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    value = fn(w, X)
    value.register_hook(lambda g: seen.append("value") or g * 3)
    value.backward()
    assert seen == ["value", "gradient", "accumulated"]
    close(w.grad, gradient(scale=6.0))


def test_gradients_go_on_through_ops_before_and_after(step: Any) -> None:
    fn, w = step
    (fn(w * 2, X) ** 2).backward()
    plain = W.clone().requires_grad_()
    (loss(plain * 2, X) ** 2).backward()
    assert plain.grad is not None
    close(w.grad, plain.grad)


def test_without_gradients_nothing_is_saved_and_no_other_program_runs(step: Any) -> None:
    fn, w = step
    with torch.no_grad():
        value = fn(w, X)
    assert not value.requires_grad and value.grad_fn is None
    fn(w, X).backward()
    before = counts.copy()
    with torch.no_grad():
        fn(w, X)
    fn(w, X).backward()
    fn(w.detach(), X)
    fn(w.detach().requires_grad_(), X).backward()
    assert counts == before


def test_a_graph_is_freed_as_autograds_are(step: Any) -> None:
    fn, w = step
    value = fn(w, X)
    (saved,) = [x for x in value.grad_fn.saved_tensors if x.shape[-1] == 3][-1:]
    kept = weakref.ref(saved)
    del saved
    value.backward()
    gc.collect()
    assert kept() is None
    assert said(value.backward) == (
        f"{fn}: the autograd graph of the call is freed, because an earlier backward used "
        "it\n  at: HERE\n  try: loss.backward(retain_graph=True) in all backward calls but "
        "the last"
    )


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(sf.ShardError) as error:
        call()
    return HERE.sub("HERE", str(error.value))


def test_a_write_to_what_the_backward_reads_is_refused(step: Any) -> None:
    fn, w = step
    value = fn(w * 1, X)
    value.backward()
    scaled = w * 1
    value = fn((scaled, X)[0], X.clone())
    x = X.clone()
    value = fn(w, x)
    x.add_(1)
    assert said(value.backward) == (
        f"{fn}: a value that the backward needs was modified in place\n  at: HERE\n  try: "
        "write to the tensor after the backward, or write to a clone"
    )


def test_a_write_to_a_result_that_is_saved_is_refused() -> None:
    x = X.clone().requires_grad_()
    out = sf.jit(torch.exp, backend="aten")(x)
    out.detach().add_(1)
    assert "was modified in place" in said(lambda: out.sum().backward())


def test_a_second_derivative_from_outside_is_refused(step: Any) -> None:
    fn, w = step
    assert said(lambda: torch.autograd.grad(fn(w, X), w, create_graph=True)) == (
        f"{fn}: the backward of the call is differentiated, by create_graph or by a "
        "transform\n  at: HERE\n  needed: outside of the called function, only a first derivative "
        "of the call\n  try: use sf.grad or sf.hessian inside the called function, which can "
        "differentiate any number of times; or leave out create_graph"
    )


def test_the_residuals_are_those_that_saved_residuals_lists() -> None:
    def deep(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = sf.checkpoint(lambda w, x: (x @ w).sin().exp())(w, x)
        return (h.tanh() * h).sum()

    for fn in (loss, deep):
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
        lowered = sf.jit(fn, backend="aten").lower(w, x)
        assert lowered.halves is not None
        computed = sum(kind == SAVED for kind, _ in lowered.halves.residuals)
        listed = sf.saved_residuals(fn, w.detach(), x.detach())
        assert computed == sum(r.is_activation for r in listed)
        assert len(lowered.halves.residuals) == len(listed)


def test_a_tensor_that_begins_to_require_grad_is_a_retrace_that_is_explained() -> None:
    fn = sf.jit(lambda w, x: (x @ w).sum(), backend="aten")
    w = W.clone()
    fn(w, X)
    w.requires_grad_()
    assert "w: autograd records it in this call, but did not before" in fn.explain_retrace(w, X)
    fn(w, X).backward()
    assert "already exists: no retrace" in fn.explain_retrace(w, X)


def test_integers_and_results_of_other_arguments_do_not_require_grad() -> None:
    fn = sf.jit(lambda w, x: (x @ w, (x @ w).argmax(1), x * 2), backend="aten")
    w = W.clone().requires_grad_()
    assert [x.requires_grad for x in fn(w, X)] == [True, False, False]
    count = sf.jit(lambda w: w.argmax(), backend="aten")(w)
    assert not count.requires_grad


LAYER = nn.Linear(5, 4).double()
UNFOLLOWED: dict[str, Callable[..., Any]] = {
    "integers": lambda w, x: ((x @ w).argmax(1), LAYER(x).argmax(1)),
    "detached": lambda w, x: ((x @ w).detach(), LAYER(x).detach(), LAYER(x).data),
    "without gradients": torch.no_grad()(lambda w, x: (x @ w, LAYER(x))),
    "gradients inside": lambda w, x: (
        *torch.autograd.grad((x @ w).sin().sum(), [w]),
        *torch.autograd.grad(LAYER(x).sin().sum(), [*LAYER.parameters()]),
    ),
    "sorted by a kernel": lambda w, x: ((x @ w).sort(1).indices, LAYER(x).detach().sort(1)[0]),
}


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("name", UNFOLLOWED)
def test_results_without_gradients_of_what_requires_them(name: str, backend: str) -> None:
    w = W.clone().requires_grad_()
    expected = UNFOLLOWED[name](w, X)
    fn = sf.jit(UNFOLLOWED[name], backend=backend)
    for results in (fn(w, X), fn(w, X)):
        assert_close(results, expected)
        assert not any(x.requires_grad for x in results)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3)).double()


def trained(model: nn.Module, call: Callable[..., torch.Tensor], make: Any) -> list[float]:
    """The losses of a loop as people write it: clipping, momentum, a schedule, accumulation."""
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    losses = []
    for number in range(4):
        value = call(X, Y)
        value.backward()
        losses.append(value.item())
        if number != 1:  # gradients of two batches
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loop_of_a_module_is_that_of_one_device(name: str) -> None:
    wanted = net()
    losses = trained(wanted, lambda x, y: F.cross_entropy(wanted(x), y), OPTIMIZERS[name])
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        model = net()
        step = sf.shard(lambda x, y: F.cross_entropy(model(x), y), mesh, P("dp"))
        before = counts["partitions"]
        found = trained(model, step, OPTIMIZERS[name])
        assert counts["partitions"] == before + 1
    torch.testing.assert_close(found, losses)
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    for p, q in pairs:
        torch.testing.assert_close(p, q)


def test_sharded_parameters_in_a_module_train_as_on_one_device() -> None:
    wanted = net()
    losses = trained(wanted, lambda x, y: F.cross_entropy(wanted(x), y), OPTIMIZERS["AdamW"])
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"))
        model = net()
        for module in (model[0], model[2]):
            for key, p in dict(module.named_parameters()).items():
                placed = sf.distribute(p.detach(), mesh, P("tp"))
                setattr(module, key, nn.Parameter(placed))
        step = sf.shard(lambda x, y: F.cross_entropy(model(x), y), mesh, P("dp"))
        found = trained(model, step, OPTIMIZERS["AdamW"])
        full = [p.detach().full_tensor() for p in model.parameters()]
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(full, [p.detach() for p in wanted.parameters()])


def scaled(model: nn.Module, call: Callable[..., torch.Tensor], scale: float) -> Any:
    """Steps under torch's GradScaler, and the scale after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(call(X.float(), Y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [full(p) for p in model.parameters()], scaler.get_scale()


@pytest.mark.parametrize("scale", [1024.0, 2.0**127], ids=["finite", "overflow"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_grad_scaler_steps_and_skips_as_on_one_device(scale: float, is_sharded: bool) -> None:
    plain, model = net().float(), net().float()
    wanted = scaled(plain, lambda x, y: 9 * F.cross_entropy(plain(x), y), scale)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for module in (model[0], model[2]):
            for key, p in dict(module.named_parameters()).items():
                if is_sharded:
                    placed = sf.distribute(p.detach(), mesh, P("dp"))
                    setattr(module, key, nn.Parameter(placed))
        call = lambda x, y: 9 * F.cross_entropy(model(x), y)
        found = scaled(model, sf.shard(call, mesh, P("dp")), scale)
    torch.testing.assert_close(found, wanted)


def test_a_module_is_called_under_jit_and_its_parameters_have_gradients() -> None:
    wanted, model = net(), net()
    F.cross_entropy(wanted(X), Y).backward()
    F.cross_entropy(sf.jit(model, backend="aten")(X), Y).backward()
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_frozen_parameters_have_none() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    F.cross_entropy(sf.jit(model, backend="aten")(X), Y).backward()
    grads = {name: p.grad is None for name, p in model.named_parameters()}
    assert grads == {"0.weight": True, "0.bias": False, "2.weight": False, "2.bias": False}


def test_autocast_around_a_backward_changes_nothing() -> None:
    found = []
    for is_on in (True, False):  # float32, which autocast would make bfloat16
        w = W.float().requires_grad_()
        value = STEP(w, X.float())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            value.backward()
        assert w.grad is not None
        found.append(w.grad)
    assert torch.equal(found[0], found[1])


def test_dropout_draws_the_same_in_the_backward() -> None:
    fn = lambda w, x: F.dropout(x @ w, 0.5).square().sum()
    states = []
    for call in (sf.jit(fn, backend="aten"), None):
        sf.random.state.seed(3)
        w = W.clone().requires_grad_()
        with sf.random.plain():
            value = (call or fn)(w, X) if call is None else None
        if call is not None:
            value = call(w, X)
        assert value is not None
        value.backward()
        states.append((value.detach(), w.grad))
    torch.testing.assert_close(*states)


def test_a_compiled_call_has_gradients_too() -> None:
    w = W.clone().requires_grad_()
    compiled = STEP.compile(w, X)
    compiled(w, X).backward()
    close(w.grad, gradient())
    assert "saved" in str(STEP.lower(w, X)) and "cotangent" in str(STEP.lower(w, X))


def test_without_values_shapes_go_back() -> None:
    with sf.fake_world(64, numerics=False):
        mesh = sf.make_mesh((64,), ("dp",))
        w = sf.distribute(W, mesh, P()).requires_grad_()
        step = sf.shard(loss, mesh, (P(), P("dp")))
        step(w, X).backward()
        assert w.grad is not None and w.grad.shape == w.shape


def test_a_copy_of_a_module_has_gradients_of_its_own() -> None:
    model = net()
    step = sf.jit(lambda m, x: m(x).sum(), static_argnums=0, backend="aten")
    other = copy.deepcopy(model)
    step(model, X).backward()
    step(other, X).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
