"""Random numbers, `make bench-random`: 100 million uniform ones and a dropout of as many elements,
beside torch and JAX, on one core.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import shardfn as sf
from bench.remat import peak
from bench.timing import times
from shardfn.ops.random_bits import AMBIENT, DRAW, random_bits

N, ROUNDS, RATE = 10**8, 9, 0.1
BYTES = 4 * N  # of a result, in float32
CHECKED = 1000  # elements at each place where values are compared
UNIFORM, DROPOUT = (1.0, 0.6)  # the targets: of torch.rand, of torch's compiled dropout
SMALL = 1 << 20  # bytes that a call may hold besides its result
OURS, EAGER = "sf.random.uniform, compiled", "torch.rand, eager"
OUR_DROPOUT, COMPILED_DROPOUT = "F.dropout in sf.jit", "F.dropout, torch.compile"
JAX = "jax.random.uniform, jit"

Steps = dict[str, Callable[[], Any]]


def on_one_core() -> None:
    """Keep this process, and every thread that it starts, on one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux only
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def uniform(key: torch.Tensor) -> torch.Tensor:
    return sf.random.uniform(key, (N,), torch.float32)


def rand() -> torch.Tensor:
    return torch.rand(N)


def dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, RATE)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function by torch.compile."""
    return torch.compile(fn, fullgraph=True, dynamic=False)


def uniform_steps() -> Steps:
    """What makes uniform numbers."""
    steps = {
        OURS: functools.partial(sf.jit(uniform), sf.random.key(0)),
        EAGER: rand,
        "torch.rand, torch.compile": compiled(rand),
    }
    if not importlib.util.find_spec("jax"):
        print("jax is not installed, so it is left out: pip install 'shardfn[bench]'")
        return steps
    import jax

    draw = jax.jit(lambda key: jax.random.uniform(key, (N,), "float32"))
    key = jax.random.key(0)
    return {**steps, JAX: lambda: draw(key).block_until_ready()}


def dropout_steps(x: torch.Tensor) -> Steps:
    """What drops elements of x."""
    return {
        OUR_DROPOUT: functools.partial(sf.jit(dropout), x),
        "F.dropout, eager": functools.partial(dropout, x),
        COMPILED_DROPOUT: functools.partial(compiled(dropout), x),
    }


def check_uniform(steps: Steps) -> None:
    """Ours are the numbers of key and element; everybody's have the mean of uniform ones."""
    key, ours = sf.random.key(0), steps[OURS]()
    for part in places():
        assert torch.equal(ours[part], numbers(key, part, DRAW)), part
    for name, step in steps.items():
        drawn = step()
        near(float(drawn.mean()), 0.5, 12**-0.5, name)
        assert drawn.shape == (N,) and drawn.min() >= 0 and drawn.max() <= 1, name


def check_dropout(steps: Steps, x: torch.Tensor) -> None:
    """Ours drops what state, call and element say; everybody drops a tenth and scales the rest."""
    sf.random.state.seed(0)
    ours = steps[OUR_DROPOUT]()
    for part in places():
        kept = numbers(torch.tensor([0, 0, 0]), part, AMBIENT) < 1 - RATE
        torch.testing.assert_close(ours[part], x[part] * kept / (1 - RATE))
    for name, step in steps.items():
        out = step()
        kept = out != 0
        near(float(kept.mean(dtype=torch.float64)), 1 - RATE, 0.3, name)
        torch.testing.assert_close(out, x * kept / (1 - RATE))


def places() -> list[slice]:
    """Where values are compared: at both ends, and at two places between them."""
    starts = (0, N // 3, N // 2, N - CHECKED)
    return [slice(start, start + CHECKED) for start in starts]


def numbers(key: torch.Tensor, part: slice, use: int) -> torch.Tensor:
    """The numbers of some elements, made eagerly."""
    start, size = torch.tensor(part.start), [part.stop - part.start]
    return random_bits(key, start, size, [1], use, 0, torch.float32)


def near(mean: float, wanted: float, deviation: float, name: str) -> None:
    """Check a mean of N numbers of this standard deviation: 6 of its own, and rounding."""
    assert abs(mean - wanted) <= 6 * deviation / N**0.5 + 1e-6, (name, mean)


def show(taken: dict[str, float], peaks: dict[str, int], base: str) -> None:
    """A line for each step."""
    for name, seconds in taken.items():
        memory = f"{peaks[name] / BYTES:5.2f} x the result" if name in peaks else ""
        print(
            f"{name:<30}{seconds * 1e3:8.0f} ms ({seconds / N * 1e9:5.2f} ns an element, "
            f"{seconds / taken[base]:.2f})  {memory}".rstrip()
        )


def main() -> None:
    """Measure, check, print."""
    on_one_core()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=generator)
    uniforms, dropouts = uniform_steps(), dropout_steps(x)
    check_uniform(uniforms)
    check_dropout(dropouts, x)
    steps = {**uniforms, **dropouts}
    peaks = {name: peak(step) for name, step in steps.items() if name != JAX}
    taken = times(steps, ROUNDS)
    print(
        f"{N:.0e} elements, float32; medians of {ROUNDS}, interleaved, processor time of "
        "one thread; peak memory with the result"
    )
    show({name: taken[name] for name in uniforms}, peaks, EAGER)
    show({name: taken[name] for name in dropouts}, peaks, COMPILED_DROPOUT)
    ratios = (taken[OURS] / taken[EAGER], taken[OUR_DROPOUT] / taken[COMPILED_DROPOUT])
    print(f"uniform {ratios[0]:.2f} x torch.rand (at most {UNIFORM})")
    print(f"dropout {ratios[1]:.2f} x torch's compiled one (at most {DROPOUT})")
    for name in (OURS, OUR_DROPOUT):
        assert peaks[name] <= BYTES + SMALL, (name, peaks[name])
    assert ratios[0] <= UNIFORM and ratios[1] <= DROPOUT, ratios


if __name__ == "__main__":
    main()
