"""Transforms next to what they replace: scan over layers of any depth, and per-sample gradients
next to torch.func's.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardfn as sf
from bench.timing import times
from shardfn import P
from shardfn.ops.loops import Scan

DEPTHS, REPEATS, WIDTH, APART = (4, 16, 64), 3, 64, 1.3
SAMPLES, ROUNDS, SLOWER = 1000, 15, 1.3


def layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A residual MLP, scanned over stacked layers; x is (B, C)."""

    def layer(h: torch.Tensor, p: Any) -> Any:
        return h + torch.nn.functional.gelu(h @ p["up"]) @ p["down"], None

    return sf.scan(layer, x, params)[0].square().mean()


def stacked(depth: int) -> Any:
    g = torch.Generator().manual_seed(depth)
    return {
        "up": torch.randn(depth, WIDTH, 4 * WIDTH, generator=g) / 16,
        "down": torch.randn(depth, 4 * WIDTH, WIDTH, generator=g) / 32,
    }


def spent() -> float:
    """Seconds of processor time so far, the C++ compiler's included."""
    return sum(os.times()[:4])


def staging(depth: int) -> dict[str, float]:
    """Processor seconds of each stage of a training step over so many layers; its value is
    checked.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1
    )
    mesh = sf.make_mesh((1,), ("dp",))
    sf.shard(sf.value_and_grad(layers), mesh, (P(), P("dp")), backend="aten")(
        stacked(2), torch.ones(4, WIDTH)
    )  # imports
    params, x = stacked(depth), torch.ones(8, WIDTH)
    step = sf.shard(sf.value_and_grad(layers), mesh, (P(), P("dp")))
    at = [spent()]
    traced = step.trace(params, x)
    at.append(spent())
    lowered = traced.lower()
    at.append(spent())
    compiled = lowered.compile()
    at.append(spent())
    assert sum(isinstance(n.target, Scan) for n in lowered.program.graph.nodes) == 2, (
        "the loops are not loops"
    )
    h = x
    for up, down in zip(params["up"], params["down"], strict=True):
        h = h + torch.nn.functional.gelu(h @ up) @ down
    torch.testing.assert_close(
        sf.full(compiled(params, x))[0], h.square().mean(), rtol=1e-4, atol=1e-5
    )
    capture, partition, compiling = (b - a for a, b in itertools.pairwise(at))
    return {"capture": capture, "partition": partition, "compile": compiling, "all": at[-1] - at[0]}


def apart(depth: int) -> dict[str, float]:
    """The same in a process of its own, with nothing compiled yet."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "SHARDFN_CACHE_DIR": "",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "bench.transforms", str(depth)],
            env=env,
            check=True,
            capture_output=True,
            text=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def sample_loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An MLP on one sample: x is (C,)."""
    return ((torch.tanh(x @ p["a"]) @ p["b"] - y) ** 2).sum()


def per_sample() -> dict[str, Callable[[], Any]]:
    """The gradient of every sample: ours as captured, and torch.func as it is."""
    g = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(64, 128, generator=g) / 8, "b": torch.randn(128, 8, generator=g) / 8}
    x, y = (torch.randn(SAMPLES, 64, generator=g), torch.randn(SAMPLES, 8, generator=g))
    ours = sf.vmap(sf.grad(sample_loss), in_axes=(None, 0, 0))
    theirs = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))
    steps = {
        "shardfn": functools.partial(ours, params, x, y),
        "torch.func": functools.partial(theirs, params, x, y),
    }
    torch.testing.assert_close(steps["shardfn"](), steps["torch.func"]())
    return steps


def main() -> None:
    """Measure, check, print."""
    if len(sys.argv) > 1:
        print(json.dumps(staging(int(sys.argv[1]))))
        return
    torch.set_num_threads(1)
    runs = [{depth: apart(depth) for depth in DEPTHS} for _ in range(REPEATS)]
    found = {
        d: {part: statistics.median(run[d][part] for run in runs) for part in runs[0][d]}
        for d in DEPTHS
    }
    for depth, parts in found.items():
        print(
            f"scan over {depth:>2} layers: "
            + ", ".join(f"{name} {t:.2f} s" for name, t in parts.items())
        )
    whole = [parts["all"] for parts in found.values()]
    print(f"the slowest is {max(whole) / min(whole):.2f} x the fastest (at most {APART})")
    taken = times(per_sample(), ROUNDS)
    ratio = taken["shardfn"] / taken["torch.func"]
    print(
        f"gradients of {SAMPLES} samples: "
        + ", ".join(f"{name} {t * 1e3:.1f} ms" for name, t in taken.items())
    )
    print(f"{ratio:.2f} x the time of torch.func (at most {SLOWER})")
    assert max(whole) / min(whole) <= APART, whole
    assert ratio <= SLOWER, ratio


if __name__ == "__main__":
    main()
