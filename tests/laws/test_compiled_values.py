"""Compiled code has torch's values where Inductor's own has others, as under torch.compile; and
what a compiler does not compile is named by function, op and line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

import shardfn as sf
from shardfn import _compat
from shardfn.errors import ShardError

ROUNDING = 16  # units in the last place
WORDS = ("amin", "amax", "argmin", "argmax", "min", "max")
BYTES = (torch.uint8, torch.int8, torch.bool)


def assert_compiled(fns: dict[str, Callable[..., Any]], *xs: torch.Tensor, bound: float) -> None:
    """All functions, compiled together, equal their eager selves up to a relative bound."""
    results = sf.jit(lambda *xs: [fn(*xs) for fn in fns.values()], backend="inductor")(*xs)
    for (name, fn), got in zip(fns.items(), results, strict=True):
        wanted = fn(*xs)
        for mine, true in zip(tensors(got), tensors(wanted), strict=True):
            assert mine.dtype == true.dtype, name
            assert_close(
                mine,
                true,
                rtol=bound,
                atol=0 if bound < 1e-3 else 1e-6,
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_attention_by_hand_follows_the_dims_of_its_softmax_and_its_permutations() -> None:
    x = torch.randn(3, 3, 3, 3, generator=torch.Generator().manual_seed(0))

    def over(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.softmax(x @ x.mT / 2.0, dim) @ x

    def scores_by_hand(x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.mT / 2.0
        weights = (scores - scores.amax(-2, keepdim=True)).exp()
        return weights / weights.sum(-2, keepdim=True) @ x

    def permuted(order: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.softmax(x @ x.permute(order) / 2.0, -1) @ x

    orders = ((0, 1, 3, 2), (1, 0, 3, 2), (0, 3, 1, 2), (2, 1, 3, 0))
    fns = {f"softmax over {d}": over(d) for d in (-1, -2, 0, 1)} | {"by hand": scores_by_hand}
    fns |= {f"permuted {order}": permuted(order) for order in orders}
    assert_compiled(fns, x, bound=1e-3)


def test_casts_of_an_arange_are_kept() -> None:
    every = {
        "bool": lambda x: (torch.arange(3)[:, None] - torch.arange(3)).bool(),
        "uint8": lambda x: (torch.arange(300) - 20).to(torch.uint8).to(torch.int64),
        "int8 of a product": lambda x: (torch.arange(40) * 50).to(torch.int8) // 2,
        "uint8 from the start": lambda x: (torch.arange(200, dtype=torch.uint8) * 3).long(),
        "int32 beyond": lambda x: (torch.arange(40) * 10**9).to(torch.int32),
        "int32 arithmetic": lambda x: (torch.arange(40, dtype=torch.int32) * 10**8).long(),
        "float and back": lambda x: (torch.arange(40) - 20).to(torch.float32).to(torch.int8),
        "as an index": lambda x: x[(torch.arange(4) + 254).to(torch.uint8).long() % 5],
        "two casts": lambda x: torch.arange(600).to(torch.int16).to(torch.uint8).bool(),
    }
    assert_compiled(every, torch.arange(7), bound=0.0)


def test_extremes_of_bytes_are_torchs() -> None:
    x = torch.randint(0, 250, (5, 40), generator=torch.Generator().manual_seed(0)).byte()
    fns = {}
    for word in WORDS:
        for dtype in BYTES if not word.startswith("arg") else BYTES[:2]:
            for dims in ((1,), (0,), ((0, 1),) if word.startswith("am") else ()):
                fns[f"{word} {dtype} {dims}"] = lambda x, word=word, dtype=dtype, dims=dims: (
                    getattr(torch, word)((x % 2 if dtype == torch.bool else x).to(dtype), *dims)
                )
    assert_compiled(fns, x, bound=0.0)


DIVISIONS: dict[str, Callable[..., torch.Tensor]] = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "fmod": torch.fmod,
    "number % tensor": lambda a, b: 7 % b,
    "by a number": lambda a, b: a // 3 + a % 3,
}


def test_integer_divisions_are_torchs() -> None:
    a, b = torch.arange(-20, 20), torch.tensor([3, -2, 7, 5] * 10)
    assert_compiled(DIVISIONS, a, b, bound=0.0)


@pytest.mark.parametrize("name", [name for name in DIVISIONS if name != "by a number"])
def test_an_integer_division_by_zero_is_torchs_error(name: str) -> None:
    a, zeros = torch.arange(20), torch.arange(20) - 3
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        sf.jit(DIVISIONS[name], backend="inductor")(a, zeros)


def test_a_negative_power_of_integers_is_torchs_error() -> None:
    for backend in ("aten", "inductor"):
        with pytest.raises(RuntimeError, match="Integers to negative integer powers"):
            sf.jit(lambda x: x**-1, backend=backend)(torch.tensor([4, 5, -7]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_keep_their_digits_near_zero_and_overflow(dtype: torch.dtype) -> None:
    least, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    root = most**0.5
    x = torch.tensor([least, -least, 1e-20, -1e-8, 1e-3, -0.3, 0.7, 0.999, 3.0, -9.0, 0.0, root])
    x = torch.cat([x.to(dtype), torch.tensor([most / 2, root * 4, -root, 0.49], dtype=dtype)])
    fns = {
        **{fn.__name__: fn for fn in (torch.expm1, torch.sinh, torch.cosh, torch.atanh)},
        **{fn.__name__: fn for fn in (torch.acosh, torch.asinh, torch.erf, torch.log1p)},
        **{fn.__name__: fn for fn in (F.elu, F.selu, F.celu, F.softplus, torch.erfinv)},
    }
    assert_compiled(fns, x.repeat(3), bound=ROUNDING * torch.finfo(dtype).eps)


def test_a_quotient_too_large_for_a_rest_is_infinite_or_rounded_as_torchs() -> None:
    a = torch.tensor([1e30, -1e30, 7.5, float("inf"), float("nan")] * 5)
    every = {"//": lambda a: a // 1e-20, "smaller": lambda a: a // 1e-9, "plain": lambda a: a // 2}
    assert_compiled(every, a, bound=1e-6)


def test_what_stopped_the_compiler_compiles() -> None:
    index, source = torch.tensor([0, 1, 1]), torch.tensor([5, 6, 8])
    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    every = {
        "triu_indices": lambda a, q: torch.triu_indices(4, 5),
        "tril_indices": lambda a, q: torch.tril_indices(5, 4, 1),
        "index_reduce": lambda a, q: a.index_reduce(0, index, source, "mean"),
        "floor_divide": lambda a, q: torch.floor_divide(a, source),
        "softmax of nan": lambda a, q: torch.softmax(torch.full((3, 4), float("nan")), -1) + a[0],
        "clamp of nan": lambda a, q: torch.full((3,), float("nan")).clamp(0, 1),
        "flex_attention": lambda a, q: flex_attention(q, q, q),
        "prod in half precision": lambda a, q: sf.jacfwd(torch.prod)(q.flatten()[:5].half()),
    }
    assert_compiled(every, torch.tensor([7, 8, 9]), q, bound=3e-3)


@pytest.mark.filterwarnings("ignore")
def test_an_error_of_the_compiler_names_the_function_the_op_and_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.lowering import lowerings

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setitem(lowerings, torch.ops.aten.cummax.default, fails)

    def running(x: torch.Tensor) -> torch.Tensor:
        return torch.cummax(x + 1, 0)[0]

    with pytest.raises(ShardError) as caught:
        sf.jit(running, backend="inductor")(torch.ones(3))
    text = str(caught.value)
    line = running.__code__.co_firstlineno + 1
    assert "jit(running)" in text
    assert "aten.cummax.default" in text
    assert f"test_compiled_values.py:{line}" in text


def test_our_decompositions_stand_before_inductors_and_hide_none() -> None:
    from torch._inductor.decomposition import select_decomp_table

    table = _compat.decomposed.table()
    a, b = torch.tensor([7, 8]), torch.tensor([2, 3])
    hidden = []
    for op in _compat.decomposed.OURS:
        theirs = select_decomp_table().get(op)
        takes_two = sum(not x.kwarg_only for x in op._schema.arguments) == 2
        if theirs is None or "dim" in str(op._schema) or not takes_two:
            continue
        options = {"rounding_mode": "floor"} if "mode" in op._overloadname else {}
        xs = (a[None, None], b[None, :, None]) if op is torch.ops.aten.bmm.default else (a, b)
        result, own = table[op](*xs, **options), theirs(*xs, **options)
        hidden += [op] if result is NotImplemented and own is not NotImplemented else []
    assert not hidden


TARGETS = torch.tensor([[1, 0, -1, 2], [3, -1, -1, -1], [0, 1, 2, 3], [-1, 0, 1, 2], [2, 2, -1, 0]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_margin_loss_ignores_the_labels_after_the_end_of_a_target(reduction: str) -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = lambda x, y: F.multilabel_margin_loss(x, y, reduction=reduction)
    for backend in ("aten", "inductor"):
        assert_close(sf.jit(loss, backend=backend)(x, TARGETS), loss(x, TARGETS))
        assert_close(sf.jit(loss, backend=backend)(x[0], TARGETS[0]), loss(x[0], TARGETS[0]))
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf, TARGETS).sum(), leaf)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        step = sf.value_and_grad(lambda x, y: loss(x, y).sum())
        value, gradient = sf.shard(step, mesh, (sf.P("dp"), sf.P("dp")), backend="aten")(x, TARGETS)
        assert_close(sf.full(value), loss(x, TARGETS).sum())
        assert_close(sf.full(gradient), wanted)


@pytest.mark.parametrize("label", [torch.tensor(2), torch.tensor([2])], ids=["one", "a row"])
def test_the_margin_loss_of_one_sample_has_the_shape_of_its_target(label: torch.Tensor) -> None:
    x = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for reduction in ("none", "mean"):
        loss = lambda x: F.multi_margin_loss(x, label, p=2, margin=0.5, reduction=reduction)  # noqa: B023
        found, wanted = sf.jit(loss, backend="aten")(x), loss(x)
        assert_close(found, wanted)
        assert found.shape == wanted.shape
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf).sum(), leaf)
        assert_close(sf.grad(lambda x: loss(x).sum())(x), gradient)  # noqa: B023


POOLS = {
    "2d": (F.max_pool2d, (2, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "dilated": (F.max_pool2d, (2, 9, 8), {"kernel_size": 3, "padding": 1, "dilation": 2}),
    "uneven": (
        F.max_pool2d,
        (2, 9, 8),
        {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 1), "ceil_mode": True},
    ),
    "large": (F.max_pool2d, (2, 11, 12), {"kernel_size": 7, "stride": 2, "padding": 3}),
    "1d": (F.max_pool1d, (2, 3, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "3d": (F.max_pool3d, (1, 2, 5, 6, 4), {"kernel_size": 3, "stride": 2, "padding": 1}),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_of_the_smallest_values_has_torchs_places_and_gradients(name: str) -> None:
    pool, shape, options = POOLS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, ..., :5, :] = -torch.inf
    x[..., :2] = -torch.inf
    both = lambda x: pool(x, return_indices=True, **options)
    for t in (x, (x * 8).nan_to_num(neginf=0).clamp(0).to(torch.uint8)):
        if t is x or name not in ("1d", "3d"):  # torch has no others of bytes
            assert_close(sf.jit(both, backend="inductor")(t), both(t))
    loss = lambda x: (pool(x, **options).nan_to_num(neginf=0.5) * 3).square().sum()
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close(sf.jit(sf.grad(loss), backend="inductor")(x), wanted)


WINDOWS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "1d": ((1, 1, 9), lambda x: F.avg_pool1d(x, 7, stride=3, ceil_mode=True)),
    "2d": ((1, 2, 9, 8), lambda x: F.avg_pool2d(x, (3, 2), stride=2, padding=1, ceil_mode=True)),
    "2d, padding not counted": (
        (2, 9, 9),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "2d, a divisor": (
        (2, 9, 9),
        lambda x: F.avg_pool2d(x, 2, 3, ceil_mode=True, divisor_override=5),
    ),
    "3d": ((1, 1, 5, 6, 7), lambda x: F.avg_pool3d(x, 2, stride=2, ceil_mode=True)),
    "powers": ((1, 1, 9, 8), lambda x: F.lp_pool2d(x.abs() + 1, 2.0, 3, 2, ceil_mode=True)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_clipped_windows_of_average_pools_have_torchs_gradients(name: str) -> None:
    shape, pool = WINDOWS[name]
    assert_equal_gradients(lambda x: pool(x).sin().sum(), shape)


FACTORS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a factor": ((1, 2, 5, 4), {"scale_factor": 1.7}),
    "a small factor": ((1, 2, 5, 4), {"scale_factor": 0.6}),
    "factors": ((1, 2, 5, 4), {"scale_factor": (2.0, 0.7)}),
    "twice": ((1, 2, 5, 4), {"scale_factor": 2}),
    "half": ((1, 2, 6, 4), {"size": (3, 2)}),
    "a rounded size": ((1, 1, 2, 3), {"size": (82, 3)}),
    "rounded, 1d": ((1, 1, 3), {"size": 123}),
    "rounded, 3d": ((1, 1, 2, 3, 2), {"size": (94, 3, 2)}),
    "a size": ((1, 1, 41, 7), {"size": (82, 14)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FACTORS)
def test_interpolations_to_the_nearest_element_read_torchs_places(
    name: str, dtype: torch.dtype
) -> None:
    shape, options = FACTORS[name]
    resized = lambda x: F.interpolate(x, mode="nearest", **options)
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert_close(sf.jit(resized, backend="inductor")(x), resized(x), rtol=0, atol=0)
    assert_equal_gradients(lambda x: resized(x).square().sum(), shape, dtype)


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_interpolations_to_the_nearest_element_of_transposed_tensors(dims: int) -> None:
    x = torch.randn((2, 3, 4, 5, 6)[:dims], dtype=torch.float64).permute(*range(dims)[::-1])
    resized = lambda x: F.interpolate(x, size=(7,) * (dims - 2)) + 1
    assert_close(sf.jit(resized, backend="inductor")(x), resized(x), rtol=0, atol=0)


def assert_equal_gradients(
    loss: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
) -> None:
    """The compiled gradient of a loss is eager torch's."""
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    assert_close(sf.jit(sf.grad(loss), backend="inductor")(x), wanted)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_the_mean_of_nothing_is_nan() -> None:
    for fn in (torch.var_mean, torch.std_mean):
        for x in (torch.zeros(0, 5), torch.zeros(3, 0)):
            both = lambda x, fn=fn: [*fn(x), *fn(x, dim=0)]
            assert_close(sf.jit(both, backend="inductor")(x), both(x), equal_nan=True)


def test_the_mantissa_and_the_exponent_compile() -> None:
    x = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split = lambda x: torch.frexp(x)
    assert_close(sf.jit(split, backend="inductor")(x), split(x))
    got = sf.jit(sf.grad(lambda x: torch.frexp(x).mantissa.sum()), backend="inductor")(x)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(torch.frexp(leaf).mantissa.sum(), leaf)
    assert_close(got, wanted)


SMALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "square": torch.square,
    "truncated": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "floored": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "multiple": lambda x: torch.add(x, x, alpha=3),
    "shifted": lambda x: x << 1,
    "cube": lambda x: x**3,
}
READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int32": lambda y: y.to(torch.int32),
    "float": lambda y: y.float(),
    "compared": lambda y: y > 50,
    "halved": lambda y: y >> 1,
    "divided": lambda y: y // 3,
    "rest": lambda y: y % 6,
    "sum": lambda y: y.sum(),
    "largest": lambda y: y.amax(0),
    "place": lambda y: y.argmax(0),
    "clamped": lambda y: y.clamp(-3, 3),
    "maximum": lambda y: torch.maximum(y, y.flip(0)),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_integers_wrap_at_the_ends_of_their_dtype(name: str, dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    numbers = [ends.min, ends.min + 1, 0, 1, 2, 5, ends.max // 2, ends.max - 1, ends.max]
    x = torch.tensor([numbers] * 5).flatten().to(dtype)
    every = {reader: lambda x, r=r: r(SMALL[name](x)) for reader, r in READERS.items()}
    assert_compiled(every, x, bound=1e-6)


@pytest.mark.parametrize("factor", [0, 1, 3, True])
def test_a_sum_of_bools_with_a_factor_is_bool(factor: Any) -> None:
    a, b = torch.tensor([[True, True, False, False], [True, False, True, False]])
    summed = lambda a, b: torch.add(a, b, alpha=factor)
    assert_close(sf.jit(summed, backend="inductor")(a, b), summed(a, b))
    wide = lambda a, b: torch.add(a, b.repeat(10, 1), alpha=factor) | b
    assert_close(sf.jit(wide, backend="inductor")(a, b), wide(a, b))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_gradients_of_ops_with_complex_numbers_are_compiled(dtype: torch.dtype) -> None:
    x = torch.randn(5, dtype=dtype, generator=torch.Generator().manual_seed(2))

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x / (2 + 1j) + (1 - 2j) / x + x * 3j + torch.addcdiv(x, x, x + 1, value=2j)
        return (y + x ** (1 + 1j)).real.sum()

    wanted = torch.func.grad(loss)(x)
    for backend in ("aten", "inductor"):
        assert_close(sf.jit(sf.grad(loss), backend=backend)(x), wanted)
    assert_close(sf.vmap(sf.grad(loss))(x[None])[0], wanted)


def test_the_place_of_an_extreme_is_counted_by_dims_and_not_in_memory() -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    fns = {
        "a permuted result": lambda x: x.permute(2, 0, 1).relu().argmax(),
        "of two": lambda x: (x.mT + x.mT).argmin(),
        "a permuted argument": lambda x: x.mT.argmax(),
        "copied": lambda x: x.mT.contiguous().sin().argmax(),
        "kept dims": lambda x: x[0].t().exp().argmax(keepdim=True),
        "of a dim": lambda x: x.mT.cos().argmin(1),
        "flat": lambda x: x.mT.cos().flatten().argmin(),
        "largest and place": lambda x: x.mT.cos().flatten(1).max(1),
        "sorted": lambda x: x.mT.cos().flatten().topk(3),
    }
    assert_compiled(fns, x, bound=1e-6)
    assert_compiled({"strided": lambda x: (x * 2).argmin()}, x[0].t(), bound=0)


def test_a_write_into_an_expanded_tensor_is_into_one_element() -> None:
    v, idx = torch.tensor([1.0, 2.0]), torch.tensor([0, 2])
    ones = torch.ones(2, 2)

    def by_row(v: torch.Tensor) -> torch.Tensor:
        return v.view(2, 1).expand(2, 4)

    fns = {
        "index_add": lambda v: torch.zeros(1).expand(4).index_add(0, idx, v),
        "index_put": lambda v: (v.sum() * 0).expand(4).index_put((idx,), v),
        "accumulated": lambda v: by_row(v).index_put((idx // 2, idx), v, accumulate=True),
        "columns": lambda v: by_row(v).index_add(1, idx, ones),
        "select": lambda v: by_row(v).select_scatter(v, 1, 2),
        "slice": lambda v: by_row(v).slice_scatter(ones, 1, 1, 3),
        "diagonal": lambda v: by_row(v).diagonal_scatter(v),
        "windows": lambda v: v.repeat(3).unfold(0, 3, 1).index_add(0, idx, torch.ones(2, 3)),
        "mask": lambda v: by_row(v).masked_scatter(torch.eye(2, 4).bool(), v),
    }
    assert_compiled(fns, v, bound=0)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_gradients_of_elements_reach_these_elements_alone(backend: str) -> None:
    idx = torch.tensor([0, 2])
    x = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cubes = lambda x: (torch.stack(x.unbind())[idx] ** 3).sum()
    wanted = torch.diag(6 * x).index_fill(0, torch.tensor([1, 3]), 0.0)
    assert_close(sf.jit(sf.hessian(cubes), backend=backend)(x), wanted)
    rows = torch.stack([x, 2 * x, 3 * x])
    wanted = 3 * rows**2 * torch.tensor([1.0, 0, 1, 0])
    assert_close(sf.jit(sf.vmap(sf.grad(cubes)), backend=backend)(rows), wanted)
    block = torch.outer(x, x)
    diagonal = lambda x, s: torch.diagonal_scatter(x, s).square().sum()
    wanted = 2 * block.diagonal_scatter(torch.zeros(4, dtype=torch.float64))
    assert_close(sf.jit(sf.grad(diagonal), backend=backend)(block, x), wanted)


def test_a_cast_to_fewer_bits_rounds_where_another_cast_follows() -> None:
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    fns = {
        "half": lambda x: x.half().float(),
        "error": lambda x: x - x.bfloat16().float(),
        "twice": lambda x: x.bfloat16().half().float(),
        "of a result": lambda x: x.sin().half().double(),
        "sum": lambda x: x.half().float().sum(1),
        "from double": lambda x: x.double().half().double(),
        "widened between": lambda x: x.half().double().float(),
    }
    assert_compiled(fns, x, bound=1e-6)
    squares = lambda x: (x.half().float() ** 2).sum()
    assert_close(sf.jit(sf.grad(squares))(x), (2 * x.half().float()).half().float())


def test_a_sum_with_zeros_has_no_negative_zero() -> None:
    x = torch.tensor([-0.5, -0.1, -0.9] * 6)
    fns = {
        "zeros_like": lambda x: 1 / (x.ceil() + torch.zeros_like(x)),
        "zeros first": lambda x: 1 / (torch.zeros(18) + x.ceil()),
        "one zero": lambda x: 1 / (x.ceil() + torch.zeros(())),
        "a number": lambda x: 1 / (x.ceil() + 0),
        "differences": lambda x: 1 / (x.ceil() - torch.zeros(18)),
        "products": lambda x: 1 / (x.ceil() * torch.ones(18)),
    }
    assert_compiled(fns, x, bound=0)


def test_narrow_integers_wrap_and_keep_their_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(-100, 100, (2, 2, 3, 3), generator=generator)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = -x.abs()
        return torch.cat([y, y]).sum()

    for dtype in (torch.int8, torch.int16, torch.uint8, torch.int32):
        fns = {
            "negative sizes": lambda a, b: twice(a),
            "one matrix": lambda a, b: a[:1, :1] @ b[:1, :, :2],
            "rows": lambda a, b: a[:, :1] @ b,
            "columns": lambda a, b: a @ b[:, :, :1],
            "both": lambda a, b: a[:, :1] @ b[:, :, :1],
            "all": lambda a, b: a @ b,
        }
        assert_compiled(fns, a.to(dtype), b.to(dtype), bound=0)


def test_a_product_with_a_power_of_two_has_torchs_dtype() -> None:
    kinds = (torch.bool, torch.int64, torch.float16, torch.float32)
    xs = [torch.ones(4, dtype=kind) for kind in kinds]
    pairs = {f"{a} {b}": (a, b) for a in range(4) for b in (1, 2, 3)}
    fns = {name: lambda *x, a=a, b=b: torch.ldexp(x[a], x[b]) for name, (a, b) in pairs.items()}
    assert_compiled(fns, *xs, bound=1e-3)
