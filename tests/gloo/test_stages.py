"""Real gloo processes of which a stage of a pipeline alone has a tensor: values as on one device,
and local tensors as in the simulator.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch.distributed.tensor import Replicate

import shardfn as sf
from shardfn import P

MESHES: dict[int, list[tuple[dict[str, int], P]]] = {
    2: [({"pp": 2}, P(pp=1)), ({"pp": 2}, P(pp=sf.Stage(0, chunk=2)))],
    4: [
        ({"pp": 4}, P(pp=2)),
        ({"pp": 2, "tp": 2}, P("tp", pp=1)),
        ({"tp": 2, "pp": 2}, P(None, "tp", pp=0)),
        ({"pp": 2, "tp": 2}, P(pp=1, tp=0)),
        ({"dp": 2, "pp": 2, "tp": 1}, P(("dp", "tp"), pp=1)),
    ],
}
DTYPES = [
    *(torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.uint32),
]


def distributed(x: torch.Tensor, axes: dict[str, int], spec: P) -> Any:
    mesh = sf.make_mesh(tuple(axes.values()), tuple(axes))
    return sf.distribute(x, mesh, spec if x.dim() == 2 else P(**spec.stages))


def there_and_back(n: int) -> list[Any]:
    """(this rank's shard, the global value) of tensors on a stage."""
    out = []
    for axes, spec in MESHES[n]:
        for dtype in DTYPES:
            for shape in ((5, 3), (0, 3), ()):
                placed = distributed(sample(shape, dtype), axes, spec)
                again = sf.from_local(
                    placed.to_local(), placed.device_mesh, list(placed.placements), shape=shape
                )
                out.append((placed.to_local(), sf.full(again)))
    return out


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.uint8)
    return numbers.view(shape).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal, of any dtype."""
    wide = torch.complex128
    return a.dtype == b.dtype and torch.equal(a.to(wide), b.to(wide))


@pytest.mark.parametrize("n", MESHES)
def test_full_brings_the_value_of_a_stage_to_all_ranks(n: int) -> None:
    ranks = run_ranks(n, there_and_back, n)
    with sf.fake_world(n):
        cases = [
            (sample(shape, dtype), distributed(sample(shape, dtype), axes, spec))
            for axes, spec in MESHES[n]
            for dtype in DTYPES
            for shape in ((5, 3), (0, 3), ())
        ]
        for rank, rows in enumerate(ranks):
            for (local, whole), (x, simulated) in zip(rows, cases, strict=True):
                assert same(whole, x)
                assert same(local, simulated.to_local(rank=rank))


X = torch.arange(1.0, 13.0).reshape(4, 3)


def in_a_script(n: int) -> dict[str, Any]:
    """What a script gets of ops on a stage."""
    axes, spec = MESHES[n][1]
    x = distributed(X, axes, spec)
    mesh = x.device_mesh
    w = torch.nn.Parameter(x.clone())
    opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for _ in range(2):
        opt.zero_grad()
        sf.full(w * w).sum().backward()
        opt.step()
    local = x.clone().requires_grad_()
    (local.to_local() ** 2).sum().backward()
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    refused = {
        "sum": lambda: x.sum(),
        "with another": lambda: sf.distribute(X, mesh, P()) + x,
        "full_tensor": lambda: x.full_tensor(),
        "redistribute": lambda: x.redistribute(placements=[Replicate()] * mesh.ndim),
        "to a stage": lambda: sf.distribute(X, mesh, P()).redistribute(placements=x.placements),
        "no shape": lambda: sf.from_local(x.to_local(), mesh, P(**spec.stages)),
    }
    return {
        "stepped": sf.full(w.detach()),
        "gradient": sf.full(local.grad),
        "copied": sf.full(copy.deepcopy(x)),
        "loaded": sf.full(torch.load(file, weights_only=False)),
        "refused": {name: error_of(call) for name, call in refused.items()},
    }


def error_of(call: Any) -> str:
    with pytest.raises(sf.PlacementError) as error:
        call()
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("n", MESHES)
def test_ops_of_a_script_are_right_or_refused(n: int) -> None:
    w = torch.nn.Parameter(X.clone())
    opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for _ in range(2):
        opt.zero_grad()
        (w * w).sum().backward()
        opt.step()
    for rank in run_ranks(n, in_a_script, n):
        torch.testing.assert_close(rank["stepped"], w.detach())
        assert torch.equal(rank["gradient"], 2 * X)
        assert torch.equal(rank["copied"], X)
        assert torch.equal(rank["loaded"], X)
        placed = "[Stage(0, chunk=2)]" if n == 2 else "[Stage(1), Shard(dim=0)]"
        stage = "Stage(0, chunk=2)" if n == 2 else "Stage(1)"
        spec = "P(pp=Stage(0, chunk=2))" if n == 2 else "P(pp=1)"
        unknown = "torch's DTensor ops do not support sf.Stage"
        it = f"of a DTensor: the DTensor is placed {placed}, but {unknown}"
        assert rank["refused"] == {
            "sum": f"aten.sum.default {it}",
            "with another": f"aten.add.Tensor {it}",
            "full_tensor": f"full_tensor {it}",
            "redistribute": f"redistribute {it}",
            "to a stage": (
                f"redistribute of a DTensor: cannot redistribute to {stage}: torch's DTensor does "
                "not support sf.Stage"
            ),
            "no shape": (
                f"from_local: {spec} needs a shape, because ranks of other stages do not know "
                "the shape"
            ),
        }


W, B = torch.arange(35.0).reshape(5, 7), torch.arange(3)


def saved(n: int, folder: str) -> Any:
    """Of two tensors on two stages, saved and loaded on other stages and on a mesh without any:
    the values, and this rank's shards.
    """
    mesh = sf.make_mesh((n,), ("pp",))
    tree = sf.distribute({"w": W, "b": B}, mesh, {"w": P(pp=0), "b": P(pp=n - 1)})
    sf.save(f"{folder}/ours", tree)
    dcp.save(tree, checkpoint_id=f"{folder}/torchs")
    other = {"w": P(pp=n - 1), "b": P(pp=0)}
    like = {"w": sf.ShapeDtype(W.shape), "b": sf.ShapeDtype(B.shape, B.dtype)}
    line = sf.make_mesh((n,), ("dp",))
    loaded = [
        sf.load(f"{folder}/ours", like, mesh, other),
        sf.load(f"{folder}/torchs", like, mesh, other),
        sf.load(f"{folder}/ours", like, line, P("dp")),
        sf.distribute({"w": torch.zeros_like(W), "b": torch.zeros_like(B)}, mesh, other),
    ]
    dcp.load(loaded[-1], checkpoint_id=f"{folder}/ours/step-00000000")
    sf.save(f"{folder}/back", loaded[2])
    loaded.append(sf.load(f"{folder}/back", tree))
    return sf.full(loaded), [x.to_local() for x in loaded[0].values()]


@pytest.mark.parametrize("n", MESHES)
def test_the_owner_of_a_stage_saves_it_and_any_other_loads_it(n: int, tmp_path: Path) -> None:
    for rank, (trees, (w, b)) in enumerate(run_ranks(n, saved, n, str(tmp_path))):
        for tree in trees:
            assert torch.equal(tree["w"], W) and torch.equal(tree["b"], B)
        assert torch.equal(w, W if rank == n - 1 else torch.empty(0))
        assert torch.equal(b, B if rank == 0 else torch.empty(0, dtype=B.dtype))
    for folder in ("ours/step-00000000", "torchs"):
        stored = dcp.FileSystemReader(tmp_path / folder).read_metadata().storage_data
        files = {index.fqn: place.relative_path for index, place in stored.items()}
        assert files == {"w": "__0_0.distcp", "b": f"__{n - 1}_0.distcp"}


def on_part() -> dict[str, Any]:
    """Values of DTensors on stages of a part of a mesh."""
    mesh = sf.make_mesh((2, 2), ("pp", "tp"))
    x = sf.distribute(X, mesh["pp"], P(pp=1))
    double = sf.shard(lambda x: x * 2, mesh, backend="aten")
    own = X + 100 * mesh.get_local_rank("tp")  # another value on each part
    with pytest.raises(sf.DivergenceError) as error:
        double(sf.distribute(own, mesh["pp"], P(pp=0)))
    return {"full": sf.full(x), "double": sf.full(double(x)), "error": str(error.value)}


def test_stages_of_a_part_of_a_mesh() -> None:
    for rank in run_ranks(4, on_part):
        assert torch.equal(rank["full"], X) and torch.equal(rank["double"], 2 * X)
        assert (
            "the DTensor is on a submesh, but rank 1 is on another submesh, which holds"
            in rank["error"]
        )
