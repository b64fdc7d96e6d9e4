"""The arguments of a call: what is refused, by its path, where they lie, and how they differ from
those of a program.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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
    "static_argnums of jit or shard; or close over the slice": slice(3),
    "torch.as_tensor(x); or x.item() for a constant": np.ones(2),
    "torch.as_tensor(x) for arrays; a dict, list": Called(),
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
    assert text.startswith("f: y[0] is a Box") and "NamedTuple of its tensors" in text
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


def test_a_missing_placement_names_the_argument() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        with pytest.raises(sf.TreeError, match="the whole tree: placements lack y"):
            sf.shard(product, mesh, (P(), P("dp")))(ROWS, ROWS, ROWS)


def test_placements_by_name_inside_of_another_transform() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        for placements in (THREE, {"w": P(), "x": P("dp")}):
            g = sf.shard(product, mesh, placements)
            got = sf.full(sf.jit(lambda x, g=g: g(x, x, y=x))(ROWS))
            torch.testing.assert_close(got, product(ROWS, ROWS, ROWS))


def test_an_argument_lives_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_current", lambda: 1)
    for fits in ("cuda:1", "meta"):
        _check_device(torch.device(fits), "cuda")
    with pytest.raises(ValueError, match="it lives on cpu, and the mesh is over cuda"):
        _check_device(torch.device("cpu"), "cuda")
    with pytest.raises(ValueError) as caught:
        _check_device(torch.device("cuda:0"), "cuda")
    said = "it lives on cuda:0, and this rank's device is cuda:1; "
    assert str(caught.value).startswith(said)
    assert "torch.cuda.set_device(number) before" in str(caught.value)


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
    with pytest.raises(sf.TreeError, match="other arguments") as error:
        compiled(*args)
    lines = str(error.value).split("\n")[1:]
    assert [line.strip() for line in lines[: len(wanted)]] == wanted
    assert "PyTreeSpec" not in str(error.value)
