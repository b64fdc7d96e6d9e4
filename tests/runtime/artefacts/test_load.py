"""A saved program gives the values of the function, on the ranks that it was made for; a file that
is none is refused by name.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stagings import counts

import shardfn as sf
from shardfn import P
from shardfn.errors import ArtefactError, ShardError, TreeError
from shardfn.runtime.artefacts import file as artefact_file
from tests.support.ranks import run_ranks

F64 = torch.float64
G = torch.Generator().manual_seed(0)
W = torch.randn(3, 5, dtype=F64, generator=G)
X = torch.randn(7, 3, dtype=F64, generator=G)
SCALE = torch.tensor([1.5 - 2j, 0.5j])
MESHES = {"dp": (3,), "dp,tp": (2, 3)}


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"] + params["b"]).square().mean()


def step(params: Any, x: torch.Tensor, *, rate: float) -> Any:
    loss, grads = sf.bucketed_grad(loss_fn)(params, x)
    new = sf.tree_map(lambda p, g: p - rate * g, params, grads)
    return OrderedDict(params=new, about=(loss, "loss", [None, 2.5]))


def params() -> Any:
    return {"w": W.clone(), "b": torch.zeros(5, dtype=F64)}


def like(tree: Any) -> Any:
    return sf.tree_map(lambda x: sf.ShapeDtype(tuple(x.shape), x.dtype), tree)


def assert_close(a: Any, b: Any) -> None:
    a, b = (torch.utils._pytree.tree_leaves(sf.full(x)) for x in (a, b))
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
        else:
            assert x == y


@pytest.mark.parametrize("names", MESHES)
def test_made_in_a_world_without_values_for_all_ranks_and_run_on_them(
    names: str, tmp_path: Path
) -> None:
    path, shape = tmp_path / "step.sf", MESHES[names]
    axes = tuple(names.split(","))
    n = torch.Size(shape).numel()
    placed = ({"w": P(None, axes[-1]), "b": P()}, P("dp"))
    with sf.fake_world(n, numerics=False):
        mesh = sf.make_mesh(shape, axes, device_type="cpu")
        train = sf.shard(step, mesh, placed, donate_argnums=(0,), backend="aten")
        train.compile(like(params()), like(X), rate=0.5).save(path)
    expected = step(params(), X, rate=0.5)
    before = dict(counts)
    with sf.fake_world(n):
        loaded = sf.load_compiled(path)
        args = sf.distribute(params(), loaded.placed.mesh, placed[0])
        result = loaded(args, X, rate=0.5)
        assert_close(result, expected)
        assert list(result) == ["params", "about"] and isinstance(result, OrderedDict)
        with pytest.raises(ShardError, match="donated"):
            _ = args["w"] + 1
        with pytest.raises(TreeError, match="rate"):
            loaded(params(), X, rate=0.25)
    assert dict(counts) == before, "nothing is captured, or partitioned"


def scanned(xs: torch.Tensor) -> Any:
    return sf.scan(lambda c, x: (c * 0.5 + x, c.sin()), xs[0], xs)


def complex_closed(x: torch.Tensor) -> torch.Tensor:
    return x[:2, 0] * SCALE + SCALE.conj()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(7, 3, dtype=F64)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "scanned": scanned,
    "complex_closed": complex_closed,
    "drawn": drawn,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loaded_program_has_the_bits_of_the_compiled_one(name: str, tmp_path: Path) -> None:
    compiled = sf.jit(PROGRAMS[name], backend="aten").compile(X)
    compiled.save(tmp_path / "program")
    loaded = sf.load_compiled(tmp_path / "program")
    sf.random.state.seed(3)
    expected = compiled(X)
    sf.random.state.seed(3)
    again = loaded(X)
    pairs = zip(*map(torch.utils._pytree.tree_leaves, (again, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    loaded.save(tmp_path / "again")
    assert artefact_file.read(tmp_path / "again")[0] == artefact_file.read(tmp_path / "program")[0]


def test_arguments_and_results_of_a_loaded_program_are_on_their_stages(tmp_path: Path) -> None:
    with sf.fake_world(4):
        mesh = sf.make_mesh((2, 2), ("pp", "tp"))
        places = (P(None, "tp", pp=0), P("tp", pp=sf.Stage(1, chunk=1)), P("tp", pp=1))
        f = sf.shard(lambda w, v, x: (w * 2, x @ v), mesh, places, backend="aten")
        args = sf.distribute((torch.ones(3, 4), torch.eye(3).t(), torch.rand(3, 3)), mesh, places)
        f.compile(*args).save(tmp_path / "program")
        loaded = sf.load_compiled(tmp_path / "program")
        for mine, wanted in zip(loaded(*args), f(*args), strict=True):
            assert mine.placements == wanted.placements
            assert torch.equal(sf.full(mine), sf.full(wanted))
        with pytest.raises(TreeError) as error:
            loaded(sf.distribute(torch.ones(3, 4), mesh, P(None, "tp", pp=1)), *args[1:])
        assert (
            "\n  w: placed Stage(1) on pp, Shard(dim=1) on tp, the program is for Stage(0) on pp, "
            "Shard(dim=1) on tp\n"
        ) in str(error.value)


def test_inductor_compiles_a_loaded_program_to_the_same_bits(tmp_path: Path) -> None:
    compiled = sf.jit(lambda x: (x.sin() * x).cumsum(0)).compile(X)
    compiled.save(tmp_path / "program")
    before = counts["compilations"]
    loaded = sf.load_compiled(tmp_path / "program")
    assert torch.equal(loaded(X), compiled(X))
    assert counts["compilations"] == before, "an equal program is compiled"


def on_ranks(path: str) -> tuple[Any, Any, Any]:
    placed = ({"w": P(), "b": P()}, P("dp"))
    mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
    ours = sf.shard(step, mesh, placed)(params(), X, rate=0.5)
    loaded = sf.load_compiled(path, mesh=mesh)
    try:
        sf.load_compiled(f"{path}.{torch.distributed.get_rank()}", mesh=mesh)
    except ShardError as error:
        said = str(error)
    return sf.full(loaded(params(), X, rate=0.5)), sf.full(ours), said


def test_real_ranks_run_what_a_world_without_values_has_made(tmp_path: Path) -> None:
    path = tmp_path / "step.sf"
    placed = ({"w": P(), "b": P()}, P("dp"))
    with sf.fake_world(2, numerics=False):
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        for k, name in enumerate(("step.sf", "step.sf.0", "step.sf.1")):
            train = sf.shard(step, mesh, placed, backend="aten")
            rate = 0.5 + k * 0.25
            train.compile(like(params()), like(X), rate=rate).save(tmp_path / name)
    for loaded, ours, said in run_ranks(2, on_ranks, str(path)):
        assert_close(loaded, step(params(), X, rate=0.5))
        assert_close(loaded, ours)
        assert "ranks 0 and 1 load different files" in said


def saved(path: Path) -> Path:
    sf.jit(lambda x: x * 2, backend="aten").compile(X).save(path)
    return path


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda x: x[:-40],
    "empty": lambda x: b"",
    "a pickle": lambda x: pickle.dumps({"hostile": os.getpid()}),
    "garbage": lambda x: bytes(range(256)) * 8,
    "a bit": lambda x: x.replace(b"mul.Tensor", b"add.Tensor"),
    "length": lambda x: b"\xff" * 8 + x[8:],
    "nested": lambda x: (100_000).to_bytes(8, "little") + b"[" * 100_000,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_none_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "step.sf")
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.raises(ArtefactError, match="cannot be read as a saved program") as caught:
        sf.load_compiled(path)
    assert "step.sf" in str(caught.value) and "another copy" in str(caught.value)


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """A file with another record and the right digest, as somebody hostile would write it."""
    with safe_open(path, framework="pt") as found:
        metadata = found.metadata()
    tensors, record = load_file(path), json.loads(metadata["record"])
    change(record)
    metadata["record"] = json.dumps(record)
    metadata["digest"] = artefact_file._digest(metadata["record"], tensors)
    save_file(tensors, path, metadata)


def calling(op: str) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        (row,) = (x for x in record["programs"][0]["graph"] if "op" in x)
        row["op"] = op

    return change


def reshaped(record: Any) -> None:
    record["programs"][0]["graph"][0]["in"][0] = [70, 3]


def restrided(record: Any) -> None:
    record["programs"][0]["graph"][0]["in"][1] = [10**8, 10**4]


def settled(name: str, value: Any) -> Callable[[Any], None]:
    return lambda record: record.__setitem__(name, value)


HOSTILE: dict[str, tuple[Callable[[Any], None], str]] = {
    "reads a file": (calling("aten.from_file.default"), "the op aten.from_file"),
    "writes": (calling("aten.add_.Tensor"), "the op aten.add_.Tensor"),
    "runs Python": (calling("os.system"), "the op os.system"),
    "runs a method": (calling("aten.__class__.mro"), "the op aten.__class__.mro"),
    "jit": (calling("aten.save.default"), "the op aten.save.default"),
    "another shape": (reshaped, "the shape is not that of a shard"),
    "other strides": (restrided, "the strides are not those of a shard"),
    "another torch": (settled("torch", "2.11.0"), "the program was saved with torch 2.11.0"),
    "another shardfn": (settled("shardfn", "9.9"), "the program was saved with shardfn 9.9"),
    "no mesh": (settled("mesh", [["dp"], [-1], "cpu"]), "the sizes of a mesh"),
    "no arguments": (settled("arguments", {}), "KeyError"),
    "no results": (settled("results", []), "TypeError"),
    "no programs": (settled("programs", []), "IndexError|ValueError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_record_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    change, said = HOSTILE[kind]
    path = saved(tmp_path / "step.sf")
    rewritten(path, change)
    with pytest.raises(ArtefactError, match=said):
        sf.load_compiled(path)


OUTSIDE = {"far": ([3], [1], 10**9), "one": ([3], [1], 10), "wide": ([3], [6], 0)}


@pytest.mark.parametrize("sizes", OUTSIDE.values(), ids=OUTSIDE)
def test_a_view_outside_of_its_tensor_is_refused_whatever_the_file_says_of_that(
    sizes: Any, tmp_path: Path
) -> None:
    windows = lambda x: (x + 1).as_strided((5, 4), (2, 1), 0) * 2
    x = torch.arange(12.0).view(3, 4)
    path = tmp_path / "windows.sf"
    sf.jit(windows).compile(x).save(path)
    assert torch.equal(sf.load_compiled(path)(x), windows(x))

    def change(record: Any) -> None:
        rows = record["programs"][0]["graph"]
        (view,) = (row for row in rows if "as_strided" in row.get("op", ""))
        (made,) = (row for row in rows if "add" in row.get("op", ""))
        made["val"][0], made["val"][1] = [3, 10**9], [10**9, 1]  # a lie
        view["args"] = [view["args"][0], *sizes]

    rewritten(path, change)
    with pytest.raises(ArtefactError, match="elements outside of the memory of its tensor"):
        sf.load_compiled(path)


def test_another_mesh_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "step.sf"
    with sf.fake_world(4, numerics=False):
        mesh = sf.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
        step = sf.shard(lambda x: x * 2, mesh, P("dp"), backend="aten")
        step.compile(sf.ShapeDtype((4,))).save(path)
    with sf.fake_world(4):
        other = sf.make_mesh((4,), ("dp",), device_type="cpu")
        with pytest.raises(ArtefactError) as caught:
            sf.load_compiled(path, mesh=other)
        assert "made for the mesh (dp=2, tp=2), but the given mesh is (dp=4)" in str(caught.value)
        assert "try: sf.make_mesh((2, 2), ('dp', 'tp'), 'cpu')" in str(caught.value)
        rewritten(path, settled("mesh", [["dp", "tp"], [2, 2], "cuda"]))
        mesh = sf.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
        with pytest.raises(ArtefactError, match="made for cuda, but the mesh is over cpu"):
            sf.load_compiled(path, mesh=mesh)
    with pytest.raises(ShardError):  # a world of one rank
        sf.load_compiled(path)


def test_other_settings_are_refused_when_it_is_called(tmp_path: Path) -> None:
    loaded = sf.load_compiled(saved(tmp_path / "step.sf"))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(TreeError, match="torch.use_deterministic_algorithms"):
            loaded(X)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_missing_file_and_an_unknown_backend_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="No such file"):
        sf.load_compiled(tmp_path / "none")
    with pytest.raises(ShardError, match="backend is 'nvcc'"):
        sf.load_compiled(saved(tmp_path / "step.sf"), backend="nvcc")
