"""Programs that cannot be captured, one for each cause: each is refused for its own."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._utils import wrapper_set_seed

import shardfn as sf
from shardfn import P, _compat
from shardfn.capture.refusals import data_dependent, torch_errors

X = torch.arange(6.0, dtype=torch.float64)
GENERATOR = "it reads or seeds a generator of random numbers"
CHANGES = "it changes something outside of itself: "
VALUE = "it branches on a tensor's value"
COUNT = 0
SEEN: dict[str, Any] = {}
LOG: list[Any] = []
OF_NUMPY = np.random.default_rng(0)


class Keeps(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        self.last = x * 2
        return self.last


class Holder:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __call__(self, x: Any) -> Any:
        self.seen["x"] = x
        return x


NET, HELD = torch.nn.Sequential(Keeps()), Holder()
HOOKED = torch.nn.Identity()
HOOKED.register_forward_hook(lambda _, given, out: SEEN.__setitem__("out", out))


def counts(x: Any) -> Any:
    global COUNT  # noqa: PLW0603
    COUNT = x
    return x


def seeds(x: Any) -> Any:
    np.random.seed(0)
    return x + 1


def logs(x: Any) -> Any:
    LOG.append(x)
    return x


def closed_over() -> Callable[[Any], Any]:
    inner = Keeps()
    return lambda x: inner(x)


def forks(x: Any) -> Any:
    with torch.random.fork_rng():
        return x + torch.rand(())


def branches_on_its_step(x: Any) -> Any:
    rank = sf.axis_index("dp")
    return sf.scan(lambda c, t: (2 * c if t > 1 else c, c), x + rank, torch.arange(3))[0]


def branches_beside_a_rank(x: Any) -> Any:
    rank = sf.axis_index("dp")
    return x + rank if x.sum() > 0 else x


def branches_on_a_rank(x: Any) -> Any:
    rank = sf.axis_index("dp") + 1
    return x if rank > 1 else 2 * x


PROGRAMS = {
    "a generator": (lambda x: x.cauchy_(generator=torch.default_generator), GENERATOR),
    "torch's tests": (lambda x: wrapper_set_seed(torch.sin, x), GENERATOR),
    "fork_rng": (forks, GENERATOR),
    "a number of numpy": (lambda x: x * np.random.rand(), GENERATOR),
    "a branch on one": (lambda x: x if np.random.rand() > 0.5 else 2 * x, GENERATOR),
    "an index of numpy": (lambda x: x[np.random.randint(3)], GENERATOR),
    "an array of numpy": (lambda x: x + torch.from_numpy(np.random.randn(6)), GENERATOR),
    "a generator of numpy": (lambda x: x * OF_NUMPY.random(), GENERATOR),
    "a seed of numpy": (seeds, GENERATOR),
    "a global": (counts, CHANGES + "COUNT"),
    "a list": (logs, CHANGES + "LOG"),
    "a branch": (lambda x: x if x.sum() > 0 else 2 * x, VALUE),
}
# what a function may store, but not under vmap
STORED = {
    "a hook": (lambda x: HOOKED(x), "SEEN['out']"),
    "a part of a module": (lambda x: NET(x), "NET.0.last"),
    "of what is closed over": (closed_over(), "inner.last"),
    "of the object itself": (HELD, "Holder.seen['x']"),
}
# each function whose result's shape depends on values, or that reads one -> a program
OF_VALUES: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 1)[0],
    "getitem": lambda x: x[x > 1],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tensor_split": lambda x: x.tensor_split(x.long())[0],
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "_ctc_loss": lambda x: torch.nn.functional.ctc_loss(
        x.reshape(2, 1, 3), x[:1].long().reshape(1, 1), x[1:2].long(), x[1:2].long()
    ),
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.tolist()[1],
    "equal": lambda x: x if torch.equal(x, x + 1) else 2 * x,
    "allclose": lambda x: x if torch.allclose(x, x + 1) else 2 * x,
}
OF_RANKS = {
    branches_on_its_step: VALUE,
    branches_beside_a_rank: VALUE,
    branches_on_a_rank: "it branches on the number of a rank, or slices by it",
}


@torch.library.custom_op("test_causes::of_list", mutates_args=())
def of_list(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0] * 2


@torch.library.custom_op("test_causes::of_one", mutates_args=())
def of_one(x: torch.Tensor) -> torch.Tensor:
    return x * 2


of_list.register_fake(lambda xs: torch.empty_like(xs[0]))
of_one.register_fake(torch.empty_like)
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LEGACY = np.random.RandomState(0)
LAZY = torch.nn.LazyLinear(3)
FOLLOWED = torch.ones(6, dtype=torch.float64, requires_grad=True)
BUFFER = torch.zeros(6, dtype=torch.float64)
NORM = torch.nn.BatchNorm1d(3).double()
DRAW = torch.default_generator


def writes_what_a_derivative_reads(x: Any) -> Any:
    y = x.exp()
    z = y * y
    y.mul_(2)
    return z.sum()


def strided_out(x: Any) -> Any:
    y = torch.empty(6, 3, dtype=x.dtype)
    torch.add(x, x, out=y[:, 1])
    return y


def scans(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: sf.scan(lambda c, _: (body(c), None), x, length=2)[0]


def jit(fn: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: sf.jit(fn, backend="aten")(X)


def grad(fn: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: sf.grad(lambda x: fn(x).sum())(X)


# torch's text in a row of the table -> a program
ROWS: dict[str, Callable[[], Any]] = {
    _compat.NO_DERIVATIVE: grad(lambda x: of_one(x)),
    "HigherOrderOperator custom_function_call": grad(lambda x: of_list([x])),
    "side effects happened": jit(logs),
    "Data-dependent branching": jit(lambda x: x if x.sum() > 0 else 2 * x),
    _compat.MAKES_DTENSOR: jit(lambda x: sf.distribute(x, None, P())),
    _compat.WITHOUT_SHAPE: jit(lambda x: x * LAZY.weight.sum()),
    "to be on the same device": jit(lambda x: x + torch.ones(6, device="meta")),
    _compat.READS_GENERATOR: jit(lambda x: x.cauchy_(generator=DRAW)),
    "torch.Generator method": jit(lambda x: x * DRAW.initial_seed()),
    "of class `Generator`": jit(lambda x: x * OF_NUMPY.random()),
    "of class `RandomState`": jit(lambda x: x * LEGACY.rand()),
    _compat.READS_CONTEXT: jit(lambda x: x * CONTEXT.get()),
    "trace_autograd_ops": lambda: sf.jit(lambda x: (x.sum().backward(), x)[1])(
        X.clone().requires_grad_()
    ),
    "to return a scalar": jit(lambda x: torch.func.grad(lambda y: y * 2)(x)),
    "floating point dtype can require": lambda: sf.jit(
        lambda x: torch.func.grad(lambda i: (i * 2.0).sum())(x)
    )(X.long()),
    "Thing passed to transform API must be Tensor": jit(
        lambda x: torch.func.grad(lambda i: (i * x).sum())(3.0)
    ),
    "an inplace view on a graph input": jit(lambda x: x.unsqueeze_(0)),
    "_distributed.Shard(dim": jit(lambda x: (sf.Shard("a"), x)[1]),
    "_distributed.Partial(reduce_op": jit(lambda x: (sf.Partial(3), x)[1]),
    "_distributed.Replicate()": jit(lambda x: (sf.Replicate(3), x)[1]),
    "Shape mismatch with out=": jit(lambda x: torch.add(x, x, out=torch.empty(3, dtype=x.dtype))),
    "with non-contiguous `out=`": jit(strided_out),
    "Tensor with grad_fn()": jit(lambda x: (FOLLOWED.exp().grad_fn.name(), x)[1]),
    "opaque object was created": jit(lambda x: x + torch.rand(6, generator=torch.Generator())),
    "can not return a BatchedTensor when out_dim is None": lambda: sf.vmap(
        lambda x: x * 2, out_axes=None
    )(X),
    "modified by an inplace operation": grad(writes_what_a_derivative_reads),
    "mutate a captured Tensor": grad(lambda x: (BUFFER.add_(x), x)[1]),
    "Batch norm got a batched tensor": lambda: sf.vmap(lambda x: NORM(x))(
        torch.ones(2, 4, 3, dtype=torch.float64)
    ),
    "HOP: Unsafe side effect": jit(scans(lambda c: (setattr(NORM, "last", c), c)[1])),
    "a leaf Variable that requires grad is being used in an in-place": jit(
        lambda x: (FOLLOWED.add_(x), x)[1]
    ),
    "not support sparse Tensors": jit(lambda x: x.to_sparse().to_dense()),
    "sparse_coo_tensor": jit(
        lambda x: torch.sparse_coo_tensor(torch.zeros(1, 6, dtype=torch.long), x, (6,))
    ),
    "Tensor.resize_()": jit(lambda x: x.clone().resize_(3)),
}
# rows with a program in another test
ELSEWHERE = {
    _compat.WITHOUT_VALUES: "laws/test_lazy_modules.py",
    "Tensor subclass Uninitialized": "laws/test_lazy_modules.py",
    _compat.ASKS_RANK: "capture/modules/test_module_call.py",
    "<TransformType": "transforms/test_bad_input.py",
    "of class `LeakedTensor`": "capture/refusals/test_leaked_values.py",
}


def test_each_row_of_torchs_texts_has_a_program() -> None:
    signs = [sign for sign, *_ in torch_errors.CAUSES]
    assert sorted([*ROWS, *ELSEWHERE]) == sorted(signs)


@pytest.mark.parametrize("sign", ROWS)
def test_a_row_says_the_cause_of_its_program(sign: str) -> None:
    got, fix = next((got, fix) for row, got, fix in torch_errors.CAUSES if row == sign)
    with pytest.raises(sf.CaptureError) as caught:
        ROWS[sign]()
    first, *_, last = str(caught.value).splitlines()
    assert got.split("{")[0] in first
    assert last == f"  try: {fix}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_refused_for_its_own_cause(name: str) -> None:
    fn, cause = PROGRAMS[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {cause}")


@pytest.mark.parametrize("fn", OF_RANKS)
def test_what_is_not_the_number_of_a_rank_is_not_called_one(fn: Any) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        mapped = sf.shard_map(fn, mesh=mesh, in_placements=P("dp"), out_placements=P("dp"))
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(mapped, backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {OF_RANKS[fn]}")


@pytest.mark.parametrize("name", STORED)
def test_what_a_vmap_stores_is_refused_with_its_place(name: str) -> None:
    fn, place = STORED[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(sf.vmap(fn), backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {CHANGES}{place}")


def test_each_row_has_a_program() -> None:
    assert OF_VALUES.keys() == data_dependent.FUNCTIONS.keys()


@pytest.mark.parametrize("name", OF_VALUES)
def test_what_depends_on_values_is_refused_by_its_row(name: str) -> None:
    problem, said, fix = data_dependent.FUNCTIONS[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(OF_VALUES[name], backend="aten")(X)
    first, *_, last = str(caught.value).splitlines()
    assert first == f"jit(<lambda>): {problem.format(what=said)}"
    assert last == f"  try: {fix}"
