"""Who is timed by `bench.calls`, each in processes of its own: two ranks of torch, and JAX on
two devices.
"""

from __future__ import annotations

import datetime
import os
import types
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import shardfn as sf
from bench.chain import Chain, Tree, serve
from shardfn import P
from shardfn.compile.native import load_native
from shardfn.runtime import cache
from shardfn_demo.runs import LOOPBACK

SHARDFN = "shardfn"
DONATED = "shardfn, donated"
DTENSOR = "torch.compile, the same DTensors"
PLAIN = "torch.compile, plain tensors"
JAX = "jax.jit, 2 devices"

SHAPE = (8, 4)  # of each whole leaf, float32
PATIENCE = datetime.timedelta(minutes=10)


def plus_one(tree: Tree) -> Tree:
    """The step: one cheap op a leaf, so that what is left is the call."""
    return {name: x + 1 for name, x in tree.items()}


def torch_rank(rank: int, store: str, pipe: Any) -> None:
    """One of two real ranks; rank 1 compiles with rank 0 and then waits on its pipe, without
    spinning.

    Args:
        rank: 0 or 1.
        store: the URL of the file through which the ranks meet.
        pipe: the connection to the conductor.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    mesh = sf.make_mesh((2,), ("dp",), device_type="cpu")
    loading = load_native()
    if loading is not None:
        loading.join()
    serve(pipe, lambda leaves: torch_chains(leaves, mesh, everyone=rank == 0))
    dist.barrier()
    dist.destroy_process_group()


def torch_chains(leaves: int, mesh: Any, *, everyone: bool) -> dict[str, Chain]:
    """The step through shardfn, and through torch.compile on DTensors and on plain tensors."""
    plain = {f"w{i}": torch.zeros(SHAPE) for i in range(leaves)}
    placed = sf.distribute(plain, mesh, P("dp"))
    step = sf.shard(fresh(plus_one), mesh, (P("dp"),))
    assert not step.lower(placed).collectives, (
        "the step sends nothing, so that rank 0 can run it alone"
    )
    donating = sf.shard(fresh(plus_one), mesh, (P("dp"),), donate_argnums=(0,))
    other = sf.distribute(plain, mesh, P("dp"))
    count = lambda: sum(cache.counts.values())
    chains = {
        SHARDFN: Chain(step, placed, count, local_arrays),
        DONATED: Chain(donating, other, count, local_arrays),
    }
    return chains | {DTENSOR: compiled(placed), PLAIN: compiled(plain)} if everyone else chains


def compiled(tree: Tree) -> Chain:
    """The step under torch.compile."""
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(fresh(plus_one), fullgraph=True, dynamic=False, backend=counter)
    return Chain(step, tree, lambda: counter.frame_count, local_arrays)


def fresh(fn: types.FunctionType) -> types.FunctionType:
    """A function with a code object of its own: Dynamo's cache hangs on the code, and no rival
    is to search another's.
    """
    return types.FunctionType(fn.__code__.replace(), globals(), fn.__name__)


def local_arrays(tree: Tree) -> list[Any]:
    """This rank's values."""
    return [x.to_local() if hasattr(x, "to_local") else x for x in tree.values()]


def jax_process(pipe: Any) -> None:
    """JAX with two CPU devices in one process, as it is used without a cluster.

    Args:
        pipe: the connection to the conductor.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    serve(pipe, jax_chains)


def jax_chains(leaves: int) -> dict[str, Chain]:
    """The step through jax.jit, every leaf cut over both devices."""
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("dp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    assert len(jax.devices()) == 2, jax.devices()
    tree = {f"w{i}": jax.device_put(np.zeros(SHAPE, np.float32), sharding) for i in range(leaves)}
    traced: list[int] = []

    def step(tree: Tree) -> Tree:
        traced.append(1)
        return plus_one(tree)

    chain = Chain(
        jax.jit(step), tree, lambda: len(traced), lambda tree: map(np.asarray, tree.values())
    )
    chain.wait = jax.block_until_ready
    return {JAX: chain}
