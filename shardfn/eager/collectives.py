"""Collectives of torch.distributed that a script calls outside of functions, for all ranks of a
simulated world at once.

A plain tensor is the same on all ranks, and so must its new value be. A SimulatedTensor has a
value for each.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import _tree
from .._compat.distributed import eager_collectives as eager
from ..errors import FakeValueError, ShardError, call_site

Row = Sequence[torch.Tensor]  # the tensors of one rank
Values = list[list[torch.Tensor]]  # of each rank of a group
FIX = (
    "call the collective in a function under sf.jit; or pass the result of DTensor.to_local, "
    "which has a value for each rank"
)
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Call(NamedTuple):
    """One call of a collective in one group."""

    what: str  # for errors
    given: dict[str, Any]  # its arguments, by name
    count: int  # of the ranks of the group

    @property
    def root(self) -> int:
        """The rank in the group that sends or receives."""
        return int(self.given["root_rank" if "root_rank" in self.given else "src"])

    def reduced(self, tensors: Row) -> torch.Tensor:
        """Reduce the tensors of all ranks by the op of the call."""
        op = self.given["reduce_op"]
        kind = eager.reduction_name(op)
        if kind not in REDUCTIONS:
            names = ", ".join(REDUCTIONS)
            needed = f"one of {names}"
            fix = "use another reduction, with a product or quotient before or after it"
            got = f"op is {op}"
            raise ShardError.of(self.what, got, needed=needed, fix=fix)
        total = functools.reduce(REDUCTIONS[kind], tensors)
        if kind == "AVG":
            return total / self.count
        return total


def _columns(ins: Values) -> list[Row]:
    """Transpose the inputs of all ranks: the tensors of all ranks for each input."""
    return list(zip(*ins, strict=True))


def _reduced(call: Call, ins: Values) -> Values:
    total = [call.reduced(column) for column in _columns(ins)]
    return [total] * call.count


def _sent(call: Call, ins: Values) -> Values:
    row = ins[call.root]
    return [row] * call.count


def _gathered(call: Call, ins: Values) -> Values:
    """Concatenate each input over the ranks of the group."""
    row = []
    for column in _columns(ins):
        parts = [x.reshape(-1) for x in column]
        row.append(torch.cat(parts))
    return [row] * call.count


def _listed(call: Call, ins: Values) -> Values:
    every = list(itertools.chain(*ins))
    return [every] * call.count


def _of_root(call: Call, ins: Values) -> Values:
    rows: Values = [[] for _ in ins]
    rows[call.root] = list(itertools.chain(*ins))
    return rows


def _scattered(call: Call, ins: Values) -> Values:
    """Split each reduced input into a chunk per rank."""
    chunks = []
    for column in _columns(ins):
        total = call.reduced(column)
        chunks.append(list(total.reshape(-1).chunk(call.count)))
    return [list(row) for row in _columns(chunks)]


def _scattered_list(call: Call, ins: Values) -> Values:
    return [[call.reduced(column)] for column in _columns(ins)]


def _of_list(call: Call, ins: Values) -> Values:
    return [[x] for x in ins[call.root]]


def _exchanged_lists(call: Call, ins: Values) -> Values:
    return [list(column) for column in _columns(ins)]


def _exchanged(call: Call, ins: Values) -> Values:
    sizes = list(call.given.get("input_split_sizes") or ())
    parts = []
    for (x,) in ins:
        own = x.split(sizes) if sizes else x.chunk(call.count)
        parts.append(list(own))
    return [[torch.cat(list(column))] for column in _columns(parts)]


class Collective(NamedTuple):
    """How to simulate one c10d op: which arguments are outputs and inputs, and the values of the
    outputs.
    """

    outputs: str
    inputs: str
    values: Callable[[Call, Values], Values]


COLLECTIVES = {
    "allreduce_": Collective("tensors", "tensors", _reduced),
    "allreduce_coalesced_": Collective("tensors", "tensors", _reduced),
    # the other ranks may have anything
    "reduce_": Collective("tensors", "tensors", _reduced),
    "broadcast_": Collective("tensors", "tensors", _sent),
    "_allgather_base_": Collective("output_tensor", "input_tensor", _gathered),
    "allgather_into_tensor_coalesced_": Collective("outputs", "inputs", _gathered),
    "allgather_": Collective("output_tensors", "input_tensors", _listed),
    "allgather_coalesced_": Collective("output_lists", "input_list", _listed),
    "gather_": Collective("output_tensors", "input_tensors", _of_root),
    "scatter_": Collective("output_tensors", "input_tensors", _of_list),
    "_reduce_scatter_base_": Collective("output_tensor", "input_tensor", _scattered),
    "reduce_scatter_tensor_coalesced_": Collective("outputs", "inputs", _scattered),
    "reduce_scatter_": Collective("output_tensors", "input_tensors", _scattered_list),
    "alltoall_": Collective("output_tensors", "input_tensors", _exchanged_lists),
    "alltoall_base_": Collective("output", "input", _exchanged),
}
# the functional forms, of one tensor
FUNCTIONAL: dict[str, Callable[[Call, Values], Values]] = {
    "all_reduce": _reduced,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "broadcast": _sent,
}

OF_ONE_SHAPE = ("all_reduce", "broadcast")  # the result has the shape of the tensor
AS_IT_IS = ("wait_tensor", "_wrap_tensor_autograd")


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a c10d op for all simulated ranks.

    Raises:
        ShardError: ranks would have other values of a plain tensor, or it is sent to one rank.
    """
    given = eager.bound(op, args, kwargs)
    name = str(op).split(".")[1]
    what = f"torch.distributed, c10d.{name}"
    row = COLLECTIVES.get(name)
    if row is None:
        got = "the call sends a message between two ranks, which one process cannot send to itself"
        fix = "use collectives that all ranks call, or real processes under torchrun"
        raise ShardError.of(what, got, fix=fix, source=call_site())
    outputs = _flat(given[row.outputs])
    inputs = _flat(given[row.inputs])
    _refuse_absent_list(what, name, inputs)
    group = given["process_group"]
    with torch.no_grad():
        values = _of_all(what, row.values, group, given, inputs)
        written = {rank: new for rank, new in values.items() if new}
        for k, x in enumerate(outputs):
            own = {rank: new[k] for rank, new in written.items()}
            _write(what, x, own)
    return eager.returned(op, given[row.outputs])


def functional(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a functional collective on a SimulatedTensor."""
    name = str(op).split(".")[1]
    if name in AS_IT_IS:
        return x
    what = f"_c10d_functional.{name}"
    row = FUNCTIONAL.get(name.removesuffix("_"))
    if row is None:
        fix = "call the variant of this collective that takes one tensor; or call this collective "
        fix += "in a function under sf.jit"
        raise ShardError.of(what, "the collective is called on a simulated tensor", fix=fix)
    given = eager.bound(op, (x, *args), kwargs)
    with torch.no_grad():
        values = _of_all(what, row, given["group_name"], given, [x])
        made = {rank: new for rank, (new,) in values.items()}
        if name.endswith("_"):
            _write(what, x, made)
            return x
    shape = (-1, *x.shape[1:])
    if name in OF_ONE_SHAPE:
        shape = tuple(x.shape)
    shards = []
    for rank in sorted(made):
        own = made[rank].reshape(shape)
        shards.append(own.clone())
    ranks = sorted(made)
    at = x.shown if x.ranks is None else ranks.index(x.ranks[x.shown])
    return type(x)(shards, at, ranks=ranks)


def _of_all(
    what: str,
    values: Callable[[Call, Values], Values],
    group: Any,
    given: dict[str, Any],
    inputs: Row,
) -> dict[int, list[torch.Tensor]]:
    """Compute the outputs of each rank from the inputs of its group."""
    try:
        groups = eager.groups_like(group)
    except AssertionError:
        got = "the ranks of the group are not in ascending order"
        fix = "a mesh whose ranks ascend"
        raise ShardError.of(what, got, fix=fix) from None
    found: dict[int, list[torch.Tensor]] = {}
    for ranks in groups:
        call = Call(what, given, len(ranks))
        ins = []
        for rank in ranks:
            own = [_own(what, x, rank) for x in inputs]
            ins.append(own)
        outs = values(call, ins)
        found.update(zip(ranks, outs, strict=True))
    return found


def _own(what: str, x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return one rank's tensor of a SimulatedTensor."""
    shards = getattr(x, "shards", None)
    if shards is None:
        return x
    count = dist.get_world_size()
    if len(shards) != count:
        got = f"the tensor belongs to {len(shards)} ranks, but the world has {count}"
        fix = "redistribute or full_tensor of the DTensor"
        raise ShardError.of(what, got, fix=fix, source=call_site())
    return x.of_rank(rank)  # type: ignore[attr-defined]


def _write(what: str, x: torch.Tensor, values: dict[int, torch.Tensor]) -> None:
    """Write new values into a SimulatedTensor in place.

    Raises:
        ShardError: it is a plain tensor, and ranks have other values.
    """
    shards = getattr(x, "shards", None)
    if shards is not None:
        copies = {rank: new.clone() for rank, new in values.items()}
        for rank, new in copies.items():
            own = x.of_rank(rank)  # type: ignore[attr-defined]
            own.copy_(new.reshape(own.shape))
        return
    every = list(values.values())
    if not every:
        return
    first = every[0]
    if not all(_is_same(first, new) for new in every):
        got = "the result differs between ranks, but is written to a plain tensor"
        needed = "a result that is equal on all ranks, or a local tensor of a DTensor to write to: "
        needed += "in a simulated world, any other torch.Tensor has one value for all ranks"
        source = call_site()
        raise ShardError.of(what, got, needed=needed, fix=FIX, source=source)
    x.copy_(first.reshape(x.shape))


def refused(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a collective in a world that computes no values.

    Raises:
        FakeValueError: always.
    """
    fix = "fake_world(n, numerics=True) computes true values; sf.distribute and sf.from_local "
    fix += "make DTensors without any"
    name = str(op).split(".")[1].strip("_")
    raise FakeValueError.of(
        f"torch.distributed, {name}",
        "the collective needs values, but a world with numerics=False has no values",
        fix=fix,
        source=call_site(),
    )


def _refuse_absent_list(what: str, name: str, inputs: Row) -> None:
    """Refuse a list that only another rank than the shown one gives."""
    if name == "scatter_" and not inputs:
        got = "the list of tensors is passed only on another rank, but this fake world runs the "
        got += "code of one rank only"
        fix = "pass the list on all ranks, or use fake_world(n, rank=src)"
        raise ShardError.of(what, got, fix=fix, source=call_site())


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, nan equal to nan."""
    if a is b:
        return True
    are_nan = a.isnan() & b.isnan()
    are_same = (a == b) | are_nan
    return bool(are_same.all())


def _flat(x: Any) -> list[torch.Tensor]:
    return _tree.leaves(x)
