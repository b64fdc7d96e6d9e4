"""Where Dynamo stops: calls, classes and attributes that a captured function may not use."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import UserError
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

import shardfn as sf
from shardfn._compat.dynamo import generators, refused
from tests.compat.dynamo.test_shells import Scaled

X, S = torch.ones(2, 3), torch.ones(1)


class Odd(torch.Tensor):
    pass


def stops(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_functions_of_dtensors_are_refused_but_those_that_dynamo_reads() -> None:
    assert refused.makes_dtensors(distribute_tensor)
    assert not refused.makes_dtensors(Shard)
    assert not refused.makes_dtensors(ColwiseParallel)
    assert not refused.makes_dtensors(torch.sin)
    assert not refused.makes_dtensors(3)

    def mine() -> None: ...

    assert not refused.makes_dtensors(mine)
    assert refused.outside_only(mine) is mine and refused.makes_dtensors(mine)
    assert refused.refusal(mine) == refused.MAKES_DTENSOR
    assert refused.makes_dtensors(sf.distribute)


def test_why_a_call_is_refused() -> None:
    assert refused.refusal(Odd) == f"{refused.MADE} Odd;"
    gather = functional.all_gather_tensor
    assert refused.refusal(gather) == f"{refused.COMMUNICATES} all_gather_tensor;"
    assert refused.refusal(torch.sin) is None and refused.refusal(Shard) is None
    assert stops(refused.refuse_call, Odd, (), {}).startswith(refused.MADE)
    text = stops(refused.refuse_call, torch.manual_seed, (), {})
    assert text.startswith(generators.READS_GENERATOR)
    refused.refuse_call(torch.sin, (), {})


def test_questions_for_the_rank_are_refused() -> None:
    call = lambda function, *args: ("called", *args)
    rank = SimpleNamespace(value=dist.get_rank)
    text = stops(refused.rank_call_refused, call, rank)
    assert text.startswith(refused.ASKS_RANK)
    size = SimpleNamespace(value=dist.get_world_size)
    assert refused.rank_call_refused(call, size, 1) == ("called", 1)
    method = lambda owner, tx, name, *args: name
    for name in refused.RANK:
        assert stops(refused.rank_method_refused, method, None, None, name)
    assert refused.rank_method_refused(method, None, None, "size") == "size"


def test_a_context_variable_is_refused_unless_it_is_torchs() -> None:
    read = lambda variable, tx, *args: "value"
    tx = lambda module: SimpleNamespace(f_globals={"__name__": module})
    variable = contextvars.ContextVar("v")
    assert refused.context_refused(read, variable, tx("torch.a")) == "value"
    for module in ("user", "torchlike"):
        text = stops(refused.context_refused, read, variable, tx(module))
        assert refused.READS_CONTEXT in text


@pytest.fixture(name="followed")
def _followed() -> Iterator[Any]:
    """A tensor that holds others, as vmap follows it."""
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield torch._C._functorch._add_batch_dim(X, 0, level)
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def test_parts_of_a_followed_tensor_are_refused(
    followed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused.refuse_attribute(followed, "data_")
    held = Scaled(X, S, None)
    refused.refuse_attribute(held, "data_")
    monkeypatch.setattr(refused, "unwrapped", lambda x: held)
    text = stops(refused.refuse_attribute, followed, "data_")
    assert text.startswith(f"{refused.FOLLOWED} Scaled for its .data_;")
    refused.refuse_attribute(followed, "note")
    refused.refuse_attribute(followed, None)
    node = SimpleNamespace(meta={"example_value": followed})
    text = stops(refused.refuse_class_of_followed, node, (Scaled,))
    assert "Scaled for its .__class__;" in text
    refused.refuse_class_of_followed(node, (torch.Tensor, int))


def test_a_class_made_of_followed_tensors_is_refused(followed: Any) -> None:
    given = lambda x: SimpleNamespace(
        proxy=SimpleNamespace(node=SimpleNamespace(meta={"example_value": x}))
    )
    refused.refuse_call(Scaled, [given(X), given(S)], {})
    text = stops(refused.refuse_call, Scaled, [given(X)], {"scale": given(followed)})
    assert text.startswith(f"{refused.MADE_OF_FOLLOWED} Scaled;")


def test_methods_that_take_a_generator_or_make_another_class() -> None:
    call = lambda tensor, tx, name, args, kwargs: name
    method = lambda name, args=(), **kw: refused.method_refused(call, None, None, name, args, kw)
    as_odd = SimpleNamespace(realize=lambda: SimpleNamespace(value=Odd))
    plain = SimpleNamespace(realize=lambda: SimpleNamespace(value=torch.Tensor))
    assert refused.MADE in stops(method, "as_subclass", [as_odd])
    assert method("as_subclass", [plain]) == "as_subclass"
    given = SimpleNamespace(is_python_constant=lambda: False, as_python_constant=lambda: None)
    given.realize = lambda: given
    assert stops(method, "random_", generator=given)
    assert method("random_") == "random_"


def test_closed_over_tensors_of_other_classes_are_refused() -> None:
    wrap = lambda builder, value: "wrapped"
    text = stops(refused.class_refused, wrap, None, X.as_subclass(Odd))
    assert text.startswith(f"{refused.FOREIGN} Odd;")
    assert refused.class_refused(wrap, None, X) == "wrapped"
    assert refused.class_refused(wrap, None, Scaled(X, S, None)) == "wrapped"
    with sf.fake_world(1):
        mesh = sf.make_mesh((1,), ("dp",))
        d = distribute_tensor(X, mesh, [Shard(0)])
        assert isinstance(d, DTensor)
        assert refused.class_refused(wrap, None, d) == "wrapped"


def test_a_collective_that_dynamo_would_rewrite_is_refused() -> None:
    function = SimpleNamespace(fn=dist.all_reduce)
    text = stops(refused.collective_refused, None, function)
    assert text.startswith(f"{refused.COMMUNICATES} all_reduce;")
