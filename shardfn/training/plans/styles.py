"""The parallel styles of Hugging Face and torch: two tables of the dims that they shard."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from ...placement import P


@attrs.frozen
class Dims:
    """The dims of a layer's parameters that a style shards; -1 is the last. None replicates."""

    matrix: int | None = None  # of a parameter with two dims or more
    vector: int | None = None  # with one dim
    bias: int | None = None  # of the parameter named bias
    blocks: int = 1  # the equal blocks of a packed dim, each of them sharded

    def spec(self, name: str, rank: int, axis: str | tuple[str, ...]) -> P:
        """The placement of a parameter of that name with so many dims."""
        dim = self.matrix if rank > 1 else self.vector
        if name == "bias":
            dim = self.bias
        if dim is None or rank == 0:
            return P()
        before = dim % rank
        return P(*[None] * before, in_blocks(axis, self.blocks))


def in_blocks(axis: str | tuple[str, ...], blocks: int) -> str | tuple[str, ...]:
    """The part of a P that views its dim as so many blocks."""
    if blocks == 1:
        return axis
    if isinstance(axis, str):
        return f"{axis}*{blocks}"
    first, *others = axis
    return (f"{first}*{blocks}", *others)


COLWISE = Dims(matrix=-2, vector=-1, bias=-1)  # a Linear's weight is (out, in)
ROWWISE = Dims(matrix=-1, vector=-1)
REPLICATED = Dims()
EXPERTS = Dims(matrix=0, vector=0, bias=0)
PACKED_COLUMNS = Dims(matrix=-2, vector=-1, bias=-1, blocks=2)
PACKED_ROWS = Dims(matrix=-1, blocks=2)

# transformers/distributed/tensor_parallel.py and expert_parallel.py of 5.23, with the names of 4.
# A packed matrix (gate and up in one) is viewed as two blocks, each of them sharded.
HUGGING_FACE: dict[str, Dims] = {
    "colwise": COLWISE,
    "colwise_rep": COLWISE,
    "colwise_gather_output": COLWISE,
    "local_colwise": COLWISE,
    "packed_colwise": PACKED_COLUMNS,
    "rowwise": ROWWISE,
    "rowwise_rep": ROWWISE,
    "rowwise_split_input": ROWWISE,
    "local_rowwise": ROWWISE,
    "packed_rowwise": PACKED_ROWS,
    "local_packed_rowwise": PACKED_ROWS,
    "embedding_rowwise": Dims(matrix=0),
    "vocab_parallel_rowwise": Dims(matrix=0),
    "embedding_colwise": Dims(matrix=1),
    "grouped_gemm": EXPERTS,
    "replicate": REPLICATED,
    "replicated": REPLICATED,
    "replicated_with_grad_allreduce": REPLICATED,
    "sequence_parallel": REPLICATED,
    "mla_kv_a_proj": REPLICATED,
}

# Styles of activations, which sharding propagation places.
OF_ACTIVATIONS = {
    "all_reduce",
    "ep_dispatch_experts",
    "ep_router",
    "gather",
    "local",
    "local_params",
    "moe_identity_expert",
    "moe_tp_experts",
}
TORCHS_OF_ACTIVATIONS = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput)

# torch/distributed/tensor/parallel/style.py
TORCH: dict[type[ParallelStyle], dict[type[nn.Module], Dims]] = {
    ColwiseParallel: {nn.Linear: COLWISE, nn.Embedding: Dims(matrix=1)},
    RowwiseParallel: {nn.Linear: Dims(matrix=-1), nn.Embedding: Dims(matrix=0)},
    SequenceParallel: {nn.Module: REPLICATED},
}


def is_style(x: Any) -> bool:
    """Whether a value of a plan is a style rather than a placement."""
    return isinstance(x, (str, ParallelStyle))


def is_of_activations(style: Any) -> bool:
    """Whether a style says nothing about parameters."""
    if isinstance(style, str):
        return style in OF_ACTIVATIONS
    return type(style) in TORCHS_OF_ACTIVATIONS


def is_known(style: Any) -> bool:
    """Whether a style has a reading as placements of parameters, or needs none."""
    if isinstance(style, str):
        return style in HUGGING_FACE or style in OF_ACTIVATIONS
    return type(style) in TORCH or type(style) in TORCHS_OF_ACTIVATIONS


def known_names() -> list[str]:
    """The names of all styles with a reading."""
    torchs = [kind.__name__ for kind in (*TORCH, *TORCHS_OF_ACTIVATIONS)]
    return [*sorted({*HUGGING_FACE, *OF_ACTIVATIONS}), *torchs]


def name_of(style: Any) -> str:
    """The name of a style, for messages."""
    return repr(style) if isinstance(style, str) else type(style).__name__


def dims_of(style: Any, layer: type[nn.Module]) -> Dims | None:
    """The dims that a style shards in a layer; None if it has no reading there."""
    if isinstance(style, str):
        return HUGGING_FACE[style]
    rows = TORCH[type(style)].items()
    return next((dims for kind, dims in rows if issubclass(layer, kind)), None)


def layer_of(
    style: Any, path: str, layers: dict[str, type[nn.Module]], paths: frozenset[str]
) -> type[nn.Module] | None:
    """The class of the layer at a path. None where only the module could tell: torch shards a
    Linear and an Embedding in different dims, and without a bias they look alike.
    """
    if path in layers:
        return layers[path]
    only_one = isinstance(style, str) or nn.Module in TORCH[type(style)]
    has_bias = f"{path}.bias".lstrip(".") in paths
    return nn.Linear if only_one or has_bias else None
