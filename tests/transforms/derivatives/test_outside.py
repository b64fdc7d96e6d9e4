"""`backward` through calls: values and gradients are those of plain autograd, alone and sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P
from tests.support.ranks import run_ranks

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
A, B, C = (torch.randn(s, dtype=F64, generator=GENERATOR) for s in ((7, 5), (5, 3), (3,)))
W = B.clone().requires_grad_()
Outcome = tuple[list[torch.Tensor], list[bool], list[torch.Tensor | None]]


@torch.library.custom_op("backward_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_fake(lambda x: torch.empty_like(x))
square.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0] * 7,  # a rule that no formula has
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Cube(torch.autograd.Function):
    """Its derivative is another than that of its formula."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *g: torch.Tensor) -> torch.Tensor:
        return g[0] * 100 * ctx.saved_tensors[0] ** 2


def without_gradient(a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = a.sum()
    return (a * scale).sum()


def written(a: torch.Tensor) -> torch.Tensor:
    y = a * 2
    y[0] = a[1].sin()
    return y.mul_(3).square().sum()


def carried(a: torch.Tensor) -> torch.Tensor:
    carry = a[0]
    for row in a:
        carry = carry * row.sin()
    return carry.sum()


class Case(NamedTuple):
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...] = (A,)
    followed: tuple[int, ...] = (0,)  # which of them require grad
    plain: Callable[..., Any] | None = None  # the same in plain torch, if fn is not


CASES = {
    "an MLP": Case(lambda a, b, c: ((a @ b + c).tanh() ** 2).mean(), (A, B, C), (1, 2)),
    "its input too": Case(lambda a, b, c: ((a @ b + c).tanh() ** 2).mean(), (A, B, C), (0, 1, 2)),
    "a result that is no scalar": Case(lambda a, b: a @ b, (A, B), (0, 1)),
    "two results": Case(lambda a, b: (a.sum(0), (a @ b).exp()), (A, B), (0, 1)),
    "a dict with integers and constants": Case(
        lambda a, b: {"x": a @ b, "n": (a @ b).argmax(1), "k": 3}, (A, B), (0, 1)
    ),
    "an unused argument": Case(lambda a, b: (a * 2).sum(), (A, B), (0, 1)),
    "a result of other arguments": Case(lambda a, b: (a * 2, b * 3), (A, B), (0,)),
    "a detached result": Case(lambda a, b: (a * b.sum(), b.detach() * 1), (A, B), (0, 1)),
    "an argument": Case(lambda a: a),
    "a result twice": Case(lambda a: (a, a)),
    "a view of a result": Case(lambda a: (a.exp(), a.exp().view(-1))),
    "a result that is saved": Case(lambda a: a.exp()),
    "detach": Case(lambda a: (a * a.detach()).sum()),
    "no_grad": Case(without_gradient),
    "where": Case(lambda a: torch.where(a > 0, a, -2 * a).sum()),
    "a derivative of zero": Case(lambda a: a.round().sum()),
    "an autograd.Function": Case(lambda a: Cube.apply(a).sum()),
    "a custom op": Case(lambda a: square(a).sum()),
    "a gradient inside": Case(
        lambda a: sf.grad(lambda x: (x**3).sum())(a).square().sum(),
        plain=lambda a: (3 * a * a).square().sum(),
    ),
    "a value and its gradient": Case(
        sf.value_and_grad(lambda a: (a**3).sum()), plain=lambda a: ((a**3).sum(), 3 * a * a)
    ),
    "buckets inside": Case(
        lambda a, b: sf.bucketed_grad(lambda b: (a @ b).pow(3).sum())(b),
        (A, B),
        (1,),
        plain=lambda a, b: ((a @ b).pow(3).sum(), 3 * a.T @ (a @ b).square()),
    ),
    "vmap": Case(lambda a, b: torch.vmap(lambda r: (r @ b).sin())(a).sum(), (A, B), (0, 1)),
    "jvp": Case(
        lambda a: torch.func.jvp(torch.sin, (a,), (a,))[1].sum(),
        plain=lambda a: (a.cos() * a).sum(),
    ),
    "checkpoint": Case(
        lambda a, b: sf.checkpoint(lambda a, b: (a @ b).sin().exp())(a, b).sum(),
        (A, B),
        (0, 1),
        plain=lambda a, b: (a @ b).sin().exp().sum(),
    ),
    "scan": Case(
        lambda a: sf.scan(lambda c, r: (c * r.sin(), c.sum()), a[0], a)[0].sum(), plain=carried
    ),
    "a Python loop": Case(carried),
    "cond": Case(
        lambda a: sf.cond(a.sum() > 0, torch.sin, torch.cos, a).sum(),
        plain=lambda a: (a.sin() if a.sum() > 0 else a.cos()).sum(),
    ),
    "attention": Case(lambda a: F.scaled_dot_product_attention(*[a[None, None]] * 3).sum()),
    "a loss of classes": Case(lambda a: F.cross_entropy(a, torch.tensor([0, 1, 2, 3, 4, 0, 1]))),
    "layer_norm": Case(lambda a: F.layer_norm(a, (5,)).square().sum()),
    "a closed-over tensor": Case(lambda a: (a @ W).square().sum(), followed=()),
    "a closed-over tensor and an argument": Case(lambda a: (a @ W).square().sum()),
    "a detached closed-over tensor": Case(lambda a: (a @ W.detach()).square().sum()),
    "complex numbers": Case(lambda a: torch.fft.fft(a).abs().sum()),
    "writing in place": Case(written),
    "indices": Case(lambda a: a[torch.tensor([0, 2, 2])].square().sum()),
    "expand": Case(lambda a: a[:1].expand(7, 5).sin().sum()),
    "an empty slice": Case(lambda a: a[:0].sum() + a.sum()),
    "a convolution": Case(
        lambda a: F.conv1d(a[None], torch.ones(2, 7, 3, dtype=F64), padding=1).square().sum()
    ),
}


def local(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def outcome(fn: Callable[..., Any], args: Sequence[torch.Tensor], case: Case) -> Outcome:
    """The results of a call, which of them require grad, and the gradients."""
    W.grad = None
    rows = enumerate(args)
    given = [x.detach().requires_grad_() if i in case.followed else x for i, x in rows]
    leaves = sf.tree_map(lambda x: x, fn(*given))
    results = [x for x in torch.utils._pytree.tree_leaves(leaves) if torch.is_tensor(x)]
    weights = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=F64)
    for x in results:
        if x.requires_grad:
            weight = torch.randn(x.shape, dtype=F64, generator=weights)
            total = total + (local(x) * weight).sum()
    total.backward()
    gradients = [given[i].grad for i in case.followed] + [W.grad]
    found = [None if g is None else local(g) for g in gradients]
    return ([local(x).detach() for x in results], [x.requires_grad for x in results], found)


def assert_same(got: Outcome, wanted: Outcome) -> None:
    assert got[1] == wanted[1]
    assert [g is None for g in got[2]] == [g is None for g in wanted[2]]
    assert_close(got[0], wanted[0])
    pairs = [(g, w) for g, w in zip(got[2], wanted[2], strict=True) if g is not None]
    for g, w in pairs:
        assert_close(g, w)


@pytest.mark.parametrize("name", CASES)
def test_alone_and_sharded_it_is_plain_autograd(name: str) -> None:
    case = CASES[name]
    wanted = outcome(case.plain or case.fn, case.args, case)
    assert_same(outcome(sf.jit(case.fn, backend="aten"), case.args, case), wanted)
    meshes = ((3,), ("dp",), P("dp")), ((2, 2), ("dp", "tp"), P("dp", "tp"))
    for shape, names, first in meshes:
        with sf.fake_world(torch.Size(shape).numel()):
            mesh = sf.make_mesh(shape, names)
            placements = (first, *[None] * (len(case.args) - 1))
            sharded = sf.shard(case.fn, mesh, placements)
            assert_same(outcome(sharded, case.args, case), wanted)


PLACED = {
    "data parallel": {"w": P(), "b": P()},
    "fully sharded": {"w": P("dp"), "b": P("dp")},
    "tensor parallel": {"w": P(None, "tp"), "b": P("tp")},
    "both": {"w": P("dp", "tp"), "b": P("tp")},
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] + params["b"]).tanh() ** 2).mean()


def without_scalars(*programs: Any) -> list[tuple[str, str]]:
    """The collectives of programs, but for those of the loss alone. In bucketed_grad the loss
    shares a bucket, and before a backward it has to be known.
    """
    every = [c for program in programs for c in program.collectives]
    return sorted((c.kind, c.axis) for c in every if c.nbytes > F64.itemsize)


def trained(mesh: Any, placements: Any, backend: str) -> list[Any]:
    """The loss and the gradients of DTensors, by backward and by bucketed_grad."""
    params = sf.distribute({"w": B, "b": C}, mesh, placements)
    step = sf.shard(loss, mesh, (placements, P("dp")), backend=backend)
    leaves = {name: x.requires_grad_() for name, x in params.items()}
    value = step(leaves, A)
    value.backward()
    gradients = {name: x.grad for name, x in leaves.items()}
    bucketed = sf.shard(sf.bucketed_grad(loss), mesh, (placements, P("dp")), backend=backend)
    with torch.no_grad():
        wanted = bucketed(params, A)
        sent = without_scalars(bucketed.lower(params, A))
    lowered = step.lower(leaves, A)
    assert without_scalars(lowered, lowered.backward) == sent
    for name, g in gradients.items():
        assert g.placements == params[name].placements
    same = sf.tree_map(lambda a, b: torch.equal(local(a), local(b)), (value, gradients), wanted)
    return [same, sf.full(value.detach()), sf.full(gradients)]


@pytest.mark.parametrize("name", PLACED)
def test_it_is_bucketed_grad_to_the_last_bit_with_its_collectives(name: str) -> None:
    with simulated(dp=2, tp=2) as mesh:
        same, value, gradients = trained(mesh, PLACED[name], "aten")
    assert same == (True, {"w": True, "b": True})
    params = {"w": B.clone().requires_grad_(), "b": C.clone().requires_grad_()}
    wanted = loss(params, A)
    wanted.backward()
    assert_close(value, wanted.detach())
    assert_close(gradients, {k: x.grad for k, x in params.items()})


COMPILED = ("fully sharded",)


def of_one_rank(backend: str) -> list[Any]:
    mesh = sf.make_mesh((2, 1), ("dp", "tp"))
    names = PLACED if backend == "aten" else COMPILED
    return [trained(mesh, PLACED[name], backend) for name in names]


def right_on_ranks(backend: str) -> None:
    params = {"w": B.clone().requires_grad_(), "b": C.clone().requires_grad_()}
    wanted = loss(params, A)
    wanted.backward()
    gradients = {k: x.grad for k, x in params.items()}
    for rank in run_ranks(2, of_one_rank, backend):
        for same, value, found in rank:
            assert backend == "inductor" or same == (True, {"w": True, "b": True})
            assert_close(value, wanted.detach())
            assert_close(found, gradients)


def test_on_two_gloo_processes_it_is_one_device() -> None:
    right_on_ranks("aten")


def test_compiled_on_two_gloo_processes_it_is_one_device() -> None:
    right_on_ranks("inductor")


PER_RANK: dict[str, Callable[..., torch.Tensor]] = {
    "whole": lambda a, w: (a @ w).sin().sum(),
    "a view": lambda a, w: (a @ w[:, :2]).sin().sum(),
    "read by an op alone": lambda a, w: (a @ (w * 1)).sin().sum(),
    "invariant": lambda a, w: a.sum() * w.sin().sum(),
    "in a loop": lambda a, w: sf.scan(
        lambda c, r: ((c + r @ w).sin(), None), torch.zeros(3, dtype=F64), a
    )[0].sum(),
}


@pytest.mark.parametrize("name", PER_RANK)
def test_a_tensor_that_per_rank_code_closes_over_is_one_of_all_ranks(name: str) -> None:
    body = PER_RANK[name]
    w = B.clone().requires_grad_()
    torch.stack([body(a, w) for a in A[:6].chunk(3)]).sum().backward()
    held = B.clone().requires_grad_()
    with simulated(dp=3) as mesh:
        mapped = sf.shard_map(lambda a: sf.psum(body(a, held), "dp"), mesh, (P("dp"),), P())
        for fn in (mapped, sf.shard(lambda a: mapped(a) + 0, mesh)):
            held.grad = None
            fn(A[:6]).backward()
            assert_close(held.grad, w.grad)


def other_parameter(model: torch.nn.Sequential) -> None:
    model[2].weight = torch.nn.Parameter(torch.ones(3, 5, dtype=F64))


def assigned(model: torch.nn.Sequential) -> None:
    values = {name: 2 * x for name, x in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def other_module(model: torch.nn.Sequential) -> None:
    model[2] = torch.nn.Linear(5, 3, bias=False, dtype=F64)


CHANGES = (other_parameter, assigned, other_module)
MODEL = torch.nn.Sequential()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_global", [False, True])
def test_a_parameter_that_takes_the_place_of_another_is_read(
    change: Callable[..., None], is_global: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    own = torch.nn.Sequential(*layers).double()
    monkeypatch.setitem(globals(), "MODEL", own)
    fn = (lambda a: MODEL(a).sum()) if is_global else (lambda a: own(a).sum())
    with simulated(dp=3) as mesh:
        step = sf.shard(fn, mesh, P("dp"), backend="aten")
        step(A).backward()
        change(own)
        own.zero_grad()
        step(A).backward()
        found = [p.grad for p in own.parameters()]
    own.zero_grad()
    own(A).sum().backward()
    assert_close(found, [p.grad for p in own.parameters()])
