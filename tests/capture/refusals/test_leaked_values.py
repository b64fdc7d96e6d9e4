"""What hooks store while a module is captured: once for each capture, and with a name at every
later use.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import close
from torch import Tensor, nn

import shardfn as sf

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
HERE = re.compile(re.escape(__file__) + r":\d+")


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(sf.CaptureError) as caught:
        call()
    return HERE.sub("HERE", str(caught.value))


def loss_of(module: nn.Module) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """(params, x) -> the sum of what the module returns."""
    fn, params, buffers = sf.functionalize(module)
    return lambda p, x: fn(p, buffers, x)[0].sum(), params


class Saver:
    """A hook that keeps what it sees, in every way."""

    last: Any = None

    def __init__(self) -> None:
        self.outs: list[Any] = []
        self.by_name: dict[str, Any] = {}

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.last = out
        self.outs.append((out, 3))
        self.by_name["out"] = out


def test_what_a_hook_stores_says_where_it_comes_from_when_it_is_used() -> None:
    saver, fired, count = Saver(), [], 0

    def counts(module: nn.Module, inputs: Any, outputs: Any) -> None:
        nonlocal count
        count += 1
        fired.append(outputs[0])

    module = nn.Linear(3, 2).double()
    module.register_forward_hook(saver.hook)
    module.register_full_backward_hook(counts)
    loss, params = loss_of(module)
    step = sf.grad(loss)
    for _ in range(2):
        step(params, X)
    assert (len(saver.outs), len(fired), count) == (1, 1, 1)  # once for each capture
    said = (
        "the tensor was stored during a capture, and has no value after the capture\n  "
        "needed: a tensor with a value"
    )
    fix = "return the value from the function that computes it"
    stored = saver.last, saver.outs[0][0], saver.by_name["out"], fired[0]
    uses = [
        lambda x: x + 1,
        lambda x: x.sum(),
        lambda x: x.tolist(),
        bool,
        torch.func.grad(torch.sum),
    ]
    for x in stored:
        assert repr(x) == "LeakedTensor(from functionalize(Linear))" and x.shape in ((4, 2),)
        for use in uses:
            assert (
                refusal(lambda x=x, use=use: use(x))
                == f"functionalize(Linear): {said}\n  try: {fix}"
            )
        assert (
            refusal(lambda x=x: sf.grad(torch.sum)(x))
            .splitlines()[0]
            .endswith(f"argument args[0]: {said.splitlines()[0]}")
        )
        text = refusal(lambda x=x: sf.grad(lambda w: (w * x.sum()).sum())(X))
        assert (
            text.splitlines()[0]
            == "grad(<lambda>): the function uses a traced value that an earlier call stored"
        )


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    seen: list[Any] = [0]
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2)).double()
    module[0].register_forward_hook(lambda m, a, out: seen.append(out))
    loss, params = loss_of(module)
    refusal(lambda: sf.grad(loss)(params, X))
    assert seen == [0]


def test_what_hooks_tell_each_other_in_a_call_reaches_them() -> None:
    said: list[Any] = []
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    module[0].register_forward_hook(lambda m, a, out: said.append(out))
    module[1].register_forward_hook(lambda m, a, out: out * said.pop())
    fn, params, buffers = sf.functionalize(module)
    got = fn(params, buffers, X)[0]
    close(got, module(X).detach())
    assert not said


class Makers(OrderedDict[str, Any]):
    """A table whose reads make objects, as Hugging Face's activations."""

    def __getitem__(self, key: str) -> Any:
        made = super().__getitem__(key)()
        made.scale = nn.Parameter(torch.ones(()))  # refused under torch.func
        return made


MAKERS = Makers(tanh=nn.Tanh, gelu=nn.GELU)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kind = OrderedDict.__getitem__(MAKERS, "tanh")
        return kind()(x) if self.training else x[x > 0]


def test_tables_that_make_what_is_read_are_read_and_restored_as_they_are() -> None:
    module = Reads()
    fn, _, _ = sf.functionalize(module)
    sf.grad(lambda x: fn({}, {}, x)[0].sum())(X)
    module.eval()
    assert "depends on the values of tensors" in refusal(lambda: sf.jit(lambda x: fn({}, {}, x))(X))
    assert list(OrderedDict.values(MAKERS)) == [nn.Tanh, nn.GELU]
