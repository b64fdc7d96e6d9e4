"""The strategies of scaled dot-product attention, CPU and CUDA variants.

On one mesh axis it is sharded over the batch, over heads, or over queries with the keys gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from ....axis_options import GATHER, RING, ULYSSES
from ....types import AxisPlacement, MeshPlacements
from ... import layout
from ...rule_api.op_record import Op
from ...rule_api.strategy import Choice, OpCall, replicated
from .arguments import Factors, factors_in, factors_out, is_backward, mask_name, tensors_by_name
from .blocks import HEADS, QUERIES
from .gather import lower
from .ring import in_steps, sends

aten = torch.ops.aten
NAMES = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)
Units = Mapping[str, int]  # sharded factors, each with its unit
# The kernels that pad the rows of logsumexp to a multiple of this.
PADDED = tuple(
    getattr(aten, name).default for name in NAMES if "efficient" in name and hasattr(aten, name)
)
PADDED_TO = 32
CPU = tuple(getattr(aten, name).default for name in NAMES if "for_cpu" in name)


def attention(call: OpCall) -> list[Choice]:
    """Shard attention over batch, heads or queries, with grouped queries too."""
    mask = _mask(call)
    if call["dropout_p"] or (mask is not None and mask.dim() == 3):
        return [replicated(call)]
    ways: list[Units] = [{"b": 1}, *_by_heads(call), *_by_queries(call), *_by_ring(call)]
    return [replicated(call), *(_sharded(call, units) for units in ways)]


def _mask(call: OpCall) -> torch.Tensor | None:
    """Return the attention mask of a call; None without one."""
    name = mask_name(call.target)
    return None if name is None else call[name]


def _sharded(call: OpCall, units: Units) -> Choice:
    """Make the strategy that shards some factors. A gradient that lacks them is a Partial sum."""
    elsewhere = "sum" if is_backward(call.target) else "R"
    ins = tuple(_placement(row, units, "R") for row in factors_in(call))
    outs = tuple(_placement(row, units, elsewhere if row else "R") for row in factors_out(call))
    return ins, outs


def _placement(row: Factors, units: Units, otherwise: AxisPlacement) -> AxisPlacement:
    """Return the placement of a tensor whose dims are these factors."""
    sharded = (layout.joined(d, units[f]) for d, f in enumerate(row) if f and f in units)
    return next(sharded, otherwise)


def _by_heads(call: OpCall) -> list[Units]:
    """List the ways to shard heads: queries with their key heads; queries alone, where several
    share a key head.
    """
    tensors = tensors_by_name(call)
    heads, few = tensors["query"].shape[HEADS], tensors["key"].shape[HEADS]
    if heads == few:
        return [{"h": 1, "g": 1}]
    if not few or heads % few:
        return []
    grouped = {"h": heads // few, "g": 1}
    return [{"h": 1}] if few == 1 else [grouped, {"h": 1}]


def _by_queries(call: OpCall) -> list[Units]:
    """List the ways to shard the queries of each sequence; none if a kernel cannot run so."""
    tensors = tensors_by_name(call)
    queries, keys = tensors["query"].shape[QUERIES], tensors["key"].shape[QUERIES]
    is_masked = _mask(call) is not None
    if call["is_causal"] and (is_masked or (keys < queries and not _takes_mask(call))):
        return []
    if queries < 2 or not keys:
        return []
    unit = PADDED_TO if call.target in PADDED else 1
    return [] if queries % unit else [{"t": unit}]


def _by_ring(call: OpCall) -> list[Units]:
    """List the ways to shard queries and keys, which travel; none if a kernel cannot run so."""
    tensors = tensors_by_name(call)
    queries, keys = tensors["query"].shape[QUERIES], tensors["key"].shape[QUERIES]
    is_masked = _mask(call) is not None
    # kernels of CUDA do not say which queries a mask hides from all keys
    if (
        keys < 2
        or (call["is_causal"] and queries != keys)
        or (is_masked and call.target not in CPU)
    ):
        return []
    units = _by_queries(call)
    unit = units[0]["t"] if units and call["is_causal"] else 1
    return [{**way, "s": unit} for way in units]


def _takes_mask(call: OpCall) -> bool:
    """Return whether an op has a mask or bias argument."""
    return mask_name(call.target) is not None


def takes_strided(call: OpCall, choice: Choice) -> bool:
    """Return whether attention may run on strided shards: where it does not count rows or heads."""
    query, key = (choice[0][_index(call, name)] for name in ("query", "key"))
    dim = None if isinstance(query, str) else layout.dim_and_unit(query)[0]
    has_own_keys = not isinstance(key, str)
    if dim == QUERIES:  # a causal ring takes a zigzag, and `fits` refuses others
        return call["is_causal"] == has_own_keys
    return dim == 0 or (dim == HEADS and has_own_keys)


def fits(call: OpCall, ins: Sequence[MeshPlacements]) -> bool:
    """Return whether the strategies of several axes go together: where a rank counts its rows or
    heads, no axis may have a strided shard of them. An axis that shards the heads of queries alone
    comes after those that shard heads of both, so that a rank's queries are of its keys. Keys
    travel over one axis, and in causal attention over one that alone shards the queries, in plain
    chunks or as a zigzag.
    """
    query, key = (ins[_index(call, name)] for name in ("query", "key"))
    turns = [layout.is_zigzag(m) and layout.shards(m, QUERIES) for m in query]
    is_zigzag = call["is_causal"] and any(turns) and query[turns.index(True)] in key
    strided = {
        layout.dim_and_unit(m)[0]
        for m in (*query, *key)
        if not layout.is_plain(m) and not (is_zigzag and layout.is_zigzag(m))
    }
    pairs = zip(query, key, strict=True)
    has_heads = [layout.shards(k, HEADS) for q, k in pairs if layout.shards(q, HEADS)]
    lacks_heads = not all(has_heads)
    of_queries, of_keys = ([layout.shards(m, QUERIES) for m in ms] for ms in (query, key))
    counted = {HEADS} if lacks_heads else set()
    if call["is_causal"] or any(of_keys):
        counted.add(QUERIES)
    too_many = sum(of_keys) > 1 or (call["is_causal"] and any(of_keys) and sum(of_queries) > 1)
    is_nested = has_heads == sorted(has_heads, reverse=True)
    return is_nested and not too_many and not counted & strided


def gradients_of(call: OpCall) -> list[int | None]:
    """For each result of the backward, return the position of the input that it is the gradient
    of.
    """
    names = ("query", "key", "value", mask_name(call.target))
    present = tensors_by_name(call)
    places = [_index(call, name) if name and name in present else None for name in names]
    return places[: len(call.outs)]


def way_of(call: OpCall, choice: Choice) -> str | None:
    """Return the name of a strategy; None if it has none."""
    return way_by(*(choice[0][_index(call, name)] for name in ("query", "key")))


def way_by(query: AxisPlacement, key: AxisPlacement) -> str | None:
    """Return the name of the strategy that places queries and keys so; None if it has none."""
    if layout.shards(query, QUERIES):
        return RING if layout.shards(key, QUERIES) else GATHER
    return ULYSSES if layout.shards(query, HEADS) and layout.shards(key, HEADS) else None


def _index(call: OpCall, name: str) -> int:
    """Return the position of an argument among the tensors of a call."""
    return [*tensors_by_name(call)].index(name)


TABLE: dict[object, Op] = {
    target: Op(
        attention,
        lower=functools.partial(lower, target=target),
        strided_by=takes_strided,
        fits=fits,
        in_steps=in_steps,
        sends=sends,
        way_of=way_of,
        gradients_of=gradients_of if is_backward(target) else None,
        of_sizes=True,
    )
    for target in (getattr(aten, name).default for name in NAMES if hasattr(aten, name))
}
