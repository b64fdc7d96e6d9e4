"""Every row of the table of causes has a program that reaches it, when it is the only one."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import P, _compat
from shardfn.capture.refusals import data_dependent, torch_errors

X = torch.arange(6.0, dtype=torch.float64)
W = torch.ones(6, dtype=torch.float64)
LEAF = torch.ones(6, dtype=torch.float64, requires_grad=True)
SETTING = contextvars.ContextVar("setting", default=1.0)
WITH_GRADIENT = torch.ones(6, dtype=torch.float64)
WITH_GRADIENT.grad = torch.ones(6, dtype=torch.float64)
SPARSE = torch.eye(6, dtype=torch.float64).to_sparse_bsr((2, 2))
SEEN: dict[str, Any] = {}
KEPT: list[Any] = []
OF_NUMPY, OLD = np.random.default_rng(0), np.random.RandomState(0)
NORM, LAZY = nn.BatchNorm1d(6).double(), nn.LazyLinear(3)
MOVING = nn.SyncBatchNorm(3).double()
SYNCHRONIZED = nn.SyncBatchNorm(3, momentum=None).double()
HOOKED = nn.Linear(6, 6).double()
HOOKED.register_backward_hook(lambda *_: None)


@torch.library.custom_op("rows_of_causes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("rows_of_causes::first", mutates_args=())
def first(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0] * 2


twice.register_fake(torch.empty_like)
first.register_fake(lambda xs: torch.empty_like(xs[0]))


def followed_in_inference() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = x.reshape(2, 3)
        return y if y.requires_grad else 2 * y

    with torch.no_grad():
        sf.jit(fn, backend="aten")(LEAF)


def dual(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, W).sin()).tangent


class OfValues(nn.modules.lazy.LazyModuleMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.UninitializedParameter()

    def initialize_parameters(self, x: Any) -> None:
        with torch.no_grad():
            self.w.materialize((1,))
            self.w.fill_(x.mean().item())

    def forward(self, x: Any) -> Any:
        return x * self.w


class Ranked(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * torch.distributed.get_rank()


class Distributing(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: Any) -> Any:
        return distribute_tensor(x, self.mesh, [Shard(0)]).to_local()


class Slope(nn.Module):
    """Its result is the slope of a function of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        x = x.clone().requires_grad_()
        value = (x * self.weight).sin().sum()
        return torch.autograd.grad(value, x, create_graph=True)[0].sum()


def penalized(x: torch.Tensor) -> None:
    fn, params, buffers = sf.functionalize(Slope())
    sf.grad(lambda params: fn(params, buffers, x)[0])(params)


class Storing(nn.Module):
    def forward(self, x: Any) -> Any:
        SEEN["x"] = x
        return x


def stored(x: Any) -> Any:
    sf.functionalize(Storing())[0]({}, {}, x)
    return sf.grad(lambda w: (w * SEEN["x"].sum()).sum())(x)


def summed(x: Any) -> Any:
    y = (x * x).sum()
    y.backward()
    return x.grad


def written(x: Any) -> Any:
    y = x.exp()
    z = y * y
    y.mul_(2)
    return z.sum()


def with_gaps(x: Any) -> Any:
    y = torch.zeros(6, 2, dtype=x.dtype)
    torch.add(x, x, out=y[:, 1])
    return y


def loops(x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        SEEN["carry"] = carry
        return carry * 2, None

    return sf.scan(body, x, length=2)[0]


def branches(x: Any) -> Any:
    op = torch.ops.higher_order.cond
    return op(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)).sum()


def cached(x: torch.Tensor) -> torch.Tensor:
    with torch.nn.utils.parametrize.cached():
        return x * 2


def raw(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: torch.func.grad(fn)(x)


class OfData(torch.autograd.Function):
    """A function that reads .data, which Dynamo does not read."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


jit = lambda fn: lambda: sf.jit(fn, backend="aten")(X.clone())
ARRAY = np.ones(6)
PROGRAMS: dict[str, Callable[[], Any]] = {
    _compat.NO_DERIVATIVE: jit(lambda x: sf.grad(lambda y: twice(y).sum())(x)),
    "HigherOrderOperator custom_function_call": lambda: sf.grad(lambda x: first([x]).sum())(X),
    "side effects happened": jit(KEPT.append),
    "Data-dependent branching": jit(lambda x: x if x.sum() > 0 else 2 * x),
    _compat.WITHOUT_SHAPE: jit(lambda x: x * LAZY.weight),
    _compat.WITHOUT_VALUES: jit(OfValues()),
    "Tensor subclass Uninitialized": lambda: sf.init(
        lambda: nn.LazyLinear(2), sf.make_mesh((2,), ("a",)), P(), sf.random.key(0)
    ),
    "accessing `data` under vmap": jit(sf.vmap(lambda x: OfData.apply(x))),
    "Attempted to copy.deepcopy a tensor": jit(lambda x: copy.deepcopy(x)),
    "'dst' must be an array": jit(lambda x: np.copyto(ARRAY, ARRAY) or x),
    "'a' must be an array": jit(lambda x: np.put(ARRAY, [0], [1.0]) or x),
    "to be on the same device": jit(lambda x: x + torch.ones(6, device="meta")),
    _compat.MAKES_DTENSOR: lambda: sf.functionalize(Distributing(sf.make_mesh((2,), ("a",))))[0](
        {}, {}, X
    ),
    _compat.ASKS_RANK: lambda: sf.functionalize(Ranked())[0]({}, {}, X),
    "_cache_enabled": jit(cached),
    _compat.SYNCS_ON_CPU: jit(lambda x: MOVING(x.reshape(2, 3))),
    _compat.COUNTS_BATCHES: jit(lambda x: SYNCHRONIZED(x.reshape(2, 3))),
    _compat.READS_GENERATOR: jit(lambda x: x.cauchy_(generator=torch.default_generator)),
    "torch.Generator method": jit(lambda x: x * torch.default_generator.initial_seed()),
    "of class `Generator`": jit(lambda x: x * OF_NUMPY.random()),
    "of class `RandomState`": jit(lambda x: x * OLD.rand()),
    _compat.READS_ARGUMENT: lambda: sf.jit(lambda x: x * x.grad, backend="aten")(WITH_GRADIENT),
    _compat.READS_FLAG: followed_in_inference,
    _compat.READS_VERSION: jit(lambda x: x.clone().add_(1) * x._version),
    _compat.READS_CONTEXT: jit(lambda x: x * SETTING.get()),
    "trace_autograd_ops": jit(summed),
    "Unsupported Tensor.requires_grad_() call": jit(lambda x: LEAF.requires_grad_(False) * x),
    "setattr() on Tensor.requires_grad": jit(lambda x: setattr(LEAF, "requires_grad", False) or x),
    "Trying to access a forward AD level": jit(dual),
    "to return a scalar": jit(raw(lambda y: y * 2)),
    "<TransformType": jit(raw(branches)),
    "differentiated Tensors does not require grad": lambda: penalized(torch.ones(3)),
    "floating point dtype can require": jit(lambda x: raw(lambda y: (y * 2).sum())(x.long())),
    "Thing passed to transform API must be Tensor": jit(lambda x: raw(lambda y: x.sum() * y)(3.0)),
    "an inplace view on a graph input": jit(lambda x: x.unsqueeze_(0)),
    "_distributed.Shard(dim": jit(lambda x: sf.constrain(x, [Shard("a")])),
    "_distributed.Partial(reduce_op": jit(lambda x: sf.constrain(x, [Partial(3)])),
    "_distributed.Replicate()": jit(lambda x: Replicate(1) and x),
    "Shape mismatch with out=": jit(lambda x: torch.add(x, x, out=torch.empty(3, dtype=x.dtype))),
    "with non-contiguous `out=`": jit(with_gaps),
    "Tensor with grad_fn()": lambda: sf.grad(lambda x: HOOKED(x).sum())(X),
    "opaque object was created": jit(lambda x: x * torch.Generator().seed()),
    "of class `LeakedTensor`": lambda: stored(X),
    "can not return a BatchedTensor when out_dim is None": jit(
        lambda x: sf.vmap(lambda y: y * 2, out_axes=None)(x)
    ),
    "modified by an inplace operation": jit(raw(written)),
    "mutate a captured Tensor": jit(lambda x: sf.grad(lambda y: (W.mul_(2) * y).sum())(x)),
    "Batch norm got a batched tensor": jit(lambda x: sf.vmap(NORM)(torch.ones(3, 5, 6) * x)),
    "HOP: Unsafe side effect": jit(loops),
    "a leaf Variable that requires grad is being used in an in-place": jit(lambda x: LEAF.add_(x)),
    "not support sparse Tensors": jit(lambda x: SPARSE @ x),
    "in extra_args that has more elements": jit(
        lambda x: sf.vmap(lambda y: torch.zeros(3, dtype=y.dtype).mul_(y))(x)
    ),
    "Tensor.resize_()": jit(lambda x: x.clone().resize_(3)),
    "Tensor.resize_as_()": jit(lambda x: x.clone().resize_as_(x[:2])),
}


def test_every_row_has_a_program() -> None:
    assert {row[0] for row in torch_errors.CAUSES} == PROGRAMS.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", torch_errors.CAUSES, ids=lambda row: row[0])
def test_a_program_reaches_each_row(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_errors, "CAUSES", (row,))
    with sf.fake_world(2), pytest.raises(sf.CaptureError) as caught:
        PROGRAMS[row[0]]()
    said = str(caught.value)
    assert row[1].partition("{")[0] in said.splitlines()[0]
    assert said.endswith(f"try: {row[2]}")


in_vmap = lambda fn: jit(lambda x: sf.vmap(fn)(x.reshape(2, 3)))
EQUAL = lambda x: x if torch.equal(x, x + 1) else 2 * x
SIGNED: dict[str, Callable[[], Any]] = {
    "Data dependent operator": jit(EQUAL),
    "Dynamic shape operator": jit(
        lambda x: torch.ctc_loss(
            x.reshape(2, 1, 3), x.long()[:1].reshape(1, 1), x.long()[1:2], x.long()[1:2]
        )
    ),
    "data-dependent output shape": jit(lambda x: torch.nn.functional.one_hot(x.long())),
    "tolist()` on non-integer": jit(lambda x: x * x.tolist()[0]),
    "calling .item() on a Tensor": in_vmap(lambda x: x * x.sum().item()),
    "operators that can output dynamic shape": in_vmap(torch.nonzero),
    "operators that can support dynamic shape": in_vmap(lambda x: x[x > 0]),
    "Attempted to vmap over `mask` in torch.masked_select": in_vmap(
        lambda x: torch.masked_select(x, x > 0)
    ),
    "Batching rule not implemented for aten::equal": in_vmap(EQUAL),
    "data is not allocated yet": jit(lambda x: x * float(np.asarray(x)[0])),
    "Cannot access data pointer of Tensor that doesn't have storage": jit(
        sf.grad(lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[0].sum())
    ),
    "(Size-like symbols: u": jit(lambda x: x if len(x[x > 0]) == 2 else x.sin()),
    "Could not guard on data-dependent expression": jit(lambda x: bool(x.sum()) and x),
    "Could not extract specialized integer": jit(lambda x: torch.ones(int(x.sum()))),
    "raised exception KeyError(Tensor(": jit(lambda x: x * {1: 2}[x.sum()]),
    "operator `range` with argument types ['Tensor'": jit(lambda x: [x for _ in range(x.sum())]),
}


# signs of torch 2.15, each in place of one of torch 2.13
LATER = {
    "(Size-like symbols: u": "Pending unbacked symbols",
    "Could not extract specialized integer": (
        "DelayGraphBreakVariable() does not implement python_type()"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sign", SIGNED)
def test_a_program_has_each_sign_of_a_value(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = data_dependent.cause_of_error
    spy = lambda error, text: said.append(text) or real(error, text)
    monkeypatch.setattr(data_dependent, "cause_of_error", spy)
    with pytest.raises(sf.CaptureError) as caught:
        SIGNED[sign]()
    signs = sign, LATER.get(sign, sign)
    assert any(sign in text for sign in signs for text in said), (said[:3], str(caught.value))
    rows = (
        *data_dependent.FUNCTIONS.values(),
        ("the function branches on", ""),
        ("the function uses", ""),
    )
    rows = (*rows, ("the shape of an op's result", ""))
    starts = {row[0].format(what=row[1]) for row in rows}
    assert any(f": {start}" in str(caught.value).splitlines()[0] for start in starts)


def test_every_sign_has_a_program() -> None:
    assert {row[0] for row in data_dependent.SIGNS} == SIGNED.keys() | {*LATER.values()}
