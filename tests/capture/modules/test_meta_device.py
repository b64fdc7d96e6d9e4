"""Modules on the meta device: staged at any size without memory, and refused by name to run."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardfn as sf
from shardfn import P

ON_META = torch.device("meta")
RANKS = 64
FIX = (
    "make the values by sf.init(module_fn, mesh, placements, key) or "
    "module.to_empty(device=...); .trace and .lower need no values"
)


def small(device: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    with torch.device(device):
        return sf.functionalize(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))


def as_shapes(tree: Any) -> Any:
    return sf.tree_map(lambda x: sf.ShapeDtype(tuple(x.shape), x.dtype), tree)


@pytest.mark.parametrize("given", [lambda tree: tree, as_shapes], ids=["meta", "shapes"])
def test_programs_are_those_of_a_module_with_values(given: Callable[[Any], Any]) -> None:
    texts = []
    for device in ("cpu", "meta"):
        fn, params, buffers = small(device)
        loss = lambda p, x, fn=fn, b=buffers: fn(p, b, x)[0].square().sum()
        if device == "meta":
            params = given(params)
        x = sf.ShapeDtype((4 * RANKS, 6))
        with sf.fake_world(RANKS, numerics=False):
            step = sf.shard(sf.bucketed_grad(loss), sf.make_mesh((RANKS,), ("dp",)), (P(), P("dp")))
            lowered = step.lower(params, x)
            texts.append((str(step.trace(params, x)), str(lowered), str(lowered.plan)))
    assert texts[0] == texts[1]


def test_backward_lowers_without_values() -> None:
    fn, params, buffers = small("meta")
    loss = lambda p, x: fn(p, buffers, x)[0].square().sum()
    leaves = {k: x.requires_grad_() for k, x in params.items()}
    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS,), ("dp",))
        step = sf.shard(loss, mesh, (P("dp"), P("dp")))
        lowered = step.lower(leaves, torch.empty(4 * RANKS, 6, device="meta"))
    kinds = {c.kind for c in lowered.backward.collectives}
    assert "reduce_scatter" in kinds


def run_arguments() -> Any:
    fn, params, buffers = small("meta")
    return fn(params, buffers, torch.ones(4, 6))


def run_closed_over() -> Any:
    fn, _, buffers = small("meta")
    _, values, _ = small("cpu")
    return sf.grad(lambda p, x: fn(p, buffers, x)[0].sum())(values, torch.ones(4, 6))


def run_compiled() -> Any:
    x = torch.ones(2)
    return sf.jit(lambda x: x * 2, backend="aten").compile(x)(x.to("meta"))


RUNS = {
    "arguments": (
        run_arguments,
        "functionalize(Sequential): tensors on the meta device have no values: "
        "params['0.weight'], params['0.bias'], params['1.weight'], params['1.bias'], 3 more",
    ),
    "closed over": (
        run_closed_over,
        "grad(<lambda>): tensors on the meta device have no values: buffers['1.running_mean'], "
        "buffers['1.running_var'], buffers['1.num_batches_tracked']",
    ),
    "a compiled program": (
        run_compiled,
        "compiled jit(<lambda>): tensors on the meta device have no values: x",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_running_is_refused_by_name(case: str) -> None:
    run, wanted = RUNS[case]
    with pytest.raises(sf.TreeError) as caught:
        run()
    assert str(caught.value).splitlines()[0] == wanted
    assert caught.value.fix == FIX


def test_values_under_the_same_names_run() -> None:
    fn, *_ = small("meta")
    _, params, buffers = small("cpu")
    wanted, values, held = small("cpu")
    x = torch.ones(4, 6)
    torch.testing.assert_close(fn(params, buffers, x), wanted(values, held, x))


def peak() -> int:
    """The largest memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_large_llama_is_lowered_without_its_memory() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        attn_implementation="eager",
    )
    with ON_META:
        model = transformers.LlamaForCausalLM(config).eval()
    fn, params, buffers = sf.functionalize(model)
    assert list(params) == [name for name, _ in model.named_parameters()]
    nbytes = sum(x.nbytes for x in params.values())
    assert nbytes > 11 * 2**30
    before = peak()

    def loss(p: Any, ids: torch.Tensor) -> torch.Tensor:
        out, _ = fn(p, buffers, input_ids=ids, use_cache=False)
        return out.logits.square().mean()

    with sf.fake_world(RANKS, numerics=False):
        mesh = sf.make_mesh((RANKS,), ("dp",))
        ids = sf.ShapeDtype((RANKS, 128), torch.int64)
        step = sf.shard(sf.value_and_grad(loss), mesh, (P("dp"), P("dp")))
        lowered = step.lower(params, ids)
        assert "reduce_scatter" in str(lowered)
    assert peak() - before < nbytes // 20
