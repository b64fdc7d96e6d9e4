"""The prims of shard_map (per-rank code), one row each: entry and exit, and the collectives
inside, right under every transform.

A value inside is the same on all ranks of an axis (invariant) or each rank's own (varying);
`capture/shard_map/varying.py` infers which. All of these but `extremum` are linear, so each has a
transpose (below the rows), and none is its own guess: an invariant value that a rank uses passes
`vary`, whose transpose is the sum; the transpose of a sum sends nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat
from ..errors import CaptureError
from .prims import implement, named_axes, one_axis, prim, sharding_axes, uncaptured
from .text_formats import parse_pairs, parse_sized_shards, print_pairs, print_sized_shards


def _batched_shards(text: str) -> str:
    """Shift the sharded dims of a text by one, for a tensor with one more dim in front."""
    return print_sized_shards(
        [
            (name, n, None if dim is None else dim + 1, sizes)
            for name, n, dim, sizes in parse_sized_shards(text)
        ]
    )


def _reversed_pairs(perm: str) -> str:
    """Swap source and destination in each pair of ranks."""
    return print_pairs([(b, a) for a, b in parse_pairs(perm)])


def _empty_resized(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """Return an empty tensor like x with other sizes, in the same order of dims in memory."""
    shape = [sizes.get(d, n) for d, n in enumerate(x.shape)]
    stride = [1] * len(shape)
    step = 1
    for d in sorted(range(len(shape)), key=lambda d: (x.stride(d), -d)):
        stride[d] = step
        step *= max(shape[d], 1)
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)


@prim(
    name="prim_to_local",
    axes=sharding_axes,
    takes_varying=False,
    gives_varying=True,
    batched=lambda text: (_batched_shards(text),),
    public="shard_map",
)
def to_local(x: torch.Tensor, shards: str) -> torch.Tensor:
    """Return a rank's local tensor of a global one."""
    sizes = dict(enumerate(x.shape))
    for _, n, dim, uneven in parse_sized_shards(shards):
        if dim is not None:
            sizes[dim] = uneven[0] if uneven else sizes[dim] // n
    return _empty_resized(x, sizes)


@prim(
    name="prim_from_local",
    axes=sharding_axes,
    takes_varying=True,
    gives_varying=False,
    batched=lambda text: (_batched_shards(text),),
    public="shard_map",
)
def from_local(x: torch.Tensor, shards: str, *, where: str = "") -> torch.Tensor:
    """Build the global tensor of the ranks' local ones; `where` names the result in errors."""
    sizes = dict(enumerate(x.shape))
    for _, n, dim, uneven in reversed(parse_sized_shards(shards)):
        if dim is not None:
            sizes[dim] = uneven[1] if uneven else sizes[dim] * n
    return _empty_resized(x, sizes)


@prim(axes=named_axes, takes_varying=False, gives_varying=True, communicates=False)
def vary(x: torch.Tensor, axes: str, *, where: str = "") -> torch.Tensor:
    """Return an invariant value as a varying one, whose gradient is summed over ranks; `where` is
    the user's line.
    """
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=False, gives_varying=True, communicates=False)
def vary_equal(x: torch.Tensor, axes: str) -> torch.Tensor:
    """Return an invariant value as a varying one, whose gradient is declared equal on all ranks."""
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=False, gives_varying=False, communicates=False)
def as_equal(x: torch.Tensor, axes: str) -> torch.Tensor:
    """Return a cotangent that the code declares equal on all ranks."""
    return torch.empty_like(x)


RESULT = "jit: result"  # `where` of each rank's own result
COUNTS_OF_ALL = "ragged_all_to_all, send_counts"  # `where` of a matrix that all ranks must have

# why a gradient is refused, as `undecided` says: what has happened, what is needed, what to write
UNDECIDED = "unsaid"
SUMMED = "summed"
CONTRADICTED = "contradicted"
REFUSALS = {
    UNDECIDED: (
        "DTensor.to_local",
        "a value that is equal on all ranks of {} is combined with plain tensors, which may "
        "differ between ranks, and is differentiated",
        "grad_placements of to_local, which say whether all ranks compute equal gradients, or "
        "each rank computes one term of a sum",
        "to_local or full_tensor with grad_placements=[Replicate()] if all ranks compute the "
        "same from the value, or [Partial()] to sum over ranks. For the result y of a module "
        "of parallelize_module: RowwiseParallel(use_local_output=False), and "
        "y.to_local(grad_placements=[Replicate()])",
    ),
    SUMMED: (
        "DTensor.from_local",
        "a replicated DTensor is made from values that may differ between ranks of {}: the "
        "gradient of the DTensor is one gradient for all ranks, but the gradients of the values "
        "of the ranks are summed over the ranks",
        "a value that the code makes equal on all ranks",
        "DTensor.from_local(x, mesh, [Replicate()]).to_local() of each plain tensor x that is "
        "equal on all ranks; or call to_local twice, with grad_placements=[Replicate()] for "
        "the value that becomes a replicated DTensor",
    ),
    CONTRADICTED: (
        "DTensor.to_local, grad_placements",
        "grad_placements states an equal gradient on all ranks of {}, but the value is "
        "combined with values that differ between ranks",
        "grad_placements for terms of a sum",
        "to_local(grad_placements=[Partial()])",
    ),
}


def _refuse_cotangent(g: torch.Tensor, axes: str, why: str, source: str) -> torch.Tensor:
    """Refuse a cotangent whose meaning (equal or terms of a sum) is undecided.

    Raises:
        CaptureError: always.
    """
    name, got, needed, fix = REFUSALS[why]
    axes = axes.replace(",", ", ")
    raise CaptureError.of(name, got.format(axes), needed=needed, fix=fix, source=source or None)


@prim(axes=named_axes, takes_varying=True, gives_varying=True, communicates=False)
def undecided(x: torch.Tensor, axes: str, why: str, source: str) -> torch.Tensor:
    """Return a value whose cotangent is refused, with the user's line: the code does not say
    whether ranks have equal gradients or terms of a sum, or it says both.
    """
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=True, gives_varying=True, communicates=False)
def vary_in_value(x: torch.Tensor, axes: str) -> torch.Tensor:
    """Return a value that an op with another size on each rank has made: it really differs between
    ranks.
    """
    return torch.empty_like(x)


def _tangent_of_term(t: Any, x: Any, y: Any, axes: str, kind: str) -> torch.Tensor:
    return own_term(t, axes, kind)


def _cotangent_of_term(g: Any, x: Any, y: Any, axes: str, kind: str) -> torch.Tensor:
    return no_cotangent(g, axes)


@prim(
    axes=named_axes,
    takes_varying=False,
    gives_varying=True,
    jvp=_tangent_of_term,
    vjp=_cotangent_of_term,
    public="DTensor.to_local",
)
def own_term(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """Return a rank's term of a Partial value. The ops that made the value decide which term."""
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=True, gives_varying=False, communicates=False)
def no_cotangent(x: torch.Tensor, axes: str) -> torch.Tensor:
    """Return the cotangent of a Partial value from that of its terms, which does not determine it.
    Capture may remove it with the term (capture/dtensors/partial_terms.py); else it is refused.
    """
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=False, gives_varying=False, communicates=False)
def as_invariant(x: torch.Tensor, axes: str, *, where: str = "") -> torch.Tensor:
    """Return a varying value that is equal on all ranks as an invariant one. With `where`, the
    call that takes it, a value that really varies is refused.
    """
    return torch.empty_like(x)


@prim(axes=named_axes, takes_varying=True, gives_varying=False)
def psum(x: torch.Tensor, axes: str, pending: bool) -> torch.Tensor:
    """Return the sum over the ranks of some axes; `pending` leaves it Partial."""
    return torch.empty_like(x)


def _extremum_shares(x: torch.Tensor, largest: torch.Tensor, axes: str) -> torch.Tensor:
    """Return each rank's share of the derivative of an extremum: equal shares for the ranks that
    hold it, as in torch.amax.
    """
    holds = (x == vary(largest, axes)).to(x.dtype)
    return holds / vary(psum(holds, axes, False), axes)


@prim(
    axes=named_axes,
    takes_varying=True,
    gives_varying=False,
    jvp=lambda t, x, y, axes, _: psum(t * _extremum_shares(x, y, axes), axes, False),
    vjp=lambda g, x, y, axes, _: vary(g, axes) * _extremum_shares(x, y, axes),
    public="pmax or pmin",
)
def extremum(x: torch.Tensor, axes: str, kind: str) -> torch.Tensor:
    """Return the max or min over the ranks of some axes."""
    return torch.empty_like(x)


@prim(
    axes=one_axis,
    takes_varying=True,
    gives_varying=False,
    batched=lambda axis, n, dim: (axis, n, dim + 1),
)
def all_gather(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """Concatenate the values of all ranks along a dim."""
    return _empty_resized(x, {dim: x.shape[dim] * n})


@prim(
    axes=one_axis,
    takes_varying=False,
    gives_varying=True,
    batched=lambda axis, n, dim: (axis, n, dim + 1),
    public="psum_scatter",
)
def own_chunk(x: torch.Tensor, axis: str, n: int, dim: int) -> torch.Tensor:
    """Return a rank's own chunk, along a dim, of an invariant value."""
    return _empty_resized(x, {dim: x.shape[dim] // n})


@prim(
    axes=one_axis,
    takes_varying=True,
    gives_varying=True,
    batched=lambda axis, n, split, concat: (axis, n, split + 1, concat + 1),
)
def all_to_all(x: torch.Tensor, axis: str, n: int, split: int, concat: int) -> torch.Tensor:
    """Send each rank its chunk along `split`, and concatenate the received chunks
    along `concat`.
    """
    return _empty_resized(x, {split: x.shape[split] // n, concat: x.shape[concat] * n})


@prim(axes=one_axis, takes_varying=True, gives_varying=True)
def ppermute(x: torch.Tensor, axis: str, perm: str) -> torch.Tensor:
    """Return the value of the rank that sends to this one, or zeros. `0>1,1>0`: 0 sends to 1, and
    1 to 0.
    """
    return torch.empty_like(x)


@prim(
    name="rows_to_ranks",
    axes=one_axis,
    takes_varying=True,
    gives_varying=True,
    public="ragged_all_to_all",
    batched_operand=lambda counts: counts.dim() - 1,  # right after the rows
)
def ragged_all_to_all(
    x: torch.Tensor, counts: torch.Tensor, axis: str, n: int, given: int, rows: int
) -> torch.Tensor:
    """Send rows to each rank: counts[s, d] of the `given` rows of rank s go to d, which takes
    `rows` of them. Leading dims of the counts are leading dims of x.
    """
    return _empty_resized(x, {counts.dim() - 2: rows})


@prim(axes=one_axis, takes_varying=False, gives_varying=True, communicates=False)
def axis_index(axis: str, device: torch.device) -> torch.Tensor:
    """Return a rank's number on an axis."""
    return torch.empty((), dtype=torch.int64, device=device)


# Linear prims: from the cotangent of the result and the constants to the cotangent of the tensor.
implement(to_local, transpose=from_local)
implement(from_local, transpose=to_local)
implement(vary, transpose=lambda g, axes: psum(g, axes, True))
implement(vary_equal, transpose=as_equal)
implement(as_equal, transpose=vary_equal)
# of each rank: what all of them have counts once in further derivatives
implement(as_invariant, transpose=vary_equal)
implement(no_cotangent, transpose=vary)
implement(undecided, transpose=_refuse_cotangent)
implement(vary_in_value, transpose=vary_in_value)
implement(psum, transpose=lambda g, axes, pending: vary(g, axes))
implement(all_gather, transpose=own_chunk)
implement(own_chunk, transpose=all_gather)
implement(all_to_all, transpose=lambda g, axis, n, s, c: all_to_all(g, axis, n, c, s))
implement(ppermute, transpose=lambda g, axis, perm: ppermute(g, axis, _reversed_pairs(perm)))
implement(
    ragged_all_to_all,
    transpose=lambda g, counts, axis, n, given, rows: ragged_all_to_all(
        g, counts.transpose(-1, -2), axis, n, rows, given
    ),
)


class _MappedGather(torch.autograd.Function):
    """The values of all samples of one vmap, stacked along dim 0. `index` is mapped by that vmap
    only.
    """

    @staticmethod
    def forward(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return uncaptured()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _MappedGather.apply(cotangent, index).sum(0).index_select(
            0, index.reshape(1)
        ).squeeze(0), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> Any:
        return _MappedGather.apply(tangent, ctx.saved_tensors[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, index: torch.Tensor) -> Any:
        x_dim, index_dim = in_dims
        if index_dim is None:  # another vmap than the one that the name is bound to
            return _MappedGather.apply(x.movedim(x_dim, 0), index), 1
        every = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        return every.clone(), None  # it may be written to, and x is not meant then


@_compat.keep_in_graph
def mapped_index(n: int, level: int, device: str) -> torch.Tensor:
    """Return a sample's number in the vmap at a level."""
    return _compat.mapped_index(n, level, device)


@_compat.keep_in_graph
def mapped_gather(x: torch.Tensor, n: int, level: int) -> torch.Tensor:
    """Stack the values of all samples of the vmap at a level along dim 0."""
    return _MappedGather.apply(x, _compat.mapped_index(n, level, str(x.device)))
