"""Results lie in memory of their own, however arguments lie in memory; what cannot be right is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close
from worlds import simulated

import shardfn as sf
from shardfn import P

DTYPE = torch.float64
CLOSED = torch.arange(1.0, 5.0, dtype=DTYPE).reshape(2, 2)
VALUES = torch.arange(4.0, dtype=DTYPE).reshape(2, 2) - 1.5

# results of a function of two tensors of shape (2, 2)
RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "x": lambda x, y: x,
    "y": lambda x, y: y,
    "x.T": lambda x, y: x.T,
    "x.reshape(-1)": lambda x, y: x.reshape(-1),
    "x[0]": lambda x, y: x[0],
    "x[1]": lambda x, y: x[1],
    "x.detach()": lambda x, y: x.detach(),
    "x.expand": lambda x, y: x[:1].expand(3, 2),
    "x + y": lambda x, y: x + y,
    "(x + y).T": lambda x, y: (x + y).T,
    "x * 1": lambda x, y: x * torch.ones(2, 2, dtype=DTYPE),
    "x + 0": lambda x, y: x + torch.zeros(2, 2, dtype=DTYPE),
    "closed over": lambda x, y: CLOSED,
    "closed over, half": lambda x, y: CLOSED[1:],
    "constant": lambda x, y: torch.tensor([1.0, 2.0], dtype=DTYPE),
    "halves": lambda x, y: (x * y).split(1),
    "cond": lambda x, y: sf.cond(y.sum() < 100, lambda: x, lambda: y),
    "while_loop": lambda x, y: sf.while_loop(lambda c: c.sum() > 100, lambda c: c * 0.5, x),
    "scan": lambda x, y: sf.scan(lambda c, row: (c, row), y, x),
    "no rows": lambda x, y: sf.scan(lambda c, row: (c + row, row), y[0], x[:0])[0],
    "gradient": lambda x, y: sf.grad(lambda x: (x * y).sum())(x),
    "mapped": lambda x, y: sf.vmap(lambda r: r)(x),
    "named": lambda x, y: sf.checkpoint_name(x, "h"),
    "checkpointed": lambda x, y: sf.checkpoint(lambda x: x)(x),
    "constrained": lambda x, y: sf.constrain(x, P()),
    "jitted": lambda x, y: sf.jit(lambda x: x)(x),
}
BASE = torch.arange(64.0, dtype=DTYPE)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "own": lambda x: x.clone(),
    "transposed": lambda x: x.T.clone().T,
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "a view of a larger one": lambda x: torch.cat([x + 9, x, x + 9])[2:4],
    "a column block": lambda x: torch.cat([x, x + 9], 1)[:, :2],
    "flipped": lambda x: x.flip(0).flip(0),
    "expanded": lambda x: x[:1].clone().expand(2, 2),
    "overlapping": lambda x: x.reshape(-1).clone().as_strided((2, 2), (1, 1)),
    "under a sign": lambda x: torch.complex(x, -x).conj().imag,
}
WAYS = ("jit", "shard", "sharded rows", "compiled")
plain = lambda x: sf.full(x) if isinstance(x, DTensor) else x


def memory(tree: Any) -> list[torch.Tensor]:
    """Every tensor of this process behind the leaves of a tree."""
    return [local for x in sf.tree_map(lambda x: x, _leaves(tree)) for local in _locals(x)]


def _leaves(tree: Any) -> list[Any]:
    return (
        [x for part in tree for x in _leaves(part)] if isinstance(tree, (tuple, list)) else [tree]
    )


def _locals(x: Any) -> list[torch.Tensor]:
    local = x._local_tensor if isinstance(x, DTensor) else x
    return list(getattr(local, "shards", [local]))


def called(way: str, fn: Callable[..., Any], backend: str = "aten") -> Callable[..., Any]:
    """A function under a transform, on a mesh of two ranks where it has one."""
    if way in ("jit", "compiled"):
        made = sf.jit(fn, backend=backend)
        return made if way == "jit" else lambda *args: made.compile(*args)(*args)
    placed = None if way == "shard" else (P("a"), P("a"))
    return sf.shard(fn, sf.make_mesh((2,), ("a",)), placed, backend=backend)


def check_separate(
    way: str, names: list[str], layouts: tuple[str, str], backend: str = "aten"
) -> None:
    """Values as the plain function's; a write into one result is seen nowhere else."""
    fn = lambda x, y: [RESULTS[name](x, y) for name in names]
    args = tuple(LAYOUTS[layout](VALUES * k) for k, layout in enumerate(layouts, 1))
    with sf.fake_world(2):
        made = called(way, fn, backend)
        wanted = sf.tree_map(torch.clone, fn(*args))
        before = [x.clone() for x in (*args, CLOSED)]
        out = made(*args)
        assert_close(sf.tree_map(plain, out), wanted, rtol=0, atol=0, check_stride=False)
        locals_ = memory(out)
        for k, x in enumerate(locals_):
            others = [o.clone() for o in locals_]
            x.fill_(77.0 + k)
            assert all(o.equal(locals_[i]) for i, o in enumerate(others) if i != k), (
                f"result {k} of {names} is seen in another"
            )
        assert all(a.equal(b) for a, b in zip((*args, CLOSED), before, strict=True)), (
            f"a result of {names} is an argument's memory"
        )
        assert_close(sf.tree_map(plain, made(*args)), wanted, rtol=0, atol=0, check_stride=False)


@given(
    way=st.sampled_from(WAYS),
    names=st.lists(st.sampled_from(list(RESULTS)), min_size=1, max_size=4),
    layouts=st.tuples(st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS))),
)
@examples(22)
def test_a_write_into_a_result_is_seen_nowhere_else(
    way: str, names: list[str], layouts: tuple[str, str]
) -> None:
    check_separate(way, names, layouts)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_of_an_argument_with_the_default_backend(layout: str) -> None:
    names = ["x", "x * 1", "x + 0", "x.T", "x + y", "(x + y).T", "x[1]", "halves"]
    check_separate("jit", names, (layout, "own"), "inductor")


@pytest.mark.parametrize("placement", [P(), P("a"), P(None, "a")], ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_values_at_the_door_share_nothing(layout: str, placement: P) -> None:
    x = LAYOUTS[layout](VALUES)
    with simulated(a=2) as mesh:
        placed, local = (sf.distribute(x, mesh, placement), sf.from_local(x, mesh, placement))
        seen = [
            x,
            *memory(placed),
            *memory(local),
            sf.full(placed),
            sf.full(placed),
            sf.full(local),
        ]
        assert_close(sf.full(placed), x, check_stride=False)
        assert len({t.untyped_storage().data_ptr() for t in seen}) == len(seen)


def own(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return x.clone(), None


def half(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    base = torch.cat([x, x])
    return base[2:4], base


def other_shape(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    base = x.reshape(-1).clone()
    return base.view(2, 2), base


def detached(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    base = x.clone()
    return base.detach(), base


def of_numpy(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    array = x.numpy().copy()
    return torch.from_numpy(array), array


def seen_by_numpy(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    given = x.clone()
    return given, given.numpy()


def row_block(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    base = torch.cat([x, x], 1)
    return base[:, :2], base


GIVEN = [own, half, other_shape, detached, of_numpy, seen_by_numpy, row_block]


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("given_as", GIVEN, ids=lambda f: f.__name__)
def test_a_donated_tensor_that_others_see_is_not_written_to(given_as: Any, backend: str) -> None:
    x, base = given_as(VALUES)
    before = None if base is None else base.copy() if isinstance(base, np.ndarray) else base.clone()
    made = sf.jit(lambda x: (x * 2 + 1, x.T, x), backend=backend, donate_argnums=0)
    out = made(x)
    for got, wanted in zip(out, (VALUES * 2 + 1, VALUES.T, VALUES), strict=True):
        assert got.equal(wanted)
    assert base is None or bool((base == before).all())
    out[0].fill_(5.0)
    assert out[1].equal(VALUES.T) and out[2].equal(VALUES)
    assert base is None or bool((base == before).all())
    with pytest.raises(sf.ShardError, match="was donated"):
        x + 1


@pytest.mark.parametrize(
    "swap",
    [
        lambda a, b: (b, a),
        lambda a, b: (b.T, a.T),
        lambda a, b: (a + b, a),
        lambda a, b: (b[0], a + 1),
    ],
)
def test_results_that_trade_donated_memory(swap: Any) -> None:
    a, b = VALUES.clone(), VALUES * 3
    wanted = swap(VALUES, VALUES * 3)
    for got, right in zip(
        sf.jit(swap, donate_argnums=(0, 1), backend="inductor")(a, b), wanted, strict=True
    ):
        assert got.equal(right)


def refusal(kind: type, call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    lines = [line for line in str(caught.value).splitlines() if not line.startswith("  at: ")]
    assert len(lines) < len(str(caught.value).splitlines()), "it does not name the user's line"
    return "\n".join(lines)


@pytest.mark.parametrize("way", ["jit", "shard"])
@pytest.mark.parametrize("case", ["twice", "as another", "a view of another", "inside a tree"])
def test_a_tensor_donated_and_passed_in_another_place_is_refused_before_anything_runs(
    case: str, way: str
) -> None:
    x = VALUES.clone()
    numbers, args = {
        "twice": ((0, 1), (x, x)),
        "as another": ((0,), (x, x)),
        "a view of another": ((1,), (x, x[0])),
        "inside a tree": ((0,), ([x, x], x.clone())),
    }[case]
    fn = lambda a, b: (a[0] + 1, b + 1)
    with simulated(a=2) as mesh:
        made = sf.jit(fn, donate_argnums=numbers, backend="aten")
        if way == "shard":
            made = sf.shard(fn, mesh, donate_argnums=numbers, backend="aten")
        text = refusal(sf.ShardError, lambda: made(*args))
    assert "the donated argument shares memory with argument" in text
    assert "needed: a donated tensor whose memory no other argument uses" in text
    assert ".clone() in one of the two places, or leave the argument out of donate_argnums" in text
    assert x.equal(VALUES)


def test_a_donated_dtensor_passed_twice_is_refused_and_stays() -> None:
    with simulated(a=2) as mesh:
        placed = sf.distribute(VALUES, mesh, P("a"))
        fn = sf.shard(lambda a, b: a + b, placed.device_mesh, donate_argnums=0, backend="aten")
        assert "argument a: the donated argument shares memory with argument b" in refusal(
            sf.ShardError, lambda: fn(placed, placed)
        )
        assert sf.full(placed).equal(VALUES)


def test_a_tensor_donated_and_closed_over_is_refused_by_name() -> None:
    w = VALUES.clone()
    fn = sf.jit(lambda x: x + w, donate_argnums=0, backend="aten")
    text = refusal(sf.ShardError, lambda: fn(w))
    assert (
        "argument x: the donated argument shares memory with a tensor that jit(<lambda>) "
        "closes over"
    ) in text
    assert w.equal(VALUES) and fn(VALUES.clone()).equal(VALUES * 2)


def test_a_donation_that_cannot_be_made_leaves_every_argument_as_it_was() -> None:
    import weakref

    x, y = VALUES.clone(), VALUES.clone()
    watched = weakref.ref(y)
    fn = sf.jit(lambda x, y: (x + 1, y + 1), donate_argnums=(0, 1), backend="aten")
    assert "argument y: another object refers to the donated argument" in refusal(
        sf.ShardError, lambda: fn(x, y)
    )
    assert watched() is y and x.equal(VALUES) and y.equal(VALUES)


def test_donation_inside_another_transform_takes_nothing() -> None:
    x = VALUES.clone()
    inner = sf.jit(lambda x: x * 2, donate_argnums=0, backend="aten")
    assert sf.jit(lambda x: inner(x) + x, backend="aten")(x).equal(VALUES * 3)
    assert x.equal(VALUES)


def test_a_compiled_function_takes_arguments_in_another_layout() -> None:
    compiled = sf.jit(lambda x: (x * 2, x.T), backend="inductor").compile(VALUES)
    for make in LAYOUTS.values():
        x = make(VALUES)
        assert [a.equal(b) for a, b in zip(compiled(x), (x * 2, x.T), strict=True)] == [True, True]


# as_strided, which is defined by memory
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "at a place": lambda x: x.as_strided((2,), (1,), 1),
    "from the start": lambda x: x.as_strided((2,), (1,)),
    "past the end": lambda x: x.as_strided((3,), (2,), 0),
    "windows": lambda x: x.as_strided((3, 2), (1, 1)),
    "of a part": lambda x: x[2:].as_strided((2,), (1,)),
    "before a part": lambda x: x[2:].as_strided((2,), (1,), 0),
    "of a value": lambda x: (x + 1)[2:].as_strided((2,), (1,), 0),
    "of a sum with zeros": lambda x: (x[1:] + torch.zeros(3, dtype=DTYPE)).as_strided(
        (2,), (1,), 0
    ),
    "of a transposed value": lambda x: (x + 1).reshape(2, 2).T.as_strided((2,), (2,)),
    "of a copy of a part": lambda x: x[1:].clone().as_strided((2,), (1,), 0),
    "of a placed value": lambda x: sf.constrain(x, P("a")).as_strided((2,), (1,)),
    "of a placed part": lambda x: sf.constrain(x[1:3], P("a")).as_strided((2,), (1,)),
    "of pairs": lambda x: torch.view_as_real(torch.complex(x, x)).as_strided((3,), (1,)),
    "closed over": lambda x: CLOSED.as_strided((2,), (1,), 1) + x[0],
    "unfold": lambda x: x.unfold(0, 2, 1),
    "its gradient": sf.grad(lambda x: (x.as_strided((3, 2), (1, 1)) ** 2).sum()),
    "written": lambda x: torch.as_strided_scatter(
        x * 1, torch.zeros(2, dtype=DTYPE), (2,), (1,), 1
    ),
    "in a scan": lambda x: sf.scan(lambda c, r: (c + (c * 2).as_strided((), (), 1), r), x, x)[0],
    "of a carry": lambda x: sf.scan(lambda c, r: (c + c.as_strided((), (), 1), r), x, x)[0],
}
STARTS = {
    "own": BASE[3:7].clone(),
    "a view": BASE[3:7],
    "every second": BASE[1:9:2],
    "expanded": BASE[5:6].expand(4),
}


@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("name", list(PLACES))
def test_as_strided_is_right_or_refused(name: str, start: str) -> None:
    x, fn = STARTS[start], PLACES[name]
    try:
        wanted = fn(x)
    except (RuntimeError, sf.ShardError):
        wanted = None
    with sf.fake_world(2):
        for way in ("jit", "shard", "sharded rows"):
            made = called(way, fn)
            made = (
                made
                if way != "sharded rows"
                else sf.shard(fn, sf.make_mesh((2,), ("a",)), P("a"), backend="aten")
            )
            try:
                got = plain(made(x))
            except sf.CaptureError as error:
                assert "as_strided" in str(error) and "  try: " in str(error)
                assert (
                    start != "own"
                    or wanted is None
                    or name in ("of a placed part", "of pairs", "of a carry")
                )
                continue
            assert got.equal(wanted)


def test_as_strided_says_what_it_reads() -> None:
    text = refusal(sf.CaptureError, lambda: sf.jit(PLACES["at a place"], backend="aten")(BASE[3:7]))
    said = (
        "argument x: as_strided reads from a given storage offset, but the argument is itself "
        "a view with an offset"
    )
    assert said in text and "x.clone(), or slicing, x.unfold(dim, size, step)" in text
    text = refusal(
        sf.CaptureError, lambda: sf.jit(PLACES["past the end"], backend="aten")(BASE[3:7])
    )
    assert (
        "argument x: as_strided\n  the view reads up to element 4 of a tensor with 4 elements"
        in text
    )


@pytest.mark.parametrize(
    "name", ["of a sum with zeros", "from the start", "of a value", "of a copy of a part"]
)
def test_as_strided_with_the_default_backend(name: str) -> None:
    made = sf.jit(PLACES[name], backend="inductor")
    for x in (BASE[:4].clone(), BASE[3:7]):
        assert made(x).equal(PLACES[name](x))


def unstrided() -> dict[str, tuple[torch.Tensor, str]]:
    eye = torch.eye(4)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {
        "bsr": (eye.to_sparse_bsr((2, 2)), "torch.sparse_bsr"),
        "bsc": (eye.to_sparse_bsc((2, 2)), "torch.sparse_bsc"),
        "coo": (eye.to_sparse(1), "torch.sparse_coo with dense dims"),
        "mkldnn": (eye.to_mkldnn(), "torch._mkldnn"),
        "quantized": (
            torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
            "quantized, torch.qint8",
        ),
        "jagged": (jagged, "torch.jagged"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bsr", "bsc", "coo", "mkldnn", "quantized", "jagged", "nested"])
def test_a_tensor_without_strides_is_refused_with_its_path(kind: str) -> None:
    x, said = unstrided()[kind]
    read = lambda d: d["w"] * 1
    with simulated(a=2) as mesh:
        made = sf.jit(read, backend="aten")
        calls = [
            made,
            sf.grad(read),
            sf.vmap(read),
            sf.shard(read, mesh, backend="aten"),
            made.trace,
            made.compile,
        ]
        for call in calls:
            text = refusal(sf.CaptureError, lambda call=call: call({"w": x}))
            assert f"d['w'] is {said}\n  needed: tensors with strides\n  try: x.to_dense()" in text
        assert f"['w'] is {said}" in refusal(
            sf.CaptureError, lambda: sf.distribute({"w": x}, mesh, P())
        )
        assert f"x is {said}" in refusal(sf.CaptureError, lambda: sf.from_local(x, mesh, P()))


def test_a_dtensor_made_by_torch_shares_nothing_with_its_results() -> None:
    with simulated(a=2) as mesh:
        x = VALUES.clone()
        placed = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        whole = sf.full(placed)
        whole.fill_(9.0)
        assert x.equal(VALUES)
