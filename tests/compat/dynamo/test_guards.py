"""Where the values stand that Dynamo read outside of the arguments, by its own sources."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import source as of
from torch.distributed.tensor import Shard

import shardfn as sf
from shardfn._compat.dynamo import guards
from shardfn._compat.dynamo.guards import Itself, Read, outside_reads, tensor_guards

FN = of.LocalSource("fn")
SCOPE = {"__import_math": SimpleNamespace(__name__="math"), "___unnamed_scope": {}}


def path(source: Any) -> Any:
    return guards._path(source, SCOPE)


PATHS: dict[str, tuple[Any, Any]] = {
    "an attribute": (of.AttrSource(FN, "scale"), [("attr", "scale")]),
    "an item": (of.GetItemSource(of.AttrSource(FN, "xs"), 2), [("attr", "xs"), ("item", 2)]),
    "a default": (of.DefaultsSource(FN, 1), [("attr", "__defaults__"), ("item", 1)]),
    "the class": (of.TypeSource(FN), [("type", None)]),
    "an array": (of.NumpyTensorSource(of.AttrSource(FN, "a")), [("attr", "a"), ("array", None)]),
    "a value by its number": (
        of.DictGetItemSource(FN, of.ConstDictKeySource(FN, 3)),
        [("value", 3)],
    ),
    "a key": (of.ConstDictKeySource(FN, 3), [("key", 3)]),
}


@pytest.mark.parametrize("name", PATHS)
def test_the_steps_from_the_function(name: str) -> None:
    source, steps = PATHS[name]
    assert path(source) == (("fn", None), *steps)


def test_roots_are_the_function_modules_and_globals_without_one() -> None:
    assert path(FN) == (("fn", None),)
    assert path(of.GlobalSource("__import_math")) == (("module", "math"),)
    scope = SCOPE["___unnamed_scope"]
    assert path(of.GlobalSource("___unnamed_scope")) == (("scope", Itself(scope)),)
    assert path(of.GlobalSource("other")) is None


def test_arguments_are_no_reads() -> None:
    assert path(of.LocalSource("args")) is None
    assert path(of.AttrSource(of.LocalSource("args"), "x")) is None
    assert path(of.ConstantSource("c")) is None


def test_objects_are_compared_by_identity() -> None:
    one, other = [1], [1]
    assert Itself(one) == Itself(one) and Itself(one) != Itself(other)
    assert len({Itself(one), Itself(one), Itself(other)}) == 2
    assert Itself(one) != one


def guard(create: Any, source: Any) -> Any:
    return SimpleNamespace(create_fn=create, originating_source=source)


def CONSTANT_MATCH() -> None: ...


def DUPLICATE_INPUT(*, source_b: Any) -> None: ...


def DICT_CONTAINS(*, key: Any) -> None: ...


def test_reads_have_the_kind_and_the_key_of_their_guard_once() -> None:
    a, b = of.AttrSource(FN, "a"), of.AttrSource(FN, "b")
    every = [
        guard(CONSTANT_MATCH, a),
        guard(CONSTANT_MATCH, a),
        guard(CONSTANT_MATCH, of.LocalSource("args")),
        guard(functools.partial(DICT_CONTAINS, key="k"), b),
        guard(functools.partial(DUPLICATE_INPUT, source_b=b), a),
    ]
    graph = SimpleNamespace(guards=every)
    out = SimpleNamespace(graph_capture_output=SimpleNamespace(output_graph=graph))
    at = lambda name: (("fn", None), ("attr", name))
    assert outside_reads(out, SCOPE) == (
        Read(at("a"), "CONSTANT_MATCH", None),
        Read(at("b"), "DICT_CONTAINS", "k"),
        Read(at("a"), "DUPLICATE_INPUT", None),
        Read(at("b"), "DUPLICATE_INPUT", None),
    )


def test_tensors_are_the_same_in_all_that_a_program_depends_on() -> None:
    x, y = torch.ones(2, 3), torch.ones(4)
    check = tensor_guards([x, y])
    assert check(x + 1, y * 2)
    others = [x.double(), torch.ones(3, 2), torch.ones(3, 2).t(), x.clone().requires_grad_()]
    assert [bool(check(other, y)) for other in others] == [False] * 4
    assert not check(y, x) and not check(x.to("meta"), y)


@pytest.mark.parametrize("answer", [True, None, "name", 3, (1, (2, "a")), [1], object()])
def test_constants_of_our_functions_have_no_source(answer: Any) -> None:
    made: list[Any] = []

    def call(tx: Any, fn: Any, *args: Any) -> str:
        made.append(fn(*args))
        return "torch's"

    with pytest.MonkeyPatch.context() as patch:
        build = lambda tx, x: ("ours", x)
        patch.setattr("torch._dynamo.variables.base.VariableTracker.build", build)
        found = guards.without_source(call, "tx", lambda n: answer, 1)
    is_plain = not isinstance(answer, list) and type(answer) is not object
    assert found == (("ours", answer) if is_plain else "torch's")
    assert made == [answer]


def test_s7_4_answers_of_our_functions_are_results_beside_placements() -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        outside = dist.distributed_c10d._rank_not_in_group
        fn = lambda x: (
            x * mesh.get_rank(),
            [outside(None), mesh.size(), dist.get_process_group_ranks(None)],
            Shard(0),
        )
        out = sf.jit(fn, backend="aten")(torch.ones(2))
        assert out[1:] == ([False, 2, [0, 1]], Shard(0))
