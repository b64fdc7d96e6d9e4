"""Locks of whole models: a changed placement, a new op and another cap are each named; a second
capture, another machine and another torch are no difference.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shardfn as sf
from examples import train_llama
from shardfn import P
from shardfn_demo import adamw, gpt, train
from tests.models.test_models import MODELS, _model

CAP = "3KB"


class Variant(NamedTuple):
    """A change of a step: its bucketing, a function of its loss, and its placement."""

    cap: str = "25MB"
    after: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
    first: P = P()  # of the first parameter that has two dims


def in_exp(loss: torch.Tensor) -> torch.Tensor:
    return loss.exp()


Made = tuple[Any, tuple[Any, ...], str]  # a step, its arguments, and the first parameter


def first_of(params: dict[str, Any]) -> str:
    return next(name for name, w in params.items() if w.dim() == 2 and not w.shape[0] % 4)


def demo(variant: Variant, mesh: Any, patch: pytest.MonkeyPatch) -> Made:
    config = gpt.Config(width=8, heads=2, layers=2)
    params = gpt.init(config)
    grad = lambda fn: sf.bucketed_grad(
        lambda *args: variant.after(fn(*args)), cap=variant.cap, first_cap=variant.cap
    )
    specs = {**sf.tree_map(lambda _: P(), params), "tok": variant.first}
    state = {"step": P(), "m": specs, "v": specs}
    tokens = sf.ShapeDtype((8, 6), torch.int64)
    fn = sf.shard(train.step(config, value_and_grad=grad), mesh, (specs, state, P("dp"), P("dp")))
    return fn, (params, adamw.init(params), tokens, tokens), "params['tok']"


def llama_example(variant: Variant, mesh: Any, patch: pytest.MonkeyPatch) -> Made:
    """The example as it stands, where options that it takes from shardfn are others."""
    strategy = sf.strategy
    options = train_llama.arguments(["--layers", "1"])
    capped = functools.partial(sf.bucketed_grad, cap=variant.cap, first_cap=variant.cap)
    patch.setattr(sf, "bucketed_grad", capped)
    if variant.first != P():
        patch.setattr(sf, "strategy", lambda _, *args, **given: strategy("zero1", *args, **given))
    run = train_llama.Run(options, 8)
    language = run.loss
    run.loss = lambda params, tokens: variant.after(language(params, tokens))
    tokens = sf.ShapeDtype((16, 64), torch.int64)
    return run.step, (run.params, run.state, tokens, run.rates.lr), "params['lm_head.weight']"


def of_hub(name: str, variant: Variant, mesh: Any, patch: pytest.MonkeyPatch) -> Made:
    _, loss_of, x = MODELS[name]
    fn, params, buffers = sf.functionalize(_model(name))
    first = first_of(params)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        call = lambda **given: fn(params, buffers, **given)[0]
        return variant.after(loss_of(call, x))

    step = sf.bucketed_grad(loss, cap=variant.cap, first_cap=variant.cap)
    specs = {**sf.tree_map(lambda _: P(), params), first: variant.first}
    return sf.shard(step, mesh, (specs, P("dp"))), (params, x), f"params[{first!r}]"


STEPS: dict[str, Callable[[Variant, Any, pytest.MonkeyPatch], Made]] = {
    "demo": demo,
    "the Llama example": llama_example,
    **{name: functools.partial(of_hub, name) for name in MODELS},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_model_has_the_right_difference_or_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "locks" / "step.json"

    def lock(variant: Variant) -> tuple[sf.BudgetError | None, str]:
        with sf.fake_world(8, numerics=False), pytest.MonkeyPatch.context() as patch:
            fn, args, first = STEPS[name](variant, sf.make_mesh((2, 4), ("dp", "tp")), patch)
            try:
                sf.lock(fn, *args, path=path)
            except sf.BudgetError as error:
                return error, first
        return None, first

    def lines(variant: Variant) -> list[str]:
        error, _ = lock(variant)
        return [line.strip() for line in str(error).splitlines()[1:-2]]

    error, first = lock(Variant())
    assert error is None and path.exists()
    sf.clear_cache()
    error, _ = lock(Variant())
    assert error is None

    placed = lines(Variant(first=P("tp")))
    assert any(re.match(rf"argument {re.escape(first)}.* is f32\[", x) for x in placed), placed

    op = lines(Variant(after=in_exp))
    at = f"tests/proof/test_lock_models.py:{in_exp.__code__.co_firstlineno + 1} now runs exp x 1 "
    assert [x for x in op if x.startswith(at)], op
    assert not [x for x in op if x.startswith("arg") or "bucket" in x or "now runs mm" in x], op

    caps = lines(Variant(cap=CAP))
    assert any(re.match(r"\d+ buckets of \w+\[.*\] \(was \d+\)", x) for x in caps), caps
    assert not [x for x in caps if x.startswith("argument")], caps

    text = path.read_text()
    assert len(text) < 60_000, "a small file"
    fields = {**json.loads(text), "torch": "2.98", "ops": {"x.py::f::y = g(x)": {"an_op": 1}}}
    path.write_text(json.dumps(fields))
    error, _ = lock(Variant())
    assert error is None
