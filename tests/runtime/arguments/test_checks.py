"""Checks of a call's arguments: what is refused, by its path, and what to pass in its place."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import shardfn as sf
from shardfn import _compat, _tree
from shardfn.capture.dtensors.checks import NeedsRanks
from shardfn.runtime.arguments import checks
from shardfn.runtime.options import Request
from shardfn.simulated import SimulatedTensor
from tests.compat.dynamo.test_shells import Scaled
from tests.test_tree import Box

X = torch.ones(2, 3)
W = torch.ones(2, requires_grad=True)


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


def test_a_call_is_bound_as_python_binds_it() -> None:
    options = {"static_argnums": (1,), "donate_argnums": (0,)}
    assert checks.check_call(request(**options), (X, 3), {}) == ([1], [0])
    assert checks.check_call(request(), (X,), {"k": 3}) == ([], [])
    text = refused(sf.TreeError, lambda: checks.check_call(request(), (), {}))
    assert text.startswith("f: missing a required argument: 'x'")
    assert "try: the arguments of (x: 'Any', y: 'Any' = None, *, k: 'Any' = 1)" in text


def test_tensors_constants_and_functions_are_taken() -> None:
    partial = functools.partial(fn, 1)
    functions = [fn, len, torch.sin, X.sin, partial, functools.lru_cache(fn), int]
    leaves({"w": X, "n": 3, "t": None}, ["a", 2.0, torch.float32, 1j, *functions])
    leaves(sf.ShapeDtype((2,), torch.float32))
    leaves(object(), static=[0])


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


def test_numpys_texts_are_refused() -> None:
    assert "a numpy.str_" in refused(sf.TreeError, lambda: leaves(np.str_("a")))


def test_self_is_told_of_bound_methods() -> None:
    call = lambda: checks.check_leaves(request(), [object()], ["self"], set())
    text = refused(sf.TreeError, call)
    assert "the transform of the bound method" in text and "static_argnums=0" in text


def test_gradients_and_tangents_that_would_be_lost() -> None:
    text = refused(sf.ShardError, lambda: leaves([W]))
    assert text.startswith("f, argument x[0]: it requires grad, and autograd would not")
    assert "pass x.detach(), or call it under torch.no_grad()" in text
    with torch.no_grad():
        leaves([W])
    leaves([W], of=request(differentiated=lambda fn, followed: fn))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, X)
        assert "tangent" in refused(sf.ShardError, lambda: leaves(dual))
        leaves(X)


def test_held_tensors_that_require_grad_are_refused_by_their_owner() -> None:
    held = Scaled(X, torch.ones(1), None).requires_grad_()
    call = lambda: checks.check_holders(request(), (X,), {"k": [held]})
    text = refused(sf.ShardError, call)
    assert text.startswith("f, argument k[0]: it requires grad")
    checks.check_holders(request(), (X,), {"k": [Scaled(X, X, None)]})


class Odd(torch.Tensor):
    pass


def test_other_subclasses_and_traced_values_are_refused() -> None:
    text = refused(sf.TreeError, lambda: leaves(X.as_subclass(Odd)))
    assert "a Odd, a subclass of torch.Tensor" in text
    assert "x.as_subclass(torch.Tensor)" in text
    with _compat.fake_mode() as mode:
        fake = mode.from_tensor(X)
    assert "f, argument x" in refused(sf.ShardError, lambda: leaves(fake))


def test_each_ranks_own_tensors_need_the_code_of_one_rank() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        own = SimulatedTensor([X, X + 1], 0)
        of = request(mesh=mesh, may_be_of_ranks=True)
        with pytest.raises(NeedsRanks) as caught:
            leaves(own, of=of)
        assert caught.value.mesh == mesh and not caught.value.is_for_good
        text = refused(sf.TreeError, lambda: leaves(own, of=request(mesh=mesh)))
        assert "a SimulatedTensor, the local tensors of 2 ranks" in text
        assert "sf.from_local(x, mesh, placements)" in text


def test_containers_that_dynamo_cannot_read_are_refused() -> None:
    checks.refuse_classes(request(), ({"a": (X, [X])},), {"k": X}, [])
    call = lambda: checks.refuse_classes(request(), (X, [Box(X)]), {}, [])
    text = refused(sf.TreeError, call)
    assert text.startswith("f: y[0] is a Box") and "NamedTuple of its tensors" in text
    checks.refuse_classes(request(), (X, [Box(X)]), {}, [1])


def test_a_run_needs_values() -> None:
    meta = torch.empty(2, device="meta")
    shape = sf.ShapeDtype((2,), torch.float32)
    paths = lambda: [f"x[{i}]" for i in range(9)]
    run = lambda xs: checks.refuse_without_values("f", xs, paths)
    run([X, 3, None])
    text = refused(sf.TreeError, lambda: run([X, meta, *[meta] * 5]))
    assert text.startswith("f: on the meta device, without values: x[1], x[2], x[3], x[4], 2 more")
    text = refused(sf.TreeError, lambda: run([meta, shape]))
    assert text.startswith("f: ShapeDtypes, without values: x[1]")


def test_the_signature_is_that_of_the_users_function() -> None:
    wrapped = lambda *args: None
    asks = Request("f", wrapped, lambda a: a)
    text = refused(sf.TreeError, lambda: checks.check_call(asks, (1, 2), {}))
    assert "too many positional arguments" in text
    assert str(inspect.signature(lambda a: a)) in text
