"""Checks of a call's arguments: what is refused, by its path, and what to pass in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shardfn as sf
from shardfn import _tree
from shardfn.runtime.arguments import checks
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
    checks.check_leaves(of or request(), every, list(paths), set(static))


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
    checks.refuse_classes(request(), ({"a": (X, [X])},), {"k": X}, [])
    call = lambda: checks.refuse_classes(request(), (X, [Box(X)]), {}, [])
    text = refused(sf.TreeError, call)
    assert text.startswith("f: y[0] is a Box") and "NamedTuple of its tensors" in text
    checks.refuse_classes(request(), (X, [Box(X)]), {}, [1])
