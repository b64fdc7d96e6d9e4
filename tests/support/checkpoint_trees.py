"""A tree with uneven dims, every kind of leaf and many dtypes, and its placements on two meshes."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn import P

random = torch.Generator().manual_seed(0)
TREE: dict[str, Any] = {
    "rows": torch.randn(7, 5, dtype=torch.float64, generator=random),
    "columns": torch.randn(2, 3, generator=random),
    "nested": [
        torch.tensor(3.5),
        4,
        "text",
        None,
        float("inf"),
        {"flag": True, "x": torch.arange(6)},
    ],
    "complex": torch.randn(4, dtype=torch.complex128, generator=random),
    "empty": torch.randn(0, 3),
    "short": torch.arange(5, dtype=torch.int16),
    "half": torch.randn(5, 3, generator=random).bfloat16(),
    "bool": torch.tensor([True, False]),
}
ONE_AXIS = {
    "rows": P("dp"),
    "columns": P("dp"),  # fewer rows than ranks: some shards are empty
    "nested": None,
    "complex": P("dp"),
    "empty": P(),
    "short": P("dp"),
    "half": P(None, "dp"),
    "bool": P(),
}
TWO_AXES = {
    "rows": P("dp", "tp"),
    "columns": P("tp"),
    "nested": P(),
    "complex": P(("tp", "dp")),  # strided shards of DTensor
    "empty": P("dp"),
    "short": P(("dp", "tp")),
    "half": P("tp", "dp"),
    "bool": P("dp"),  # each chunk on two ranks
}
MESHES: dict[tuple[int, ...], Any] = {(2, 2): TWO_AXES, (3,): ONE_AXIS}
NAMES = ("dp", "tp")


def mesh_of(shape: tuple[int, ...]) -> Any:
    return sf.make_mesh(shape, NAMES[: len(shape)])


def shapes() -> Any:
    """The tree without its values."""

    def shape(x: Any) -> Any:
        is_tensor = isinstance(x, torch.Tensor)
        return sf.ShapeDtype(x.shape, x.dtype) if is_tensor else x

    return sf.tree_map(shape, TREE)


def assert_equal(tree: Any, wanted: Any) -> None:
    """Bit for bit, with dtypes."""

    def compare(x: Any, y: Any) -> None:
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y)
        else:
            assert x == y

    sf.tree_map(compare, sf.full(tree), wanted)
