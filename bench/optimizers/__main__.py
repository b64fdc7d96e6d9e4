"""A compiled step of `sf.optim(AdamW)` of 300 parameters, next to torch's fused AdamW, eager and
compiled. The arguments are donated, as a training loop donates them.

    python -m bench.optimizers [WIDTH]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import shardfn as sf
from shardfn.compile.native import load_native
from shardfn.runtime import cache

COUNT, ROUNDS = 300, 15


def tree(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Parameters: square and wide matrices, and vectors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(width, width), (width,), (width, 4 * width)]
    return {f"p{i}": torch.randn(shapes[i % 3], generator=generator) for i in range(COUNT)}


def ours(width: int, grads: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A step of shardfn's."""
    opt, lr = sf.optim(torch.optim.AdamW, lr=1e-3), torch.tensor(1e-3).double()
    step: Any = sf.jit(lambda p, s, g, lr: opt.update(p, g, s, lr=lr), donate_argnums=(0, 1))
    params = tree(width, 0)
    held = [params, opt.init(params)]
    del params

    def run() -> None:
        held[:] = step(held.pop(0), held.pop(0), grads, lr)

    return run


def torchs(width: int, grads: dict[str, torch.Tensor], **options: Any) -> Any:
    """A step of torch's."""
    params = list(tree(width, 0).values())
    for p, g in zip(params, grads.values(), strict=True):
        p.grad = g
    return torch.optim.AdamW(params, **options).step


def main() -> None:
    """Print the median and the least seconds of each, all of them in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("width", type=int, nargs="?", default=256)
    width = parser.parse_args().width
    torch.set_num_threads(1)
    loading = load_native()
    if loading is not None:
        loading.join()
    grads = tree(width, 1)
    fused = torchs(width, grads, lr=1e-3, fused=True)
    steps = {
        "sf.jit(optim(AdamW))": ours(width, grads),
        "torch.optim.AdamW(fused=True)": fused,
        "the same, torch.compile": torch.compile(torchs(width, grads, lr=1e-3, fused=True)),
    }
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        step()
        print(f"{name}: the first two calls {time.perf_counter() - start:.1f} s")
    before = dict(cache.counts)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    assert dict(cache.counts) == before, "something was captured while the clock ran"
    base = statistics.median(taken["the same, torch.compile"])
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(
            f"{name}: {1e3 * median:.1f} ms, at least {1e3 * min(seconds):.1f} ms, "
            f"{median / base:.2f} of compiled"
        )


if __name__ == "__main__":
    main()
