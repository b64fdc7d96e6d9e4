"""The programs that reproduce a failure of a test over meshes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfn as sf
from shardfn import Replicate, Shard
from shardfn.proof.over_meshes.mesh_programs import literal, spec_text

LIMIT = 1


def program(test: Any, **given: Any) -> str:
    """The program of the failure of a test, which fails alike."""
    with pytest.raises(AssertionError) as caught:
        test(**given)
    text = caught.value.__notes__[-1]
    assert len(text.splitlines()) <= 10
    with pytest.raises(AssertionError):
        exec(compile(text, "<program>", "exec"), {})
    return text


def test_a_short_test_is_written_out_with_what_it_names() -> None:
    least = 2

    @sf.meshes("2..4", shapes={"x": ("b",)}, dtype=torch.float32)
    def positive(mesh: Any, x: Tensor) -> None:
        """What it says."""
        assert F.relu(sf.full(x)).numel() < least + LIMIT

    assert program(positive) == (
        "import torch, shardfn as sf, torch.nn.functional as F\n"
        "LIMIT = 1; least = 2\n"
        "def positive(mesh, x):\n"
        "    assert F.relu(sf.full(x)).numel() < least + LIMIT\n"
        "torch.manual_seed(0)\n"
        "with sf.fake_world(2):\n"
        "    mesh = sf.make_mesh((2,), ('dp',))\n"
        "    x = sf.distribute(torch.randn((3,), dtype=torch.float32), mesh, sf.P())\n"
        "    positive(mesh=mesh, x=x)"
    )


@sf.meshes("2..4", shapes=dict.fromkeys("abcdef", ("b",)))
def many(mesh, a, b, c, d, e, f):
    whole = sf.full(a)
    rest = [sf.full(x) for x in (b, c, d, e, f)]
    assert len(rest) == 5
    assert whole.numel() == sum(x.numel() for x in rest) // 5
    assert whole.numel() < 2


def test_a_longer_test_is_imported_and_many_arguments_share_a_line() -> None:
    lines = program(many).splitlines()
    assert lines[2] == "from test_mesh_programs import many"
    assert len(lines) == 10 and lines[-2].count("sf.distribute(") == 4


@sf.meshes(
    "2..4",
    shapes={"params": {"w": ("d", "k"), "b": [("k",)]}, "ids": ("n",), "mask": ("n",)},
    dtype={"ids": torch.int32, "mask": torch.bool},
    below={"ids": "d"},
)
def trees(mesh, params, ids, mask):
    assert int(sf.full(ids).max()) < params["w"].shape[0]
    assert params["w"].dtype == torch.float64 and params["w"].shape[1:] == params["b"][0].shape
    assert mask.dtype == torch.bool and ids.dtype == torch.int32
    assert ids.shape[0] < 2


def test_trees_and_dtypes() -> None:
    text = program(trees)
    assert "params = {'w': sf.distribute(torch.randn((1, 1), dtype=torch.float64)" in text
    assert "'b': [sf.distribute(torch.randn((1,), dtype=torch.float64)" in text
    assert "torch.randint(0, 1, (2,), dtype=torch.int32)" in text
    assert "torch.randint(0, 2, (2,)).bool()" in text


@pytest.mark.parametrize("kind", ["zigzag", "partial", "order"])
def test_placements_beyond_plain_chunks(kind: str) -> None:
    text = program(beyond, kind=kind)
    assert {
        "zigzag": "mesh, sf.P(sf.zigzag('dp')))",
        "partial": '/ 2, mesh, [sf.Replicate()]).to_local(), mesh, [sf.Partial("sum")], shape=(1,)',
        "order": "sf.P(('tp', 'dp'))",
    }[kind] in text


@sf.meshes("2..4", shapes={"x": ("b",)}, placements="all", sizes={"b": "1..8"}, examples=200)
def beyond(mesh, x, kind):
    assert sf.full(x).shape == x.shape
    if kind == "zigzag":
        assert not any(isinstance(p, sf.Zigzag) for p in x.placements)
    elif kind == "partial":
        assert not any(p.is_partial() for p in x.placements)
    else:
        assert not any(type(p).__name__ == "_StridedShard" for p in x.placements)


def wrapped(test: Any) -> Any:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    return run


@sf.meshes("2..4", shapes={"x": ("b",)})
@wrapped
def decorated(mesh, x):
    assert x.shape[0] < 2


def test_a_test_with_another_decorator_is_imported() -> None:
    assert "from test_mesh_programs import decorated" in program(decorated)


def test_a_test_that_nothing_can_import_says_where_it_is() -> None:
    limits = torch.tensor([2])

    @sf.meshes(2, shapes={"x": ("b",)})
    def closed(mesh, x):
        assert x.shape[0] < limits

    with pytest.raises(AssertionError) as caught:
        closed()
    line = closed.__wrapped__.__code__.co_firstlineno
    assert f"closed = ...  # the function at {__file__}:{line}" in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("inf"), 'float("inf")'),
        ([1, (2,), {"a": None}], "[1, (2,), {'a': None}]"),
        ((), "()"),
        (torch.bfloat16, "torch.bfloat16"),
        (sf.P("dp", ("tp", "cp")), "sf.P('dp', ('tp', 'cp'))"),
        ([Shard(0), Replicate()], "[sf.Shard(dim=0), sf.Replicate()]"),
        (torch.ones(1), None),
        ([torch.ones(1)], None),
        ({1: object()}, None),
    ],
)
def test_values_as_python(value: Any, text: str | None) -> None:
    assert literal(value) == text
    if text is not None:
        assert eval(text, {"sf": sf, "torch": torch}) == value


def test_a_partial_placement_as_python() -> None:
    assert spec_text([sf.Partial("max"), Shard(1)]) == '[sf.Partial("max"), sf.Shard(dim=1)]'
