"""The arguments of a call: what is refused, by its path, where they lie, and how they differ from
those of a program.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import shardfn as sf
from shardfn import P, _tree
from shardfn._compat.cuda import devices
from shardfn.runtime.arguments import _check_device, as_given, check_leaves, place
from shardfn.runtime.options import Request
from tests.test_tree import Box

X = torch.ones(2, 3)


def fn(x: Any, y: Any = None, *, k: Any = 1) -> Any: ...


def request(**options: Any) -> Request:
    return Request("f", fn, fn, **options)


def leaves(*args: Any, static: Any = (), of: Any = None, **kwargs: Any) -> None:
    """Check the leaves of a call."""
    every = _tree.leaves((args, kwargs))
    paths = _tree.argument_paths(fn, args, kwargs)
    check_leaves(of or request(), every, list(paths), set(static))


def refused(kind: type, call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


class Module(torch.nn.Module):
    pass


class Called:
    def __call__(self) -> None: ...


INSTEAD = {
    "sf.functionalize(module)": Module(),
    "use static_argnums of jit or shard; or close over the slice": slice(3),
    "or close over the BlockMask": create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu"
    ),
    "torch.as_tensor(x); or x.item() for a constant": np.ones(2),
    "use torch.as_tensor(x) for an array; use a dict, list": Called(),
}


@pytest.mark.parametrize("fix", INSTEAD)
def test_other_objects_are_refused_with_what_to_pass(fix: str) -> None:
    text = refused(sf.TreeError, lambda: leaves({"w": [X, INSTEAD[fix]]}))
    assert text.startswith("f, argument x['w'][1]: a ")
    assert "needed: a tensor or a constant" in text and fix in text


def test_containers_that_dynamo_cannot_read_are_refused() -> None:
    checked = lambda asks, *args, **kwargs: place(asks, as_given(asks, args, kwargs))
    checked(request(), {"a": (X, [X])}, k=X)
    text = refused(sf.TreeError, lambda: checked(request(), X, [Box(X)]))
    assert text.startswith("f: y[0] is a Box") and "NamedTuple of the object's tensors" in text
    checked(request(static_argnums=(1,)), X, (Box(3),))


ROWS = torch.arange(8.0).reshape(4, 2)
THREE = (P(), P("dp"), P("dp"))


def product(w: Any, x: Any, y: Any = None) -> Any:
    return w.sum() + (x if y is None else x * y)


@pytest.mark.parametrize(
    "placements", [THREE, list(THREE), {"w": P(), "x": P("dp"), "y": P("dp")}, {"x": P("dp")}]
)
def test_arguments_by_position_and_by_name_are_placed_alike(placements: Any) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        g = sf.shard(product, mesh, placements)
        for args, kwargs in (
            ((ROWS, ROWS, ROWS), {}),
            ((ROWS, ROWS), {"y": ROWS}),
            ((ROWS,), {"y": ROWS, "x": ROWS}),
            ((), {"x": ROWS, "y": ROWS, "w": ROWS}),
            ((ROWS,), {"x": ROWS}),
        ):
            torch.testing.assert_close(sf.full(g(*args, **kwargs)), product(*args, **kwargs))
            assert "x: f32[4@dp, 2]" in str(g.lower(*args, **kwargs)).replace("%", "")


def sums(w: Any, *xs: Any) -> Any:
    return sum(x + w for x in xs)


def named(w: Any, *, x: Any, y: Any = 1) -> Any:
    return w + x * y


def others(w: Any, /, **b: Any) -> Any:
    return sum((x * w for x in b.values()), w)


def every(a: Any, /, b: Any, *c: Any, d: Any, **e: Any) -> Any:
    return {"b": a + b * d, "c": [x + a for x in c], "e": {k: x * a for k, x in e.items()}}


class Scaled(torch.nn.Module):
    def forward(self, x: Any, by: Any = None) -> Any:
        return x if by is None else x * by


# a function, its placements, and the arguments of a call -> those that are sharded
BOUND: dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any], str]] = {
    "one for all": (product, P("dp"), (ROWS,), {"x": ROWS, "y": ROWS}, "w x y"),
    "a default left out": (product, THREE, (ROWS,), {"y": ROWS, "x": ROWS}, "x y"),
    "star, in order": (sums, (P(), P("dp"), P()), (ROWS, ROWS, ROWS), {}, "xs.0"),
    "star, one for all": (sums, {"xs": P("dp")}, (ROWS, ROWS, ROWS), {}, "xs.0 xs.1"),
    "star, each": (sums, {"xs": (P(), P("dp"))}, (ROWS, ROWS, ROWS), {}, "xs.1"),
    "star, none": (sums, {"w": P("dp"), "xs": P()}, (ROWS,), {}, "w"),
    "by keyword only": (named, {"x": P("dp")}, (ROWS,), {"x": ROWS, "y": ROWS}, "x"),
    "double star, one for all": (others, {"b": P("dp")}, (ROWS,), {"x": ROWS, "w": ROWS}, "w_1 x"),
    "double star, each": (others, {"b": {"x": P("dp"), "y": P()}}, (ROWS,), dict(x=ROWS, y=1), "x"),
    "double star, by name": (others, {"x": P("dp"), "b": P()}, (ROWS,), dict(x=ROWS, y=ROWS), "x"),
    "every kind": (
        every,
        {"b": P("dp"), "c": (P(), P("dp")), "d": P(), "e": P(None, "dp")},
        (ROWS, ROWS, ROWS, ROWS),
        {"d": ROWS, "f": ROWS},
        "b c.1 f",
    ),
    "a module": (Scaled(), {"by": P("dp")}, (ROWS,), {"by": ROWS}, "by"),
    "a method": (Scaled().forward, (P("dp"),), (ROWS,), {"by": ROWS}, "x"),
    "partial": (functools.partial(product, ROWS), {"y": P("dp")}, (ROWS, ROWS), {}, "y"),
    "grad": (sf.grad(lambda w, x: (w * x).sum()), {"x": P("dp")}, (ROWS,), {"x": ROWS}, "x"),
}


def outside(fn: Any) -> Any:
    """The function with a transform around it: placements are constraints of it."""
    return sf.jit(lambda *args, **kwargs: fn(*args, **kwargs), backend="aten")


@pytest.mark.parametrize("auto", [False, True], ids=["", "auto"])
@pytest.mark.parametrize("case", BOUND)
def test_placements_bind_to_parameters_as_arguments_do(case: str, auto: bool) -> None:
    fn, placements, args, kwargs, sharded = BOUND[case]
    expected = fn(*args, **kwargs)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        if auto:
            placements = _tree.tree_map(lambda _: sf.auto, placements)
        g = sf.shard(fn, mesh, placements, backend="aten")
        torch.testing.assert_close(sf.full(g(*args, **kwargs)), expected)
        if auto:
            return
        lines = str(g.lower(*args, **kwargs)).replace("%", "").split("\n")
        inputs = [line.split() for line in lines if line.strip().startswith("in ")]
        names = [name.removesuffix(":") for _, name, *rest in inputs if "@" in "".join(rest)]
        assert sorted(names) == sorted(sharded.split())
        inside = outside(g)
        with sf.use_mesh(mesh):
            torch.testing.assert_close(sf.full(inside(*args, **kwargs)), expected)


LACKING: dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any], str]] = {
    "too few": (
        product,
        (P(), P("dp")),
        (ROWS, ROWS, ROWS),
        {},
        "the whole tree: placements lack y",
    ),
    "too many": (
        product,
        (*THREE, P()),
        (ROWS,),
        {"x": ROWS},
        "the whole tree: placements have also [3]; the parameters are (w, x, y)",
    ),
    "another name": (
        product,
        {"z": P()},
        (ROWS,),
        {"x": ROWS},
        "the whole tree: placements have also z; the parameters are (w, x, y)",
    ),
    "by keyword only": (
        named,
        (P(), P("dp")),
        (ROWS,),
        {"x": ROWS},
        "the whole tree: placements have also [1]; the parameters are (w, *, x, y)",
    ),
    "double star": (
        others,
        {0: P()},
        (ROWS,),
        {"x": ROWS},
        "the whole tree: placements have also 0; the parameters are (w, **b)",
    ),
    "star": (sums, (P(), P()), (ROWS, ROWS, ROWS), {}, "xs: placements lack [1]"),
    "below": (others, {"b": {"x": P()}}, (ROWS,), dict(x=ROWS, y=ROWS), "b: placements lack ['y']"),
}


@pytest.mark.parametrize("way", ["shard", "shard_map", "inside"])
@pytest.mark.parametrize("case", LACKING)
def test_placements_that_do_not_bind_name_the_argument(case: str, way: str) -> None:
    fn, placements, args, kwargs, text = LACKING[case]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        make = sf.shard_map if way == "shard_map" else sf.shard
        g = make(fn, mesh, placements, P(), backend="aten")
        with pytest.raises(sf.TreeError) as caught, sf.use_mesh(mesh):
            (outside(g) if way == "inside" else g)(*args, **kwargs)
        assert text in str(caught.value).split("\n  "), caught.value


@pytest.mark.parametrize("placements", [(P("dp"), P()), {"x": P("dp"), "w": P()}, {"x": P("dp")}])
def test_placements_of_shard_map_bind_as_those_of_shard(placements: Any) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        g = sf.shard_map(lambda x, w: x @ w, mesh, placements, P("dp"))
        with sf.use_mesh(mesh):
            for call in (g, outside(g)):
                for args, kwargs in (((ROWS, ROWS.T), {}), ((ROWS,), {"w": ROWS.T})):
                    torch.testing.assert_close(sf.full(call(*args, **kwargs)), ROWS @ ROWS.T)
                torch.testing.assert_close(sf.full(call(w=ROWS.T, x=ROWS)), ROWS @ ROWS.T)


def test_an_argument_lives_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 1)
    for fits in ("cuda:1", "meta"):
        _check_device(torch.device(fits), "cuda")
    with pytest.raises(ValueError, match="the tensor is on cpu, but the mesh is over cuda"):
        _check_device(torch.device("cpu"), "cuda")
    with pytest.raises(ValueError) as caught:
        _check_device(torch.device("cuda:0"), "cuda")
    said = "the tensor is on cuda:0, but this rank's device is cuda:1; "
    assert str(caught.value).startswith(said)
    assert "torch.cuda.set_device(number) first" in str(caught.value)


def _of_params(params: Any, x: torch.Tensor) -> torch.Tensor:
    return x * params["w"]


ONES = torch.ones(2)
OTHER_TREES = {
    "another key": (
        ({"v": ONES}, ONES),
        ["params['w']: missing", "params['v']: the program has no such leaf"],
    ),
    "too few": (({"w": ONES},), ["x: missing"]),
    "too many": (({"w": ONES}, ONES, ONES), ["args[2]: the program has no such leaf"]),
    "another container": (
        ([ONES], ONES),
        ["params['w']: missing", "params[0]: the program has no such leaf"],
    ),
    "a tensor for a dict": (
        (ONES, ONES),
        ["params['w']: missing", "params: the program has no such leaf"],
    ),
}


@pytest.mark.parametrize("case", OTHER_TREES)
def test_another_tree_is_refused_leaf_by_leaf(case: str) -> None:
    args, wanted = OTHER_TREES[case]
    compiled = sf.jit(_of_params, backend="aten").compile({"w": ONES}, ONES)
    with pytest.raises(
        sf.TreeError, match="the arguments differ from those that the program was compiled for"
    ) as error:
        compiled(*args)
    lines = str(error.value).split("\n")[1:]
    assert [line.strip() for line in lines[: len(wanted)]] == wanted
    assert "PyTreeSpec" not in str(error.value)
