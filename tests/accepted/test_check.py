"""Arguments of wrong types: one table says what each parameter takes, and every refusal names the
function and the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn import P
from shardfn.accepted import accept
from shardfn.accepted.kinds import ARGUMENTS
from tests.faults import bad_methods
from tests.faults.bad_arguments import Odd, failures

X = torch.ones(3)
LIB: Any = sf  # called with wrong types
with sf.fake_world(2):
    OBJECTS = bad_methods.objects(sf.make_mesh((2,), ("dp",)))
OBJECTS += bad_methods.outside()
METHODS = bad_methods.methods(OBJECTS)
OWNERS = [*{type(x): x for x in OBJECTS}, sf.schedules]
ROWS = [(name, p) for name, rows in ARGUMENTS.items() for p in rows]


@pytest.mark.parametrize(("function", "parameter"), ROWS)
def test_every_row_refuses_by_name(function: str, parameter: str) -> None:
    owner, _, method = function.rpartition(".")
    owners = [x for x in OWNERS if x.__name__.rpartition(".")[2] == owner] if owner else [sf]
    (called,) = (getattr(x, method) for x in owners if hasattr(x, method))
    parameters = inspect.signature(called).parameters
    assert parameter in parameters or f"{parameter}s" in parameters
    kind = ARGUMENTS[function][parameter]
    with pytest.raises(sf.ShardError) as error:
        accept(function, **{parameter: Odd()})
    head, source, needed, fix = str(error.value).splitlines()
    assert head == (
        f"{function}, {parameter}: {parameter} is Odd(), a Odd, and must be {kind.needed}"
    )
    assert source.startswith(f"  at: {__file__}:")
    assert (needed, fix) == (f"  needed: {kind.needed}", f"  try: {kind.fix}")
    assert error.value.arg_path == parameter


def test_all_wrong_arguments_are_listed_at_once() -> None:
    with pytest.raises(sf.ShardError) as error:
        LIB.check(torch.sin, X, worlds=[None], rtol=-1, atol="0")
    assert str(error.value).splitlines()[:3] == [
        "check, worlds: worlds is [None], a list, and must be a tuple of numbers of ranks, or "
        "of dicts from axis names to sizes",
        "  rtol is -1, a int, and must be a number, 0 or more",
        "  atol is '0', a str, and must be a number, 0 or more",
    ]


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(sf.ShardError) as error:
        LIB.ShapeDtype("x" * 200)
    assert f"shape is '{'x' * 56}..., a str, and must be" in str(error.value)


NODE = LIB.ShapeDtype((3,))
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "tree_map": (lambda: LIB.tree_map(3, {}), "tree_map, fn: fn is 3, a int"),
    "compose": (lambda: LIB.compose(sf.grad, P()), "compose, transform: transform is P()"),
    "pin": (
        lambda: LIB.pin(torch.nn.Linear(1, 1), "x"),
        "pin, outputs: outputs is 'x', a str",
    ),
    "functionalize": (
        lambda: LIB.functionalize(torch.nn.Linear(1, 1), share=X),
        "functionalize, share: share is tensor([1., 1., 1.]), a Tensor",
    ),
    "dtype": (lambda: LIB.ShapeDtype((2,), float), "ShapeDtype, dtype: dtype is"),
    "norm": (
        lambda: LIB.clip_by_global_norm(X, "1"),
        "clip_by_global_norm, max_norm: max_norm is '1', a str",
    ),
    "integers": (
        lambda: LIB.clip_by_global_norm({"w": X.long()}, 1.0),
        "clip_by_global_norm, grads: ['w'] is torch.int64",
    ),
    "pull": (lambda: LIB.vjp(torch.sin, X, has_aux=1), "vjp, has_aux: has_aux is 1, a int"),
    "pair": (
        lambda: LIB.vjp(lambda x: x.sum(), X, has_aux=True),
        "<lambda>: it returns a Tensor",
    ),
    "linearize": (lambda: LIB.linearize(X, X), "linearize, fn: fn is tensor("),
    "residuals": (lambda: LIB.saved_residuals(1), "saved_residuals, fn: fn is 1, a int"),
    "shapes": (lambda: sf.jit(torch.sin)(NODE), "ShapeDtypes have no values: "),
    "a device": (
        lambda: LIB.make_mesh((2,), ("a",), torch.device("cpu")),
        "make_mesh, device_type: device_type is device(type='cpu'), a device",
    ),
    "no such device": (
        lambda: LIB.loss_scale().init(device="cuda:77"),
        "LossScale.init, device: device is 'cuda:77', a str, and must be a device of this machine",
    ),
    "no such number": (
        lambda: LIB.loss_scale().init(device=77),
        "LossScale.init, device: device is 77, a int, and must be a device of this machine, or N",
    ),
    "a backend that torch lacks": (
        lambda: LIB.loss_scale().init(device="hpu"),
        "LossScale.init, device: device is 'hpu', a str, and must be a device of this machine, or",
    ),
    "names": (
        lambda: LIB.make_mesh((1,), ([],)),
        "make_mesh: axis names [[]]",
    ),
    "a number": (
        lambda: LIB.distribute({"n": 7}, LIB.make_mesh((2,), ("a",)), P("a")),
        "['n']: the leaf is 7, a int, but P('a') is for a tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_public_functions_refuse_by_name(call: str) -> None:
    refused, wanted = CALLS[call]
    with sf.fake_world(2), pytest.raises(sf.ShardError) as error:
        refused()
    assert wanted in str(error.value)


def test_every_method_of_what_public_functions_return_is_tried() -> None:
    assert bad_methods.returned() - METHODS.keys() == set()


def test_a_method_refuses_by_name() -> None:
    train = sf.jit(torch.sin, backend="aten")
    with pytest.raises(sf.ShardError, match="^Lowered.certify: hardware is 'H1000'"):
        train.lower(X).certify("H1000")
    assert train.lower(X).certify("H100").holds


def test_random_bad_arguments_meet_named_errors() -> None:
    """`make fuzz` tries as many as you like."""
    tried, failed = failures(seed=5, count=3)
    assert tried > 500 and not failed
