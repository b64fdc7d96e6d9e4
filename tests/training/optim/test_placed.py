"""optim over meshes: a sharded step equals that of one device, in every world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

import shardfn as sf
from shardfn import P
from tests.training.optim import table

O, LR = torch.optim, table.LR
RATE = torch.tensor(LR, dtype=torch.float64)
GRADS = [table.tree(i + 1) for i in range(3)]
PLACED = {  # mesh: the placements of parameters
    (3,): {"in": {"w": P("a"), "b": P("a")}, "out": [P(None, "a"), P()]},
    (2, 2): {"in": {"w": P("a", "b"), "b": P(("a", "b"))}, "out": P()},
}
CHOSEN = [  # one of each kind of state
    (cls, options)
    for cls, options in table.TABLE
    if cls.__name__ in ("AdamW", "Adafactor", "ASGD") or options.get("dampening")
][:5]


def steps(cls: Any, options: Any, mesh: Any, placed: Any) -> Any:
    """(parameters, states) after three sharded steps, and the function."""
    params, opt = table.tree(0), sf.optim(cls, lr=LR, **options)
    states = opt.state_placements(placed, params)
    step = sf.shard(
        lambda p, g, s, lr: opt.update(p, g, s, lr=lr),
        mesh,
        (placed, placed, states, P()),
        (placed, states),
        backend="aten",
    )
    state = opt.init(params)
    for g in GRADS:
        params, state = step(params, g, state, RATE)
    return params, state


@pytest.mark.parametrize("shape", PLACED, ids=str)
@pytest.mark.parametrize(("cls", "options"), CHOSEN, ids=[cls.__name__ for cls, _ in CHOSEN])
def test_a_sharded_step_equals_torch(cls: Any, options: Any, shape: Any) -> None:
    wanted, states = table.torchs(cls, options, table.tree(0), GRADS)
    n = 3 if shape == (3,) else 4
    with sf.fake_world(n):
        mesh = sf.make_mesh(shape, ("a", "b")[: len(shape)])
        params, state = steps(cls, options, mesh, PLACED[shape])
        assert table.largest(sf.full(params), wanted) < 1e-12
        for own, mine in zip(states, sf.full(state).values(), strict=True):
            assert all(table.largest([mine[name]], [x]) < 1e-12 for name, x in own.items())


def test_a_step_of_adamw_sends_nothing() -> None:
    opt, params = sf.optim(O.AdamW, lr=LR), table.tree(0)
    with sf.fake_world(3):
        mesh, placed = sf.make_mesh((3,), ("a",)), PLACED[(3,)]
        states = opt.state_placements(placed, params)
        step = sf.shard(opt.update, mesh, (placed, placed, states), backend="aten")
        lowered = step.lower(params, GRADS[0], opt.init(params))
        assert not lowered.transfers
        assert [str(x) for x in (states["in.w"]["exp_avg"], states["in.w"]["step"])] == [
            "P('a')",
            "P()",
        ]


def test_the_state_of_a_parameter_is_on_its_stage() -> None:
    params = {"w": sf.ShapeDtype((4, 3)), "b": sf.ShapeDtype((3,))}
    states = sf.optim(O.AdamW, lr=LR).state_placements({"w": P("tp", pp=1), "b": P(pp=0)}, params)
    assert states["w"] == {"exp_avg": P("tp", pp=1), "exp_avg_sq": P("tp", pp=1), "step": P()}
    assert states["b"] == {"exp_avg": P(pp=0), "exp_avg_sq": P(pp=0), "step": P()}


def test_dtensors_outside_keep_their_placements() -> None:
    opt, params = sf.optim(O.AdamW, lr=LR), table.tree(0)
    wanted, _ = table.torchs(O.AdamW, {}, params, GRADS[:2])
    with sf.fake_world(3):
        mesh, placed = sf.make_mesh((3,), ("a",)), PLACED[(3,)]
        own = sf.distribute(params, mesh, placed)
        grads = [sf.distribute(g, mesh, placed) for g in GRADS]
        state = opt.init(own)
        assert state["in.w"]["exp_avg"].placements == own["in"]["w"].placements
        step = sf.shard(opt.update, mesh, backend="aten")
        new, state = opt.update(own, grads[0], state)
        new, state = step(new, grads[1], state)
        assert table.largest(sf.full(new), wanted) < 1e-12
        for x, p in zip(table.flat(new), table.flat(own), strict=True):
            assert x.placements == p.placements
        assert state["in.w"]["exp_avg"].placements == own["in"]["w"].placements


def test_init_inside_makes_shards() -> None:
    opt, params = sf.optim(O.Adafactor, lr=LR), table.tree(0)
    with sf.fake_world(3):
        mesh, placed = sf.make_mesh((3,), ("a",)), PLACED[(3,)]
        states = opt.state_placements(placed, params)
        state = sf.shard(opt.init, mesh, (placed,), states, backend="aten")(params)
        assert all(map(torch.equal, table.flat(sf.full(state)), table.flat(opt.init(params))))


def on_a_rank() -> Any:
    cls, options = table.TABLE[7]
    mesh = sf.make_mesh((2,), ("a",))
    placed = {"in": {"w": P("a"), "b": P("a")}, "out": [P(None, "a"), P()]}
    params, state = steps(cls, options, mesh, placed)
    opt = sf.optim(cls, lr=LR, **options)
    params, state = opt.update(params, sf.distribute(GRADS[0], mesh, placed), state)
    return sf.full(params)


def test_two_processes_take_the_step_of_one() -> None:
    cls, options = table.TABLE[7]
    wanted, _ = table.torchs(cls, options, table.tree(0), [*GRADS, GRADS[0]])
    for params in run_ranks(2, on_a_rank):
        assert table.largest(params, wanted) < 1e-12


@pytest.mark.parametrize("cls", [O.Rprop, O.Adafactor])
def test_the_first_state_of_dtensors_whose_step_torch_cannot_run(cls: Any) -> None:
    opt = sf.optim(cls, lr=LR)
    params = table.tree(0)
    wanted = opt.init(params)
    placed = PLACED[2, 2]
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("a", "b"))
        given = sf.distribute(params, mesh, placed)
        state = opt.init(given)
        for path, own in wanted.items():
            for name, x in own.items():
                assert torch.equal(sf.full(state[path][name]), x)
        with pytest.raises(sf.CaptureError) as error:
            opt.update(given, given, state)
    lines = str(error.value).splitlines()
    step = "torch's step() fails on DTensors"
    # An op without a rule, or, in torch 2.15 of Adafactor, the value of a DTensor.
    reasons = tuple(f"optim({cls.__name__}).update: {step}: {x}" for x in ("aten.", "float(x)"))
    assert lines[0].startswith(reasons)
    assert lines[-1].endswith("captured function: sf.shard(opt.update, mesh, ...)")


def test_the_first_state_of_dtensors_for_a_fused_step_that_torch_has_not() -> None:
    params = table.tree(0)
    for momentum in (0.0, 0.9):
        opt = sf.optim(O.SGD, lr=LR, fused=True, momentum=momentum)
        with sf.fake_world(4):
            mesh = sf.make_mesh((2, 2), ("a", "b"))
            state = opt.init(sf.distribute(params, mesh, PLACED[2, 2]))
            assert table.largest(sf.full(state), opt.init(params)) == 0
