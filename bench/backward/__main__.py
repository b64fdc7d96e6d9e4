"""A training step by `loss.backward()` through a call, next to bucketed_grad in one program and to
torch.compile, on one device: processor time of one thread, float32.

    python -m bench.backward [WIDTH]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardfn as sf
from bench.timing import times

ROUNDS, LAYERS, ROWS = 40, 4, 128
OURS, ONE, COMPILED = ("loss.backward() through jit", "bucketed_grad", "torch.compile")
Step = Callable[[], Any]


def loss_fn(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A network of equal layers; x (ROWS, width)."""
    for w in params:
        x = nn.functional.gelu(x @ w)
    return x.square().mean()


def by_backward(fn: Callable[..., Any], params: list[torch.Tensor], x: Any) -> Any:
    """The gradients that autograd accumulates."""
    for w in params:
        w.grad = None
    fn(params, x).backward()
    return [w.grad for w in params]


def steps(width: int) -> dict[str, Step]:
    """The step of each, which returns the gradients."""
    generator = torch.Generator().manual_seed(0)
    scale = width**-0.5
    weights = [torch.randn(width, width, generator=generator) * scale for _ in range(LAYERS)]
    x = torch.randn(ROWS, width, generator=generator)
    leaves = [w.clone().requires_grad_() for w in weights]
    program: Any = sf.jit(sf.bucketed_grad(loss_fn))
    compiled = torch.compile(loss_fn, fullgraph=True, dynamic=False)
    return {
        OURS: functools.partial(by_backward, sf.jit(loss_fn), leaves, x),
        ONE: lambda: program(weights, x)[1],
        COMPILED: functools.partial(by_backward, compiled, leaves, x),
    }


def main() -> None:
    """Print the median milliseconds of each, and its ratio to bucketed_grad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("width", type=int, nargs="?", default=512)
    torch.set_num_threads(1)
    every = steps(parser.parse_args().width)
    first, *others = [step() for step in every.values()]
    for found in others:
        torch.testing.assert_close(found, first)
    medians = times(every, ROUNDS)
    for name, seconds in medians.items():
        ratio = seconds / medians[ONE]
        print(f"{name:30} {seconds * 1e3:8.2f} ms  {ratio:5.2f} of {ONE}")


if __name__ == "__main__":
    main()
