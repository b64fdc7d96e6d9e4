"""Saving and loading of sharded state on two ranks next to torch.distributed.checkpoint, for the
same bytes. `make bench-checkpoints`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

import shardfn as sf
from bench.training.steps import slower_median
from shardfn import P
from shardfn.byte_sizes import bytes_of
from shardfn_demo.runs import LOOPBACK

RANKS = 2
SIZE, MOST, ROUNDS = "256MB", 2**30, 7
TARGET = 1.1  # of the time of torch.distributed.checkpoint
OURS, DCP = "shardfn", "DCP"
ACTS = ("save", "load")
COLUMNS = 1024  # of each tensor
SHARES = (1, 2, 2, 2, 6, 6, 6)  # rows of the tensors of a layer, as a Llama has them
LAYERS = 8


def shapes(nbytes: int) -> dict[str, tuple[int, int]]:
    """The shapes of each rank's float32 shards, by name: so many bytes on all ranks, or a
    little less.
    """
    rows = nbytes // (4 * COLUMNS * LAYERS * RANKS)
    unit = rows / sum(SHARES)
    return {
        f"layers.{layer}.w{i}": (max(1, int(unit * share)), COLUMNS)
        for layer in range(LAYERS)
        for i, share in enumerate(SHARES)
    }


def state_of(own: Mapping[str, tuple[int, int]], mesh: Any) -> dict[str, Any]:
    """Sharded tensors of random numbers, of which each rank makes its own shards."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {}
    for name, shape in own.items():
        shard = torch.randn(shape, generator=generator)
        state[name] = sf.from_local(shard, mesh, P("dp"))
    return state


def acts(folder: str, state: dict[str, Any], mesh: Any) -> dict[tuple[str, str], Callable[[], Any]]:
    """Who does what. DCP loads into tensors that are there, shardfn into new ones."""
    ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "dcp")
    like = {name: sf.ShapeDtype(x.shape, x.dtype) for name, x in state.items()}

    targets = {name: torch.zeros_like(x) for name, x in state.items()}

    def load_dcp() -> dict[str, Any]:
        dcp.load(targets, checkpoint_id=theirs)
        return targets

    return {
        (OURS, "save"): lambda: sf.save(ours, state, step=0),
        (DCP, "save"): lambda: dcp.save(state, checkpoint_id=theirs),
        (OURS, "load"): lambda: sf.load(ours, like, mesh, P("dp")),
        (DCP, "load"): load_dcp,
    }


def timed(folder: str, state: dict[str, Any], mesh: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of each on this rank, in turn; what is loaded is compared with what was saved."""
    found: dict[str, list[float]] = {}
    todo = acts(folder, state, mesh)
    for turn in range(rounds + 1):
        names = (OURS, DCP) if turn % 2 else (DCP, OURS)
        for act in ACTS:
            for name in names:
                if act == "save" and dist.get_rank() == 0:
                    kept = "ours" if name == OURS else "dcp"
                    shutil.rmtree(os.path.join(folder, kept), ignore_errors=True)
                    os.sync()
                dist.barrier()
                start = time.perf_counter()
                result = todo[name, act]()
                seconds = time.perf_counter() - start
                if act == "load":
                    check(name, result, state)
                    for x in result.values():
                        x.to_local().zero_()
                del result
                if turn:  # the first one imports and allocates
                    found.setdefault(f"{name} {act}", []).append(seconds)
    return found


def check(name: str, found: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Compare what was loaded, bit for bit.

    Raises:
        RuntimeError: it differs.
    """
    for key, x in state.items():
        if not torch.equal(found[key].to_local(), x.to_local()):
            raise RuntimeError(f"{name}: {key} was loaded with other values")


def _rank(rank: int, folder: str, nbytes: int, rounds: int, kept: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = (pathlib.Path(kept) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = sf.make_mesh((RANKS,), ("dp",), device_type="cpu")
    found = timed(folder, state_of(shapes(nbytes), mesh), mesh, rounds)
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, found)
    if rank == 0:
        medians = {key: slower_median([r[key] for r in ranks]) for key in found}
        (pathlib.Path(kept) / "result.json").write_text(json.dumps(medians))
    dist.barrier()
    os._exit(0)  # Gloo's threads may outlive the group (torch 2.13)


def verdicts(medians: Mapping[str, float]) -> list[tuple[bool, str]]:
    """Each act next to DCP's, and whether the target is met."""
    found = []
    for act in ACTS:
        ours, theirs = medians[f"{OURS} {act}"], medians[f"{DCP} {act}"]
        share = ours / theirs
        said = "Met" if share <= TARGET else "Missed"
        text = (
            f"{said}: {act} takes {ours * 1e3:.0f} ms, {share:.2f} of DCP's "
            f"{theirs * 1e3:.0f} ms; the target is {TARGET:.2f}."
        )
        found.append((share <= TARGET, text))
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Time both, print the verdicts.

    Returns:
        0 if both targets are met, 1 if not.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.training.checkpoints")
    parser.add_argument("size", nargs="?", default=SIZE, help="such as 1GB, the most")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="on the disk to write to")
    args = parser.parse_args(given)
    nbytes = bytes_of(args.size)
    if nbytes > MOST:
        parser.error(f"at most 1GB; got {args.size}")
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        tempfile.TemporaryDirectory() as kept,
    ):
        mp.spawn(_rank, (folder, nbytes, args.rounds, kept), RANKS)
        medians = json.loads((pathlib.Path(kept) / "result.json").read_text())
    found = verdicts(medians)
    print(f"{args.size} on {RANKS} ranks", *(text for _, text in found), sep="\n")
    print(f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors.")
    return 0 if all(is_met for is_met, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
