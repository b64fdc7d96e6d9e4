"""Small programs on a GPU, with the results of two simulated ranks on the CPU: random numbers,
loops, branches, optimizers, `backward()`, artefacts, CUDA graphs.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

Case = Callable[[Any, str], Any]  # from a mesh and its device to a tree of results
LIMIT = 1e-10  # of the largest difference, in float64


@attrs.frozen(kw_only=True)
class Found:
    """How far the results of a program on the GPU are from those on the CPU."""

    program: str
    off: float
    seconds: float
    fault: str


def numbers(device: str, *shape: int) -> torch.Tensor:
    """The same numbers on every device: float64."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def dropout(mesh: Any, device: str) -> Any:
    sf.random.state.seed(5)
    loss = lambda w, x: F.dropout(x @ w, 0.25).square().mean()
    args = numbers(device, 7, 5), numbers(device, 6, 7)
    step = sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")))
    backend = "inductor" if device == "cuda" else "aten"
    alone = sf.jit(sf.value_and_grad(loss), backend=backend)
    return [step(*args), step(*args), alone(*args)]


def dropout_in_a_scan(mesh: Any, device: str, *, cuda_graphs: bool = False) -> Any:
    sf.random.state.seed(6)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        layer = lambda x, w: (torch.tanh(F.dropout(x @ w, 0.1)), None)
        return sf.scan(layer, x, w)[0].sum()

    args = numbers(device, 3, 4, 4), numbers(device, 6, 4)
    step = sf.shard(
        sf.value_and_grad(loss), mesh, (P(), P("dp")), cuda_graphs=cuda_graphs and device == "cuda"
    )
    return [step(*args) for _ in range(4)]  # each draws other numbers


def branches(mesh: Any, device: str) -> Any:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sf.cond(w.sum() > 0, torch.sin, torch.cos, x @ w).sum()

    args = numbers(device, 4, 4), numbers(device, 6, 4)
    return sf.shard(sf.value_and_grad(loss), mesh, (P(), P("dp")))(*args)


def _loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["w"] + params["b"]).square().sum()


def _params(device: str) -> dict[str, torch.Tensor]:
    return {"w": numbers(device, 5, 3), "b": numbers(device, 3)}


def adamw(mesh: Any, device: str, *, cuda_graphs: bool = False) -> Any:
    optimizer = sf.optim(torch.optim.AdamW, lr=0.01)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        loss, grads = sf.value_and_grad(_loss)(params, x)
        return *optimizer.update(params, grads, state), loss

    trained = sf.shard(
        step,
        mesh,
        (P(), P(), P("dp")),
        donate_argnums=(0, 1),
        cuda_graphs=cuda_graphs and device == "cuda",
    )
    params = _params(device)
    state = optimizer.init(params)
    losses = []
    for k in range(6):
        batch = numbers(device, 8 + k % 2, 5)[:8]
        params, state, loss = trained(params, state, batch)
        losses.append(loss)
    return params, state, losses


def results_of_a_graph_stay(mesh: Any, device: str) -> Any:
    """Without donation all parameters move, and all results are copied out."""
    recorded = device == "cuda"
    step = sf.shard(sf.value_and_grad(_loss), mesh, (P(), P("dp")), cuda_graphs=recorded)
    params, kept = _params(device), []
    for k in range(6):
        loss, grads = step(params, numbers(device, 8 + k, 5)[:8])
        params = sf.tree_map(lambda x, g: x - 0.1 * sf.full(g), params, grads)
        kept.append((loss, grads))
    return kept


def backward(mesh: Any, device: str) -> Any:
    followed = sf.shard(_loss, mesh, (P(), P("dp")))
    params = sf.tree_map(lambda x: x.requires_grad_(), _params(device))
    followed(params, numbers(device, 8, 5)).backward()
    return sf.tree_map(lambda x: x.grad, params)


def artefact(mesh: Any, device: str) -> Any:
    args = _params(device), numbers(device, 8, 5)
    compiled = sf.shard(sf.value_and_grad(_loss), mesh, (P(), P("dp"))).compile(*args)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step")
        compiled.save(path)
        return sf.load_compiled(path, mesh=mesh)(*args)


PROGRAMS: dict[str, Case] = {
    "dropout": dropout,
    "dropout in a scan": dropout_in_a_scan,
    "dropout in a scan, CUDA graph": functools.partial(dropout_in_a_scan, cuda_graphs=True),
    "cond": branches,
    "AdamW": adamw,
    "AdamW, CUDA graph": functools.partial(adamw, cuda_graphs=True),
    "gradients, CUDA graph": results_of_a_graph_stay,
    "backward()": backward,
    "artefact": artefact,
}


def references() -> dict[str, Any]:
    """The results of each program on the CPU."""
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
        return {name: _whole(run(mesh, "cpu")) for name, run in PROGRAMS.items()}


def found(name: str, mesh: Any, wanted: Any) -> Found:
    """Compare a program on a device with the CPU.

    Args:
        name: of the program.
        mesh: of one rank, on the device.
        wanted: its results on the CPU.
    """
    start, off, fault = time.perf_counter(), float("nan"), ""
    try:
        off = _distance(_whole(PROGRAMS[name](mesh, mesh.device_type)), wanted)
        fault = "" if off <= LIMIT else f"off by {off:.1e}, at most {LIMIT:.0e}"
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    seconds = time.perf_counter() - start
    return Found(program=name, off=off, seconds=seconds, fault=fault)


def _whole(tree: Any) -> Any:
    """The global tensors of results, on the CPU."""
    return sf.tree_map(lambda x: sf.full(x).detach().cpu(), tree)


def _distance(got: Any, wanted: Any) -> float:
    """The largest difference of two trees."""
    pairs: list[float] = []
    note = lambda a, b: pairs.append(float((a - b).double().abs().max()))
    sf.tree_map(note, got, wanted)
    return max(pairs)
