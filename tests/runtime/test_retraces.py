"""S2.4: why a call is staged again, in words."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardfn as sf
from shardfn import P

HEAD = "a new signature; the closest of {} differs in"
X = torch.ones(4, 2)


def staged(fn: Any, **options: Any) -> Any:
    return sf.jit(fn, backend="aten", **options)


def differences(text: str, earlier: str = "1 earlier signature") -> list[str]:
    """The lines of an explanation after its first."""
    first, *rest = text.splitlines()
    assert first.endswith(HEAD.format(earlier)), first
    return [line.removeprefix("  ") for line in rest]


def test_before_any_call_and_after_the_first() -> None:
    fn = staged(lambda x: x + 1)
    assert fn.explain_retrace() == "jit(<lambda>): the function has not been called"
    first = "jit(<lambda>): this is the first call: no program exists yet"
    assert fn.explain_retrace(X) == first
    fn(X)
    assert fn.explain_retrace() == first
    known = "a program for these arguments already exists: no retrace"
    assert fn.explain_retrace(X.clone()) == f"jit(<lambda>): {known}"


def test_the_leaf_that_differs_from_the_closest_signature() -> None:
    fn = staged(lambda batch, n: (batch["x"] * n, batch["y"]))
    fn({"x": X, "y": X}, 2)
    fn({"x": X[:2], "y": X[:1]}, 5)
    fn({"x": X, "y": X[:3]}, 2)
    assert differences(fn.explain_retrace(), "2 earlier signatures") == [
        "batch['y']: f32[3, 2], was f32[4, 2]"
    ]
    text = fn.explain_retrace({"x": X.double(), "y": X.T.contiguous().T}, n=2)
    assert differences(text, "3 earlier signatures") == [
        "the arguments: {}".format(text.split("the arguments: ")[1])
    ]
    text = fn.explain_retrace({"x": X.double(), "y": X.T.contiguous().T}, 2)
    assert differences(text, "3 earlier signatures") == [
        "batch['x']: f64[4, 2], was f32[4, 2]",
        "batch['y']: f32[4, 2] of strides (1, 4), was f32[3, 2]",
    ]


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (({"x": X, "m": X}, 2), ["the arguments: also batch['m']"]),
        (({"y": X}, 2), ["the arguments: also batch['y']; without batch['x']"]),
        (({"x": X}, 3), ["n: 3, was 2"]),
        (({"x": X}, 2.5), ["n: 2.5, was 2"]),
    ],
)
def test_other_trees_and_constants(args: Any, lines: list[str]) -> None:
    fn = staged(lambda batch, n: batch.get("x", X) * n)
    fn({"x": X}, 2)
    assert differences(fn.explain_retrace(*args)) == lines


def test_values_that_it_closes_over_and_settings() -> None:
    scale = 2.0
    fn = staged(lambda x: x * scale)
    fn(X)
    scale = 3.0
    assert differences(fn.explain_retrace(X)) == ["closed-over scale: 3.0, was 2.0"]
    fn(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lines = differences(fn.explain_retrace(X), "2 earlier signatures")
    assert lines and all("autocast" in line for line in lines)


def test_s2_4_placements_and_meshes() -> None:
    with sf.fake_world(4):
        mesh, other = (sf.make_mesh((4,), ("dp",)), sf.make_mesh((2, 2), ("dp", "tp")))
        fn = staged(lambda d: d * 2)
        x = torch.ones(8, 2)
        fn(distribute_tensor(x, mesh, [Shard(0)]))
        moved = distribute_tensor(x, mesh, [Replicate()])
        line = "d: f32[8, 2] on (dp=4), was f32[8@dp, 2] on (dp=4)"
        assert differences(fn.explain_retrace(moved)) == [line]
        fn(moved)
        assert differences(fn.explain_retrace()) == [line]
        on_other = sf.distribute(x, other, P("dp"))
        text = fn.explain_retrace(on_other)
        assert differences(text, "2 earlier signatures") == [
            "d: f32[8@dp, 2] on (dp=2, tp=2), was f32[8, 2] on (dp=4)"
        ]
        with sf.use_mesh(mesh):
            fn(x)
        with sf.use_mesh(other):
            text = fn.explain_retrace(x)
        assert differences(text, "3 earlier signatures")[-1] == (
            "the mesh: (dp=2, tp=2), was (dp=4)"
        )
    with sf.fake_world(2):
        sf.make_mesh((2,), ("dp",))
        text = sf.explain_retrace(fn, x)
        assert "the world: simulated, of 2, was simulated, of 4" in text


def test_s2_4_the_code_of_one_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = staged(lambda d: d.to_local() + 1)
        d = distribute_tensor(X, mesh, [Shard(0)])
        fn(d)
        assert "no retrace" in fn.explain_retrace(d)
        moved = d.redistribute(mesh, [Replicate()])
        line = "d: f32[4, 2] on (dp=2), was f32[4@dp, 2] on (dp=2)"
        assert differences(fn.explain_retrace(moved)) == [line]
        fn(moved)
        assert differences(fn.explain_retrace()) == [line]


def test_any_transform_and_a_plain_function() -> None:
    fn = sf.grad(lambda x: x.sum())
    fn(X)
    assert differences(sf.explain_retrace(fn, X[:1])) == ["x: f32[1, 2], was f32[4, 2]"]
    with pytest.raises(sf.ShardError, match="sin is not a transformed function"):
        sf.explain_retrace(torch.sin, X)


def test_it_is_logged() -> None:
    fn, said, log = staged(lambda x: x + 1), [], logging.getLogger("shardfn")
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        fn(X)
        fn(X[:2])
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert fn.explain_retrace() in said
