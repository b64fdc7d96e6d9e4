"""optim: torch's optimizers as pure functions equal torch's own, alone and captured."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from stagings import counts
from torch import Tensor

import shardfn as sf
from shardfn import P
from tests.training.optim import table

O, LR = torch.optim, table.LR
RATE = torch.tensor(LR, dtype=torch.float64)
GRADS = [table.tree(i + 1) for i in range(table.STEPS)]


def ran(update: Any, params: Any, state: Any, grads: list[Any]) -> Any:
    """(parameters, state) after some steps."""
    for g in grads:
        params, state = update(params, g, state, RATE)
    return params, state


@pytest.mark.parametrize(("cls", "options"), table.TABLE, ids=table.IDS)
def test_outside_it_equals_torch_to_the_last_bit_and_captured_to_rounding(
    cls: Any, options: Any
) -> None:
    params = table.tree(0)
    before = copy.deepcopy(params)
    wanted, states = table.torchs(cls, options, params, GRADS)
    opt = sf.optim(cls, lr=LR, **options)
    state = opt.init(params)
    step = lambda p, g, s, lr: opt.update(p, g, s, lr=lr)
    eager, eager_state = ran(step, params, state, GRADS)
    assert all(map(torch.equal, table.flat(eager), wanted))
    for own, mine in zip(states, eager_state.values(), strict=True):
        assert all(torch.equal(mine[name], x) for name, x in own.items())
    captures = counts["captures"]
    fn = sf.jit(step, backend="aten")
    captured, captured_state = ran(fn, params, state, GRADS)
    assert counts["captures"] == captures + 1
    assert table.largest(captured, wanted) < 1e-12
    assert table.largest(captured_state, eager_state) < 1e-12
    assert all(map(torch.equal, table.flat(params), table.flat(before)))
    for own in (state, captured_state):  # one structure, from the first step on
        assert [[*x] for x in own.values()] == [[*x] for x in eager_state.values()]


@pytest.mark.skipif(not hasattr(O, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_muon_equals_torch_outside_and_to_rounding_of_bfloat16_captured(dtype: torch.dtype) -> None:
    params, *grads = (sf.tree_map(lambda x: x.to(dtype), table.matrices(i)) for i in range(4))
    wanted, _ = table.torchs(O.Muon, {}, params, grads)
    opt = sf.optim(O.Muon, lr=LR)
    state = opt.init(params)
    step = lambda p, g, s, lr: opt.update(p, g, s, lr=lr)
    eager, _ = ran(step, params, state, grads)
    assert all(map(torch.equal, table.flat(eager), wanted))
    captured, _ = ran(sf.jit(step, backend="aten"), params, state, grads)
    rounding = LR * 2**-4 + (2**-7 if dtype == torch.bfloat16 else 0)
    assert table.largest(captured, wanted) < 3 * rounding


def test_float32_and_complex_parameters() -> None:
    for dtype, limit in [(torch.float32, 1e-6), (torch.complex128, 1e-12)]:
        params, *grads = (
            sf.tree_map(lambda x, dtype=dtype: x.to(dtype), table.tree(i)) for i in range(4)
        )
        wanted, _ = table.torchs(O.Adam, {}, params, grads)
        opt = sf.optim(O.Adam, lr=LR)
        step = lambda p, g, s, lr, opt=opt: opt.update(p, g, s, lr=lr)
        eager, _ = ran(step, params, opt.init(params), grads)
        assert all(map(torch.equal, table.flat(eager), wanted))
        fn = sf.jit(step, backend="aten")
        captured, _ = ran(fn, params, opt.init(params), grads)
        assert table.largest(captured, wanted) < limit


def test_compiled_by_inductor_it_equals_torch() -> None:
    params, options = table.tree(0), {"amsgrad": True}
    wanted, _ = table.torchs(O.AdamW, options, params, GRADS)
    opt = sf.optim(O.AdamW, lr=LR, **options)
    fn = sf.jit(lambda p, g, s, lr: opt.update(p, g, s, lr=lr), backend="inductor")
    captured, _ = ran(fn, params, opt.init(params), GRADS)
    assert table.largest(captured, wanted) < 1e-12


def test_groups_by_pattern_are_parameter_groups() -> None:
    params = table.tree(0)
    groups = {"*.b": {"weight_decay": 0.0}, "out.*": {"lr": 0.5}}
    opt = sf.optim(O.AdamW, lr=LR, weight_decay=0.3, groups=groups)
    w, b, *out = own = [x.clone() for x in table.flat(params)]
    optimizer = O.AdamW(
        [{"params": [w]}, {"params": [b], "weight_decay": 0.0}, {"params": out, "lr": 0.5}],
        lr=LR,
        weight_decay=0.3,
    )
    for p, g in zip(own, table.flat(GRADS[0]), strict=True):
        p.grad = g
    optimizer.step()
    step = lambda p, g, s, lr: opt.update(p, g, s, lr=lr)
    eager, _ = ran(step, params, opt.init(params), GRADS[:1])
    assert all(map(torch.equal, table.flat(eager), own))
    captured, _ = ran(sf.jit(step, backend="aten"), params, opt.init(params), GRADS[:1])
    assert table.largest(captured, own) < 1e-12


def test_a_parameter_without_a_gradient_stays_as_it_is_with_its_state() -> None:
    params, opt = table.tree(0), sf.optim(O.SGD, lr=LR, momentum=0.9)
    grads = {**GRADS[0], "out": [None, None]}
    state = opt.init(params)
    fn = sf.jit(lambda p, g, s: opt.update(p, g, s), backend="aten")
    for new, after in (opt.update(params, grads, state), fn(params, grads, state)):
        assert all(map(torch.equal, new["out"], params["out"]))
        assert [bool(own["started"]) for own in after.values()] == [1, 1, 0, 0]


def through(opt: Any, state: Any) -> Any:
    """A function of gradients, with a step inside."""

    def loss(grads: Any, params: Any, lr: Tensor) -> Tensor:
        new, _ = opt.update(params, grads, state, lr=lr)
        return sum(x.square().sum() for x in table.flat(new))

    return loss


@pytest.mark.parametrize("cls", [O.SGD, O.Adam, O.RMSprop])
def test_a_step_has_derivatives_like_any_function(cls: Any) -> None:
    params = table.tree(0)
    opt = sf.optim(cls, lr=LR, **({"momentum": 0.9} if cls is O.SGD else {}))
    _, state = opt.update(params, GRADS[0], opt.init(params))
    loss = through(opt, state)
    of_lr = cls is not O.RMSprop  # torch's step of RMSprop takes no lr with a derivative
    found = sf.grad(loss, argnums=(0, 2) if of_lr else (0,))(GRADS[1], params, RATE)
    e, tensors = 1e-6, (GRADS[1]["in"]["w"], RATE)
    for tiny, g in zip(tensors, (found[0]["in"]["w"], *found[1:]), strict=False):
        place = (0,) * tiny.dim()
        values = []
        for sign in (1, -1):
            tiny[place] += sign * e
            values.append(float(loss(GRADS[1], params, RATE)))
            tiny[place] -= sign * e
        assert abs((values[0] - values[1]) / (2 * e) - float(g[place])) < 1e-6


def test_vmap_over_learning_rates_and_over_parameters() -> None:
    params, opt = table.matrices(0), sf.optim(O.AdamW, lr=LR)
    grads, state = table.matrices(1), opt.init(params)
    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    many = sf.vmap(lambda lr: opt.update(params, grads, state, lr=lr)[0])(rates)
    for i, lr in enumerate(rates):
        one, _ = opt.update(params, grads, state, lr=lr)
        assert table.largest(sf.tree_map(lambda x, i=i: x[i], many), one) < 1e-12
    both = sf.tree_map(lambda x: torch.stack([x, x + 1]), params)
    new, _ = sf.vmap(lambda p: opt.update(p, grads, state))(both)
    shifted = sf.tree_map(lambda x: x + 1, params)
    one, _ = opt.update(shifted, grads, state)
    assert table.largest(sf.tree_map(lambda x: x[1], new), one) < 1e-12


class Third(O.Optimizer):
    """An optimizer as people write them: a number as state, first values of the parameter, and
    gradients that are written to.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group)

    def one(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["mean"], state["slow"] = torch.zeros_like(p), p.clone()
        state["step"] += 1
        p.grad.add_(p, alpha=0.01)
        beta = group["beta"]
        state["mean"].mul_(beta).add_(p.grad, alpha=1 - beta)
        p.add_(state["mean"] / (1 - beta ** state["step"]), alpha=-group["lr"])
        state["slow"].lerp_(p, 0.5)


class Late(Third):
    """One whose first step is unlike the others, and which draws no zeros."""

    def one(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "last" in state:
            p.sub_(group["lr"] * (p.grad + 0.5 * state["last"]))
        else:
            p.sub_(p.grad)
        state["last"] = p.grad.clone()


class Lion(Third):
    """Signs of a mean of gradients (arXiv 2302.06675)."""

    def one(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if len(state) == 0:
            state["mean"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * 0.1)
        update = state["mean"].clone().mul_(group["beta"])
        p.add_(update.add_(p.grad, alpha=1 - group["beta"]).sign_(), alpha=-group["lr"])
        state["mean"].lerp_(p.grad, 0.01)


class Lamb(Third):
    """Adam whose step has the norm of the parameter (arXiv 1904.00962)."""

    def one(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["first"], state["second"] = (torch.zeros_like(p), torch.zeros_like(p))
        state["step"] += 1
        state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
        state["second"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        first = state["first"] / (1 - 0.9 ** state["step"])
        second = state["second"] / (1 - 0.999 ** state["step"])
        update = first / (second.sqrt() + 1e-6) + 0.01 * p
        norms = p.norm(), update.norm()
        ratio = torch.where(norms[1] > 0, norms[0] / norms[1], 1.0)
        p.add_(update * ratio * -group["lr"])


class Guarded(Third):
    """One that needs a GPU for `capturable`, and reads its count of steps as a number outside of
    compiled code.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        O.Optimizer.__init__(self, params, {"lr": lr, "capturable": False})

    def one(self, p: Tensor, group: dict[str, Any]) -> None:
        assert not group["capturable"] or p.is_cuda
        state = self.state[p]
        if not state:
            state["step"], state["mean"] = torch.tensor(0.0), torch.zeros_like(p)
        state["step"] += 1
        state["mean"].lerp_(p.grad.square(), 1 - 0.999)
        step = state["step"] if torch.compiler.is_compiling() else state["step"].item()
        scale = (1 - 0.999**step) ** 0.5
        p.addcdiv_(p.grad * scale, state["mean"].sqrt(), value=-group["lr"])


class Centered(O.AdamW):
    """A subclass of one of torch's, which calls its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        super().step(closure)


@pytest.mark.parametrize("cls", [Third, Late, Lion, Lamb, Guarded, Centered])
def test_an_optimizer_of_anybodys_whose_step_is_one_graph(cls: Any) -> None:
    params, opt = table.tree(0), sf.optim(cls, lr=LR)
    grads = copy.deepcopy(GRADS)
    wanted, _ = table.torchs(cls, {}, params, copy.deepcopy(GRADS))
    step = lambda p, g, s, lr: opt.update(p, g, s, lr=lr)
    eager, _ = ran(step, params, opt.init(params), grads)
    assert all(map(torch.equal, table.flat(eager), wanted))
    assert all(map(torch.equal, table.flat(grads), table.flat(GRADS)))
    captured, _ = ran(sf.jit(step, backend="aten"), params, opt.init(params), grads)
    assert table.largest(captured, wanted) < 1e-12
    with sf.fake_world(3):
        mesh = sf.make_mesh((3,), ("a",))
        by_rows = {"in": {"w": P("a"), "b": P("a")}, "out": [P(None, "a"), P()]}
        given = sf.distribute(params, mesh, by_rows)
        placed, _ = ran(sf.shard(step, mesh), given, opt.init(given), grads)
        assert table.largest(sf.full(placed), wanted) < 1e-12


def test_an_optimizer_that_needs_a_gpu_for_an_option_needs_none_to_be_captured() -> None:
    params, opt = table.tree(0), sf.optim(Guarded, lr=LR)
    state = sf.jit(opt.init, backend="aten")(params)
    assert all(map(torch.equal, table.flat(state), table.flat(opt.init(params))))
    assert opt.state_placements(P("a"), {"w": params["in"]["w"]})["w"]["mean"] == P("a")
    new, state = sf.jit(sf.optim(Guarded, lr=LR).update, backend="aten")(params, GRADS[0], state)
    wanted, _ = table.torchs(Guarded, {}, params, GRADS[:1])
    assert table.largest(new, wanted) < 1e-12


def test_init_is_captured_too() -> None:
    params, opt = table.tree(0), sf.optim(O.Rprop, lr=LR)
    state = opt.init(params, lr=RATE * 2)
    captured = sf.jit(lambda p, lr: opt.init(p, lr=lr), backend="aten")(params, RATE * 2)
    assert all(map(torch.equal, table.flat(captured), table.flat(state)))
    assert float(state["in.b"]["step_size"][0]) == 2 * LR


def test_it_prints_copies_and_pickles() -> None:
    opt = sf.optim(O.AdamW, lr=0.1)
    assert repr(opt) == "optim(AdamW, lr=0.1)"
    params = table.tree(0)
    wanted, _ = opt.update(params, GRADS[0], opt.init(params))
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        new, _ = other.update(params, GRADS[0], other.init(params))
        assert all(map(torch.equal, table.flat(new), table.flat(wanted)))


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
    ids=str,
)
def test_the_state_of_shapes_is_that_of_tensors_as_shapes(cls: Any, options: Any) -> None:
    opt = sf.optim(cls, **options)
    tensors = {"w": torch.ones(3, 4, dtype=torch.float64), "b": [torch.ones(4)]}
    shape_of = lambda x: sf.ShapeDtype(tuple(x.shape), x.dtype)
    wanted = sf.tree_map(shape_of, opt.init(tensors))
    assert opt.init(sf.tree_map(shape_of, tensors)) == wanted


def test_an_option_and_a_gradient_have_tangents() -> None:
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    opt = sf.optim(torch.optim.SGD, lr=0.5)
    one = torch.tensor(1.0, dtype=torch.float64)

    def by_lr(lr: torch.Tensor) -> torch.Tensor:
        return opt.update(params, {"w": params["w"] * 2}, opt.init(params), lr=lr)[0]["w"].sum()

    def by_gradient(g: torch.Tensor) -> torch.Tensor:
        return opt.update(params, {"w": g}, opt.init(params))[0]["w"].sum()

    assert sf.jvp(by_lr, (one / 2,), (one,))[1] == sf.grad(by_lr)(one / 2) == -6
    ones = torch.ones_like(params["w"])
    assert sf.jvp(by_gradient, (ones,), (ones,))[1] == sf.grad(by_gradient)(ones).sum() == -1


def test_a_replaced_optimizer_is_read_again() -> None:
    params = {"w": torch.ones(1)}
    opt = sf.optim(torch.optim.SGD, lr=0.5)
    step = sf.jit(lambda p: opt.update(p, p, opt.init(p))[0]["w"], backend="aten")
    assert step(params) == 0.5
    opt = sf.optim(torch.optim.SGD, lr=0.25)
    assert step(params) == 0.75
