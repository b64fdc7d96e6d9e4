"""S3: tensors that hold other tensors, by `__tensor_flatten__`, in, through and out of every
transform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from message import without_line
from ranks import run_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.testing import assert_close
from torch.utils._python_dispatch import return_and_correct_aliasing
from worlds import SimulatedTensor

import shardfn as sf
from shardfn import P

linear = functional.linear


class Pair(torch.Tensor):
    """Two tensors, on which everything is done to both."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device
        )

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(held: Any, meta: Any, size: Any, stride: Any) -> Pair:
        return Pair(held["a"], held["b"])

    def __repr__(self, **_: Any) -> str:
        return f"Pair({self.a}, {self.b})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, second = (func(*half(args, name), **half(kwargs or {}, name)) for name in "ab")
        if isinstance(first, (list, tuple)):
            out: Any = [Pair(x, y) for x, y in zip(first, second, strict=True)]
        else:
            is_tensor = isinstance(first, torch.Tensor)
            out = Pair(first, second) if is_tensor else first
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def half(tree: Any, name: str) -> Any:
    """A tree with one of its two tensors in place of each pair."""
    if isinstance(tree, Pair):
        return getattr(tree, name)
    if isinstance(tree, dict):
        return {key: half(x, name) for key, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [half(x, name) for x in tree]
    return tree


aten = torch.ops.aten
AS_IT_IS = aten.t.default, aten.detach.default, aten.view.default


class Quantized(torch.Tensor):
    """A weight as small integers, a scale and the number of bits."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, bits: int) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=scale.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
        self.numbers, self.scale, self.bits = data, scale, bits

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], {"bits": self.bits}

    @staticmethod
    def __tensor_unflatten__(held: Any, meta: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(held["numbers"], held["scale"], meta["bits"])

    def __repr__(self, **_: Any) -> str:
        return f"Quantized({self.numbers}, {self.scale})"

    def plain(self) -> torch.Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in AS_IT_IS:
            x, *others = args
            return Quantized(func(x.numbers, *others), x.scale.detach(), x.bits)
        plain = [x.plain() if isinstance(x, Quantized) else x for x in args]
        return func(*plain, **(kwargs or {}))


DRAW = torch.Generator().manual_seed(0)
A, B, W = (
    torch.randn(shape, generator=DRAW, dtype=torch.float64) for shape in ((5, 3), (5, 3), (3, 3))
)
Q = Quantized(torch.arange(-4, 5, dtype=torch.int8).view(3, 3), torch.tensor(0.5).double(), 4)
QW = Q.plain()


staged = functools.partial(sf.jit, backend="aten")


ROW = Pair(A[0], B[0])


def wave(x: Any) -> Any:
    return (x @ W).sin()


def loss(x: Any) -> Any:
    return ((x @ W).sin() * x).sum()


def step(carry: Any, row: Any) -> Any:
    return carry + row.sin(), carry * row


@sf.custom_vjp
def tripled(x: Any) -> Any:
    return x * x


tripled.defvjp(lambda x: (x * x, x), lambda x, g: (g * x * 3,))

OF_PAIRS: dict[str, Callable[[Any], Any]] = {
    "jit": staged(wave),
    "grad": sf.grad(loss),
    "value_and_grad": sf.value_and_grad(loss),
    "vmap": sf.vmap(lambda row: (row @ W).sin()),
    "gradients of rows": sf.vmap(sf.grad(lambda row: (row @ W).sin().sum())),
    "jvp": staged(lambda x: sf.jvp(wave, (x,), (x * 2,))),
    "vjp": staged(lambda x: sf.vjp(wave, x)[1](x)),
    "jacrev": sf.jacrev(lambda x: x.sin().sum(0)),
    "jacfwd": sf.jacfwd(lambda x: x.sin().sum(0)),
    "hessian": sf.hessian(lambda x: (x * x.sin()).sum()),
    "linearize": staged(lambda x: sf.linearize(wave, x)[1](x)),
    "checkpoint": sf.grad(sf.checkpoint(loss)),
    "bucketed_grad": sf.bucketed_grad(loss),
    "scan": staged(lambda x: sf.scan(step, x[0], x)),
    "a gradient of scan": sf.grad(lambda x: sf.scan(step, x[0], x)[0].sum()),
    "map": staged(lambda x: sf.map(torch.sin, x)),
    "cond": staged(lambda x: sf.cond(torch.tensor(True), torch.sin, torch.cos, x)),
    "while_loop": staged(
        lambda x: sf.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (torch.tensor(0), x)
        )[1]
    ),
    "custom_vjp": sf.grad(lambda x: tripled(x).sum()),
    "a tree": staged(lambda x: {"y": [x + 1, (x * 2,)]}),
    "a view": staged(lambda x: x.T.reshape(3, 5) * 2),
    "in place": staged(lambda x: (x * 1).add_(1).relu_()),
}


@pytest.mark.parametrize("name", OF_PAIRS)
def test_s3_1_a_transform_of_a_pair_is_the_pair_of_the_transform(name: str) -> None:
    fn = OF_PAIRS[name]
    out = fn(Pair(A, B))
    for key, x in (("a", A), ("b", B)):
        assert_close(half(out, key), half(fn(x), key))
    assert half(out, "a") is not out


def held_inside(x: Any) -> Any:
    return linear(x, Quantized(Q.numbers * 1, Q.scale * 1, 4)).sin()


def over_rows(x: Any, q: Any) -> Any:
    return sf.scan(lambda c, row: (c, linear(row, c)), q, x)[1]


def branch(x: Any, q: Any) -> Any:
    return sf.cond(x.sum() > -100, linear, lambda x, q: x, x, q)


OF_WEIGHTS: dict[str, Callable[..., Any]] = {
    "an argument": lambda x, q: linear(x, q).sin(),
    "closed over": lambda x, q: linear(x, Q if isinstance(q, Quantized) else q),
    "transposed": lambda x, q: x @ q.t(),
    "checkpoint": lambda x, q: sf.checkpoint(linear)(x, q),
    "vmap": lambda x, q: sf.vmap(linear, in_axes=(0, None))(x, q),
    "a carry of scan": over_rows,
    "closed over by scan": lambda x, q: sf.scan(lambda c, row: (c, linear(row, q)), x[0], x)[1],
    "cond": branch,
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_s3_1_a_quantized_weight_answers_as_its_values(name: str) -> None:
    fn = OF_WEIGHTS[name]
    wanted = fn(A, QW)
    assert_close(sf.jit(fn, backend="aten")(A, Q), wanted)
    if name == "a carry of scan":  # of which a derivative follows the scale
        return
    total = lambda x, q: fn(x, q).square().sum()
    expected = torch.func.grad(total)(A, QW)
    assert_close(sf.grad(total)(A, Q), expected)


def test_s3_1_results_made_inside() -> None:
    out = sf.jit(lambda n, s: Quantized(n, s * 2, 3), backend="aten")(Q.numbers, Q.scale)
    assert isinstance(out, Quantized) and out.bits == 3
    assert_close(out.plain(), QW * 2)
    rows = staged(lambda x: sf.scan(lambda c, r: (c, Pair(r, r + 1)), x[0], x)[1])
    pairs = rows(A)
    assert isinstance(pairs, Pair)
    assert_close(pairs.b, A + 1)


@pytest.mark.inductor
def test_s3_1_compiled() -> None:
    out = sf.jit(wave, backend="inductor")(Pair(A, B))
    assert_close([out.a, out.b], [wave(A), wave(B)])


def test_s3_1_one_inside_of_another() -> None:
    nested = Pair(Pair(A, B), Pair(B, A))
    out = sf.jit(wave, backend="aten")(nested)
    assert_close(out.b.a, wave(B))
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        out = sf.shard(wave, mesh, P("dp"))(nested)
        assert out.a.b.placements == (Shard(0),)
        assert_close(sf.full(out).a.b, wave(B))


def test_s3_1_their_tensors_have_paths_and_one_program_each() -> None:
    fn = sf.jit(lambda p: p["x"] * 2, backend="aten")
    text = str(fn.trace({"x": Pair(A, B)}))
    assert "%p.x.a" in text and "result.b" in text
    compiled = fn.compile({"x": Pair(A, B)})
    assert_close(compiled({"x": Pair(B, A)}).a, B * 2)
    scaled = sf.jit(lambda q: q.bits * A, backend="aten")
    for bits in (4, 2):  # what a class says of itself is part of the signature
        out = scaled(Quantized(Q.numbers, Q.scale, bits))
        assert_close(out, bits * A)


def test_s3_1_modules() -> None:
    module = torch.nn.Linear(3, 3, bias=False).double()
    module.weight = torch.nn.Parameter(Q, requires_grad=False)
    fn, params, buffers = sf.functionalize(module)
    out = sf.jit(fn, backend="aten")(params, buffers, A)
    assert_close(out[0] if isinstance(out, tuple) else out, A @ QW.T)


@pytest.fixture
def mesh() -> Any:
    with sf.fake_world(2):
        yield sf.make_mesh((2,), ("dp",))


def test_s3_1_in_shard(mesh: Any) -> None:
    pair = Pair(A, B)
    placed = lambda x: sf.constrain(wave(x), P(None, "dp"))
    for fn, plain in ((wave, wave), (sf.grad(loss), torch.func.grad(loss)), (placed, wave)):
        out = sf.full(sf.shard(fn, mesh, P("dp"))(pair))
        assert isinstance(out, Pair)
        assert_close([out.a, out.b], [plain(A), plain(B)])
    each = {"a": P("dp"), "b": P(None, "dp")}
    out = sf.shard(lambda x: x * 2, mesh, (each,))(pair)
    assert (out.a.placements, out.b.placements) == ((Shard(0),), (Shard(1),))
    split = {"numbers": P("dp"), "scale": P()}
    out = sf.shard(linear, mesh, (P("dp"), split))(A, Q)
    assert_close(sf.full(out), A @ QW.T)


def test_s3_1_in_shard_map(mesh: Any) -> None:
    rows = Pair(A[:4], B[:4])
    out = sf.shard_map(lambda x: sf.psum(x, "dp"), mesh, P("dp"), P())(rows)
    assert_close(sf.full(out).b, B[:2] + B[2:4])
    out = sf.shard_map(linear, mesh, (P("dp"), P()), P("dp"))(A[:4], Q)
    assert_close(sf.full(out), A[:4] @ QW.T)


def test_s3_1_dtensors_inside_and_outside_of_them(mesh: Any) -> None:
    inside = sf.distribute(Pair(A, B), mesh, P("dp"))
    assert isinstance(inside, Pair) and inside.a.placements == (Shard(0),)
    outside = distribute_tensor(Pair(A, B), mesh, [Shard(0)])
    assert isinstance(outside, DTensor)
    for x in (inside, outside):
        for fn in (sf.jit(wave, backend="aten"), sf.shard(wave, mesh)):
            assert_close(sf.full(fn(x)).b, wave(B))
        gradient = sf.full(sf.grad(loss)(x))
        assert_close(gradient.b, torch.func.grad(loss)(B))
    assert_close(sf.full(inside).b, B)


def test_s3_1_in_the_code_of_one_rank(mesh: Any) -> None:
    def fn(x: Any, q: Any) -> Any:
        d = DTensor.from_local(x, mesh, [Shard(0)])
        return linear(d, DTensor.from_local(q, mesh, [Replicate()])), x * 2, q

    out, mine, same = sf.jit(fn, backend="aten")(SimulatedTensor([A, B]), Q)
    assert_close(sf.full(out), torch.cat([A, B]) @ QW.T)
    assert_close(mine.shards, [A * 2, B * 2])
    assert isinstance(same, Quantized)
    assert_close(same.scale.shards[1], Q.scale)


def _on_a_rank() -> Any:
    mesh = sf.make_mesh((2,), ("dp",))
    out = sf.shard(sf.grad(loss), mesh, P("dp"), backend="aten")(Pair(A, B))
    rows = sf.shard(linear, mesh, (P("dp"), P()), backend="aten")(A, Q)
    mine = [x[2 * mesh.get_rank() :][:2] for x in (A, B)]
    outside = DTensor.from_local(Pair(*mine), mesh, [Shard(0)])
    turned = sf.jit(wave, backend="aten")(outside)
    return [x.full_tensor() for x in (out.a, out.b, rows, turned.b)]


def test_s3_1_on_real_ranks() -> None:
    wanted = [torch.func.grad(loss)(x) for x in (A, B)]
    for found in run_ranks(2, _on_a_rank):
        assert_close(found, [*wanted, A @ QW.T, wave(B[:4])])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "made of what a derivative follows": (
        lambda: sf.grad(lambda x: Pair(x, x * 2).sum().a)(A),
        """grad(<lambda>): the function makes a Pair from tensors that are \
differentiated or mapped by vmap
  needed: one pure graph of tensor ops
  try: pass the Pair as an argument; or use its inner tensors directly""",
    ),
    "taken apart under a derivative": (
        lambda: sf.grad(lambda x: (x.a * 2).sum())(Pair(A, B)),
        """grad(<lambda>): a derivative or vmap applies to a Pair, and the function reads its .a
  needed: one pure graph of tensor ops
  try: read .a outside of the transform, and pass it as an argument""",
    ),
    "a followed carry": (
        lambda: sf.grad(lambda x, q: over_rows(x, q).sum())(A, Q),
        """scan: a derivative or vmap applies to a Quantized in the loop's carry
  try: pass the subclass's inner tensors as plain tensors, and build the subclass inside the \
body""",
    ),
    "one followed, one not": (
        lambda: sf.grad(lambda x: sf.map(lambda r: r * ROW, x).sum())(Pair(A, B)),
        """scan: inside the loop or branch, one Pair is differentiated or mapped by vmap, but \
another Pair is not
  try: pass the subclass's inner tensors as plain tensors, and build the subclass inside the \
body""",
    ),
    "rows that the class does not keep": (
        lambda: staged(lambda q: sf.map(lambda r: r * 2, q))(Q),
        """scan: a row of a Quantized does not consist of the rows of its inner tensors
  try: pass the subclass's inner tensors as plain tensors, and build the subclass inside the \
body""",
    ),
    "results that cannot be stacked": (
        lambda: staged(lambda x: sf.map(lambda r: Q, x))(A),
        """scan: a row of a Quantized does not consist of the rows of its inner tensors
  try: pass the subclass's inner tensors as plain tensors, and build the subclass inside the \
body""",
    ),
    "branches that say other things of themselves": (
        lambda: staged(
            lambda n, s: sf.cond(s > 9, lambda: Quantized(n, s, 4), lambda: Quantized(n, s, 2))
        )(Q.numbers, Q.scale),
        """cond: the function returns a Quantized(numbers, scale; {'bits': 4}) in one case, and \
a Quantized(numbers, scale; {'bits': 2}) in another
  try: return results of the same class in all cases""",
    ),
    "a carry of another class": (
        lambda: staged(
            lambda n, s: sf.while_loop(
                lambda c: c[0] < 3,
                lambda c: (c[0] + 1, Quantized(n, s, 2)),
                (torch.tensor(0), Quantized(n, s, 4)),
            )
        )(Q.numbers, Q.scale),
        """while_loop: the function returns a plain tensor, a Quantized(numbers, scale; {'bits': \
4}) in one case, and a plain tensor, a Quantized(numbers, scale; {'bits': 2}) in another
  try: return results of the same class in all cases""",
    ),
    "a gradient that would be lost": (
        lambda: sf.jit(wave)(Pair(A, B).requires_grad_()),
        """jit(wave), argument x: the argument requires grad, but autograd cannot differentiate \
this \
call
  try: differentiate inside the function with sf.grad and pass x.detach(); or call the function \
under torch.no_grad()""",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(sf.ShardError) as caught:
        call()
    assert without_line(caught.value) == text


def test_nested_tensors_are_refused() -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(sf.ShardError):
        staged(torch.sin)(nested)


def test_a_tensor_is_a_leaf_of_tree_map_whatever_was_called_before() -> None:
    class Other(Pair):
        pass

    for _ in range(2):
        named = sf.tree_map(lambda x: type(x).__name__, {"w": Other(A, B)})
        assert named == {"w": "Other"}
        out = staged(lambda p: sf.tree_map(lambda x: x * 2, p))({"w": Other(A, B)})
        assert_close(out["w"].b, B * 2)


def test_a_dtensor_of_tensors_of_another_shape(mesh: Any) -> None:
    x = DTensor.from_local(Q, mesh, [Replicate()])
    with pytest.raises(sf.TreeError, match="have other shapes than the"):
        sf.jit(lambda q: q)(x)
