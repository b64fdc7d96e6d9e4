"""A program that runs on a mesh runs with any of its axes set to one rank: the same values, the
same placements of results, and each result is taken by the next call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import schemes
import torch
from effort import examples
from hypothesis import given
from programs import Drawn, programs
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing import assert_close

import shardfn as sf
from shardfn import P
from shardfn.mesh import axes_of

AXES = ("a", "b", "c")
F64 = torch.float64
Program = Callable[[Any, Path], Any]
WHERE = {"w": P("a", "b"), "v": P("b", "a"), "u": P("b")}
WHERE_3D = {"w": P(("a", "c"), "b"), "v": P("b", "c"), "u": P(("b", "c"))}
STEPS = 3


def params() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = {"w": (4, 8), "v": (8, 4), "u": (8,)}
    return {name: torch.randn(size, generator=g, dtype=F64) for name, size in sizes.items()}


BATCH = torch.arange(32, dtype=F64).reshape(8, 4).sin()


def loss(p: Any, x: Any) -> Any:
    return (torch.tanh(x @ p["w"] + p["u"]) @ p["v"]).square().mean()


def descended(p: Any, x: Any, grad: Any = sf.value_and_grad) -> Any:
    value, grads = grad(loss)(p, x)
    return sf.tree_map(lambda w, g: w - 0.1 * g, p, grads), value


def accumulated(p: Any, x: Any) -> Any:
    value, grads = sf.accumulate(sf.value_and_grad(loss), 2, batch_argnums=1)(p, x)
    return sf.tree_map(lambda w, g: w - 0.1 * g, p, grads), value


def where(mesh: Any) -> Any:
    """Placements of the parameters."""
    return WHERE_3D if mesh.ndim == 3 else {k: _on(mesh, p) for k, p in WHERE.items()}


def _on(mesh: Any, p: P) -> P:
    """A placement without the axes that a mesh does not have."""
    return P(*(name if name in axes_of(mesh).names else None for name in p.parts))


def placed(mesh: Any) -> Any:
    return sf.distribute(params(), mesh, where(mesh))


def repeated(step: Any, p: Any) -> Any:
    for _ in range(STEPS):
        p, value = step(p, BATCH)
    return p, value


def sharded(mesh: Any, fn: Any, *specs: Any, **options: Any) -> Any:
    return sf.shard(fn, mesh, specs or (where(mesh), P("a")), backend="aten", **options)


def by_optimizer(mesh: Any, folder: Path) -> Any:
    opt = sf.optim(torch.optim.AdamW, lr=0.1)

    def step(p: Any, s: Any, x: Any) -> Any:
        value, grads = sf.value_and_grad(loss)(p, x)
        return *opt.update(p, grads, s), value

    train = sharded(mesh, step, where(mesh), None, P("a"), donate_argnums=(0, 1))
    p = placed(mesh)
    s = opt.init(p)
    for _ in range(STEPS):
        p, s, value = train(p, s, BATCH)
    return p, s, value


def by_torchs_optimizer(mesh: Any, folder: Path) -> Any:
    p = placed(mesh)
    opt = torch.optim.SGD([*p.values()], lr=0.1, momentum=0.5)
    grad = sharded(mesh, sf.value_and_grad(loss))
    for _ in range(STEPS):
        value, grads = grad(p, BATCH)
        for name, g in grads.items():
            p[name].grad = g
        opt.step()
    return p, value


def compiled(mesh: Any, folder: Path) -> Any:
    return repeated(sharded(mesh, descended).compile(placed(mesh), BATCH), placed(mesh))


def loaded(mesh: Any, folder: Path) -> Any:
    sharded(mesh, descended).compile(placed(mesh), BATCH).save(folder / "step.sf")
    return repeated(sf.load_compiled(folder / "step.sf", mesh=mesh), placed(mesh))


def restored(mesh: Any, folder: Path) -> Any:
    step = sharded(mesh, descended)
    p, _ = step(params(), BATCH)
    sf.save(folder / "run", p)
    return step(sf.load(folder / "run", p), BATCH), step(
        sf.load(folder / "run", placed(mesh)), BATCH
    )


def backward(mesh: Any, folder: Path) -> Any:
    x = sf.distribute(params()["w"], mesh, where(mesh)["w"]).requires_grad_()
    turned = _on(mesh, P("b", "a"))
    y = sharded(mesh, lambda x: x.mT.tanh(), where(mesh)["w"])(x)
    y.backward(sf.distribute(torch.ones(8, 4, dtype=F64), mesh, turned))
    return x.grad


def per_rank(mesh: Any, folder: Path) -> Any:
    def fn(x: Any, w: Any) -> Any:
        return sf.psum(x @ w, "a") / 8

    mapped = sf.shard_map(fn, mesh, (P(None, "a"), P("a")), P(), backend="aten")
    w = params()["v"][:4]
    x = mapped(BATCH, w)
    return sharded(mesh, torch.sin, P("a"))(sf.full(x)), x


def looped(mesh: Any, folder: Path) -> Any:
    def fn(w: Any, x: Any) -> Any:
        turn = lambda c, _: (torch.tanh(c @ w @ w.mT), c.sum(0))
        x, rows = sf.scan(turn, x, None, length=2)
        x = sf.cond(x.sum() > 0, torch.sin, torch.cos, x)
        return sf.constrain(x, P("a")), rows

    fn = sharded(mesh, fn, where(mesh)["w"], P("a"))
    x, w = BATCH, placed(mesh)["w"]
    for _ in range(STEPS):
        x, rows = fn(w, x)
    return x, rows


def partial(mesh: Any, folder: Path) -> Any:
    specs = [Partial(), *[Replicate()] * (mesh.ndim - 1)]
    y = sf.shard(lambda x, w: x @ w, mesh, (_on(mesh, P(None, "a")), P("a")), specs, backend="aten")
    x = y(BATCH, params()["w"])
    assert x.placements == tuple(specs)
    return sharded(mesh, lambda x: x.sum(0), specs)(x), x


def eager(mesh: Any, folder: Path) -> Any:
    p, grad = placed(mesh), sharded(mesh, sf.value_and_grad(loss))
    for _ in range(STEPS):
        value, grads = grad(p, BATCH)
        p = sf.tree_map(lambda w, g: w - 0.1 * g, p, grads)
    return p, value


def of_dtensors(mesh: Any, folder: Path) -> Any:
    rest = [Replicate()] * (mesh.ndim - 1)

    def fn(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, [Replicate(), *rest])
        return d.redistribute(mesh, [Shard(0), *rest]) * 2

    return sharded(mesh, torch.sin, P("a"))(sf.jit(fn, backend="aten")(BATCH))


PROGRAMS: dict[str, Program] = {
    "a step": lambda m, _: repeated(sharded(m, descended), params()),
    "a step on DTensors": lambda m, _: repeated(sharded(m, descended, None, P("a")), placed(m)),
    "a step that donates": lambda m, _: repeated(
        sharded(m, descended, donate_argnums=0), placed(m)
    ),
    "buckets": lambda m, _: repeated(
        sharded(m, lambda p, x: descended(p, x, sf.bucketed_grad)), params()
    ),
    "microbatches": lambda m, _: repeated(sharded(m, accumulated), params()),
    "placements chosen": lambda m, _: repeated(sharded(m, descended, sf.auto, P("a")), params()),
    "results placed": lambda m, _: repeated(
        sf.shard(descended, m, (where(m), P("a")), (where(m), P()), backend="aten"), params()
    ),
    "an optimizer": by_optimizer,
    "torch's optimizer": by_torchs_optimizer,
    "a compiled step": compiled,
    "a loaded step": loaded,
    "a checkpoint": restored,
    "backward": backward,
    "shard_map": per_rank,
    "loops and branches": looped,
    "Partial": partial,
    "eager updates": eager,
    "DTensors inside": of_dtensors,
}
SHAPES = {1: (2,), 2: (2, 2), 3: (2, 2, 2)}
IN_ALL_DIMS = ("a step", "a step that donates", "shard_map")  # the others on two axes
CASES = [*itertools.product(PROGRAMS, [2]), *itertools.product(IN_ALL_DIMS, [1, 3])]


def with_ones(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The mesh, and then it with some axes set to one rank."""
    return itertools.product(*((n, 1) for n in shape))


def outcome(fn: Callable[[Any], Any], shape: tuple[int, ...], names: Any = AXES) -> Any:
    """The values of the results on such a mesh, and their placements."""
    with sf.fake_world(math.prod(shape)):
        leaves = sf._tree.leaves(fn(sf.make_mesh(shape, names[: len(shape)])))
        places = [x.placements for x in leaves if isinstance(x, DTensor)]
        return sf.full([x for x in leaves if isinstance(x, torch.Tensor)]), places


@pytest.mark.parametrize(("name", "dims"), CASES)
def test_s13_a_program_runs_with_axes_of_one_rank(name: str, dims: int, tmp_path: Path) -> None:
    program = lambda mesh: PROGRAMS[name](mesh, tmp_path / str(tuple(mesh.shape)))
    first, *others = with_ones(SHAPES[dims])
    for shape in (first, *others):
        (tmp_path / str(shape)).mkdir()
    wanted, places = outcome(program, first)
    for shape in others:
        found, others_places = outcome(program, shape)
        assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        assert name == "placements chosen" or others_places == places, shape


@pytest.mark.parametrize("model", models.LOSSES)
def test_s13_a_model_trains_with_axes_of_one_rank(model: str) -> None:
    _, make_params, make_batch = models.LOSSES[model]
    p, (x, y) = make_params(), make_batch()
    specs = schemes.mixed(p), P("dp"), P("dp")

    def trained(mesh: Any) -> Any:
        step = sf.shard(models.STEPS[model], mesh, specs, backend="aten")
        first = step(p, x, y)
        return step(first[0], x, y)

    wanted, places = outcome(trained, (2, 2), ("dp", "tp"))
    for shape in ((1, 2), (2, 1), (1, 1)):
        found, others = outcome(trained, shape, ("dp", "tp"))
        assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        assert others == places


def next_values(drawn: Drawn, shape: tuple[int, ...]) -> Any:
    """The results of a program and of a step, and of a second call on what it gave."""
    numbers = tuple(range(len(drawn.inputs)))
    grad = sf.value_and_grad(drawn.function(), argnums=numbers, has_aux=True)

    def step(*xs: Any) -> Any:
        aux, grads = grad(*xs)
        return aux, tuple(x - 0.01 * g for x, g in zip(xs, grads, strict=True))

    def twice(mesh: Any) -> Any:
        fn = sf.shard(step, mesh, tuple(spec for _, spec in drawn.inputs.values()), backend="aten")
        aux, xs = fn(*drawn.placed_arguments(mesh))
        is_plain = all(isinstance(spec, P) for _, spec in drawn.inputs.values())
        return aux, xs, fn(*xs) if is_plain else ()

    return outcome(twice, shape, tuple(drawn.mesh))[0]


def tried(drawn: Drawn, shape: tuple[int, ...]) -> Any:
    try:
        return next_values(drawn, shape)
    except sf.PlacementError:
        return None  # on the mesh itself: its results lie in another way than its arguments


@given(programs())
@examples(15)
def test_s13_a_random_program_runs_with_axes_of_one_rank(drawn: Drawn) -> None:
    first, *others = with_ones(tuple(drawn.mesh.values()))
    wanted = tried(drawn, first)
    for shape in others if wanted is not None else ():
        found = next_values(drawn, shape)
        assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
