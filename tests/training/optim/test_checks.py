"""What is not an optimizer of pure steps is refused by name, and so is what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardfn as sf
from tests.training.optim import table

O = torch.optim
PARAMS, GRADS = table.tree(0), table.tree(1)
OPT = sf.optim(O.AdamW, lr=0.1)
STATE = OPT.init(PARAMS)


class Own(O.Optimizer):
    """A base of optimizers that are refused."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class WithClosure(Own):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Reads(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            p.sub_(p.grad * min(1.0, p.grad.norm().item()))


class Branches(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            if p.grad.sum() > 0:
                p.sub_(p.grad)


class Counts(Own):
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.param_groups[0]["lr"] *= 0.5


class Elsewhere(Own):
    """State in a container, in a tensor that is written to, and in another optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.means: dict[Tensor, Tensor] = {}
        self.steps = torch.zeros(())
        self.inner = O.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            self.means[p] = p.grad + self.means.get(p, 0)
        self.steps += 1
        self.inner.step()


class Keeps(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = self.parameters()
        self.inner = O.SGD(self.parameters(), lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class OfSizes(Own):
    """State whose entries depend on the size of a parameter."""

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            self.state[p]["large" if p.numel() > 10 else "small"] = torch.zeros_like(p)


class LaterMore(Own):
    """State that grows after some steps."""

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            count = self.state[p].get("count", 0)
            self.state[p]["count"] = count + 1
            if count == 2:
                self.state[p]["slow"] = p.clone()


def third_step() -> None:
    opt = sf.optim(LaterMore)
    state = opt.init(PARAMS)
    for _ in range(3):
        _, state = opt.update(PARAMS, GRADS, state)


class KeepsALst(Own):
    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            self.state[p]["history"] = [p.grad]


def captured(cls: Any) -> Any:
    opt = sf.optim(cls)
    fn = sf.jit(lambda p, g, s: opt.update(p, g, s), backend="aten")
    return fn(PARAMS, GRADS, {path: {} for path in STATE})


def updated(params: Any = PARAMS, grads: Any = GRADS, state: Any = STATE, **k: Any) -> Any:
    return OPT.update(params, grads, state, **k)


OTHER = {**GRADS, "out": [torch.ones(2), GRADS["out"][1]]}


# a call, the class of its error, parts of its text
def with_entry(name: str, x: Any) -> Any:
    return {**STATE, "in.w": {**STATE["in.w"], name: x}}


def with_momentum() -> Any:
    opt = sf.optim(O.SGD)
    return opt.update(PARAMS, GRADS, opt.init(PARAMS), momentum=0.9)


REFUSED: dict[str, tuple[Callable[[], Any], type[sf.ShardError], tuple[str, ...]]] = {
    "LBFGS": (
        lambda: sf.optim(O.LBFGS),
        sf.CaptureError,
        (
            "optim(LBFGS): the optimizer evaluates the loss again",
            "use sf.value_and_grad in your own loop",
        ),
    ),
    "SparseAdam": (
        lambda: sf.optim(O.SparseAdam),
        sf.CaptureError,
        ("optim(SparseAdam): the optimizer takes sparse gradients", "torch.optim.Adam"),
    ),
    "a closure": (
        lambda: sf.optim(WithClosure),
        sf.CaptureError,
        ("optim(WithClosure): the optimizer's step needs an argument: closure",),
    ),
    "item": (
        lambda: captured(Reads),
        sf.CaptureError,
        ("optim(Reads): .item() reads a tensor's value", __file__),
    ),
    "a branch": (
        lambda: captured(Branches),
        sf.CaptureError,
        ("optim(Branches): the function branches on a tensor's value", "torch.where"),
    ),
    "values elsewhere": (
        lambda: sf.optim(Counts).init(PARAMS),
        sf.CaptureError,
        ("the optimizer's step changes self.count, param_groups[0]['lr']", "self.state[p][name]"),
    ),
    "state elsewhere": (
        lambda: sf.optim(Elsewhere).init(PARAMS),
        sf.CaptureError,
        ("the optimizer's step changes self.means, self.steps, self.inner",),
    ),
    "parameters elsewhere": (
        lambda: sf.optim(Keeps).init(PARAMS),
        sf.CaptureError,
        ("the optimizer stores parameters in self.own, self.inner", "self.param_groups"),
    ),
    "entries by size": (
        lambda: sf.optim(OfSizes).init(PARAMS),
        sf.CaptureError,
        ("the state of 'in.w' has large, but that of a small parameter", "has small"),
    ),
    "entries of later steps": (
        third_step,
        sf.CaptureError,
        ("the state of 'in.w' has count, slow, but that", "in the first step"),
    ),
    "a list": (
        lambda: sf.optim(KeepsALst).init(PARAMS),
        sf.CaptureError,
        ("the optimizer's state has a list: 'history'", "a state of tensors and numbers"),
    ),
    "not a class": (
        lambda: sf.optim(O.SGD([torch.zeros(1)])),  # type: ignore[arg-type]
        sf.TreeError,
        ("optim: a SGD", "the class: optim(SGD, ...)"),
    ),
    "arguments": (
        lambda: sf.optim(O.Adam, lr=-1.0),
        sf.TreeError,
        ("Adam rejects its arguments: Invalid learning rate: -1.0",),
    ),
    "a tensor": (
        lambda: sf.optim(O.Adam, lr=torch.tensor(0.1)),
        sf.TreeError,
        ("lr is a tensor", "opt.update(params, grads, state, lr=x)"),
    ),
    "an option of a group": (
        lambda: sf.optim(O.Adam, groups={"*": {"wd": 1}}),
        sf.TreeError,
        ("groups['*'] has wd", "an option of a parameter group: lr, betas"),
    ),
    "a pattern": (
        lambda: sf.optim(O.Adam, groups={"*.x": {"lr": 1.0}}).init(PARAMS),
        sf.TreeError,
        ("'*.x' matches no parameter", "paths such as in.w, in.b"),
    ),
    "an option": (
        lambda: updated(rate=1),
        sf.TreeError,
        ("optim(AdamW).update: the optimizer has no options rate", "some of lr, betas"),
    ),
    "another tree": (
        lambda: updated(grads={"in": GRADS["in"]}),
        sf.TreeError,
        ("the gradients lack ['out']",),
    ),
    "another shape": (
        lambda: updated(grads=OTHER),
        sf.TreeError,
        ("the gradient of 'out.0' is float32[2], but its parameter is float64[2, 3, 2]",),
    ),
    "two parameters of one path": (
        lambda: updated({"a.b": PARAMS["out"][1], "a": {"b": PARAMS["out"][1]}}, None),
        sf.TreeError,
        ("two parameters have the path 'a.b'",),
    ),
    "no parameters": (
        lambda: OPT.init({}),
        sf.TreeError,
        ("optim(AdamW).init, argument params: the parameters have no tensor",),
    ),
    "a gradient that is a number": (
        lambda: updated({"w": PARAMS["out"][1]}, {"w": 1.0}, {}),
        sf.TreeError,
        ("the gradient of 'w' is a float, but its parameter is",),
    ),
    "a list for groups that are not there": (
        lambda: updated(lr=[0.1, 0.2]),
        sf.TreeError,
        ("optim(AdamW).update, argument lr: lr is a list of 2, and there are 1 groups",),
    ),
    "a number for a tuple": (
        lambda: updated(betas=0.5),
        sf.TreeError,
        ("betas is 0.5", "a tuple of 2 numbers"),
    ),
    "nothing for a number": (
        lambda: updated(lr=None),
        sf.TreeError,
        ("lr is None", "a 0-d tensor"),
    ),
    "a vector for a number": (
        lambda: updated(lr=torch.ones(2)),
        sf.TreeError,
        ("lr has shape [2]", "a number or a 0-d tensor"),
    ),
    "an option that needs more state": (
        lambda: updated(amsgrad=True),
        sf.TreeError,
        ("with this amsgrad the state has no max_exp_avg_sq", "give amsgrad to the constructor"),
    ),
    "an option that makes more state": (
        lambda: with_momentum(),
        sf.TreeError,
        ("with this momentum the state has momentum_buffer, and had nothing before",),
    ),
    "groups in a list": (
        lambda: sf.optim(O.SGD, groups=[{}]),  # type: ignore[arg-type]
        sf.TreeError,
        ("optim(SGD), argument groups: groups is [{}]", "a dict from patterns"),
    ),
    "a state of another shape": (
        lambda: updated(state=with_entry("exp_avg", torch.ones(5))),
        sf.TreeError,
        ("state['in.w']['exp_avg'] has shape [5], but the parameter has",),
    ),
    "a number in a state": (
        lambda: updated(state=with_entry("step", 3.0)),
        sf.TreeError,
        ("state['in.w']['step'] is 3.0, and no tensor",),
    ),
    "a scheduler that is none": (
        lambda: OPT.schedule(lambda optimizer: None),
        sf.TreeError,
        ("optim(AdamW).schedule, argument make: it returns a NoneType",),
    ),
    "another state": (
        lambda: updated(state={**STATE, "in.w": {}, "more": {}}),
        sf.TreeError,
        ("state['in.w'] has nothing, not step, exp_avg", "the state has also 'more'"),
    ),
    "a state of less": (
        lambda: updated(state={}),
        sf.TreeError,
        ("the state lacks 'in.w'", "state = opt.init(params)"),
    ),
    "placements": (
        lambda: OPT.state_placements({"in": sf.P()}, PARAMS),
        sf.TreeError,
        ("optim(AdamW).state_placements: the whole tree: placements lack ['out']",),
    ),
    "torch's placements": (
        lambda: OPT.state_placements(sf.Shard(0), PARAMS),
        sf.TreeError,
        ("Shard(dim=0) is not a P",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    call, kind, texts = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    assert all(text in str(caught.value) for text in texts), str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: OPT.update(p, {"in": p["in"]}, STATE),
        lambda p: OPT.update(p, p, STATE, rate=1),
        lambda p: OPT.update(p, p, {}),
        lambda p: OPT.update(p, p, None),
        lambda p: OPT.update(p, p, with_entry("step", 3.0)),
        lambda p: OPT.update(p, p, STATE, betas=0.5),
        lambda p: OPT.update(p, p, STATE, amsgrad=True),
    ],
    ids=["gradients", "an option", "a state", "None", "a number", "no tuple", "more state"],
)
def test_inside_a_captured_function_the_same_errors_arrive(call: Any) -> None:
    with pytest.raises(sf.TreeError, match=r"optim\(AdamW\)\.update") as caught:
        sf.jit(call, backend="aten")(PARAMS)
    assert f"  at: {__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "name"), [(O.SGD, "weight_decay"), (O.SGD, "momentum"), (O.Adam, "weight_decay")]
)
def test_an_option_of_zero_is_refused_as_a_tensor_inside(cls: Any, name: str) -> None:
    """The captured step has no code for it, and its value is not known then."""
    opt, value = sf.optim(cls), torch.tensor(0.5, dtype=torch.float64)
    step = lambda x: opt.update(PARAMS, GRADS, opt.init(PARAMS), **{name: x})[0]
    with pytest.raises(sf.TreeError, match=f"argument {name}: {name} is a tensor, and 0"):
        sf.jit(step, backend="aten")(value)
    step = lambda x: opt.update(PARAMS, GRADS, opt.init(PARAMS), lr=x, **{name: 0.0})[0]
    found, wanted = table.flat(sf.jit(step, backend="aten")(value)), table.flat(step(value))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(found, wanted, strict=True))


def test_one_tensor_for_two_options_is_the_value_of_each() -> None:
    """Whether an option is zero follows from the constructor, for each option and group."""
    value, e = torch.tensor(0.5, dtype=torch.float64), 1e-6
    opt = sf.optim(O.SGD, lr=0.0, weight_decay=0.2)
    total = lambda params: sum(x.sum() for x in table.flat(params))
    step = lambda x: total(opt.update(PARAMS, GRADS, opt.init(PARAMS), weight_decay=x, lr=x)[0])
    slope = (step(value + e) - step(value - e)) / (2 * e)
    torch.testing.assert_close(sf.grad(step)(value), slope, rtol=1e-6, atol=1e-6)
    _, tangent = sf.jvp(step, (value,), (torch.ones_like(value),))
    torch.testing.assert_close(tangent, slope, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sf.vmap(step)(value[None]), step(value)[None])
    opt = sf.optim(O.SGD, lr=0.1)
    step = lambda x: total(opt.update(PARAMS, GRADS, opt.init(PARAMS), momentum=x, lr=x)[0])
    for call in (sf.grad(step), sf.jit(step, backend="aten")):
        with pytest.raises(sf.TreeError, match="argument momentum: momentum is a tensor, and 0"):
            call(value)


class Whitens(Own):
    """State with other sizes than the parameter, which a small parameter's may equal."""

    def step(self, closure: Any = None) -> None:
        for p in self.parameters():
            rows = self.state[p].setdefault("rows", torch.zeros(len(p), len(p), dtype=p.dtype))
            rows.add_(p.grad @ p.grad.T)
            p.data.sub_(rows @ p.grad * 0.01)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: sf.jit(f, backend="aten")])
def test_a_state_of_the_users_may_have_any_sizes(wrap: Any) -> None:
    opt = sf.optim(Whitens)
    params = {"w": torch.ones(5, 3, dtype=torch.float64)}
    new, state = wrap(lambda p, s: opt.update(p, p, s))(params, opt.init(params))
    assert state["w"]["rows"].shape == (5, 5)
    torch.testing.assert_close(new["w"], params["w"] - 0.15 * params["w"])


def test_numbers_of_numpy_are_options() -> None:
    new, _ = updated(lr=np.float32(0.25), betas=(np.float64(0.9), 0.99))
    wanted, _ = updated(lr=0.25, betas=(0.9, 0.99))
    for found, other in zip(table.flat(new), table.flat(wanted), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-6, atol=0)


def test_a_step_outside_may_read_values() -> None:
    opt = sf.optim(Reads)
    new, _ = opt.update(PARAMS, GRADS, opt.init(PARAMS))
    wanted, _ = table.torchs(Reads, {}, PARAMS, [GRADS])
    assert all(map(torch.equal, table.flat(new), wanted))


def test_gradients_of_two_meshes_are_refused_by_name() -> None:
    x, opt = torch.ones(4, 2), sf.optim(torch.optim.AdamW)
    with sf.fake_world(2):
        mesh, other = sf.make_mesh((2,), ("dp",)), sf.make_mesh((2,), ("tp",))
        a, b = (sf.distribute(x, m, sf.P(None)) for m in (mesh, other))
        params, state = {"w": a}, opt.init({"w": a})
        step = lambda p, g, s: opt.update(p, g, s)
        for call, text in (
            (step, "optim(AdamW).update, argument grads: the gradient of 'w' is a DTensor on"),
            (sf.jit(step), "argument g['w']: the DTensor is on another mesh, (tp=2)"),
            (sf.shard(step, mesh), "argument g['w']: the DTensor is on another mesh, (tp=2)"),
        ):
            with pytest.raises(sf.PlacementError) as caught:
                call(params, {"w": b}, state)
            assert text in str(caught.value)
            assert f"  at: {__file__}:" in str(caught.value) and caught.value.fix
        with pytest.raises(sf.PlacementError, match="its parameter is a DTensor on"):
            opt.update(params, {"w": x}, state)
        with pytest.raises(sf.PlacementError, match="clip_by_global_norm") as caught:
            sf.clip_by_global_norm({"a": a, "b": b}, 1.0)
        assert "['a'] is a DTensor on (dp=2)" in str(caught.value)
        assert "['b'] is a DTensor on (tp=2)" in str(caught.value)
        opt.update(params, {"w": a * 2}, state)
