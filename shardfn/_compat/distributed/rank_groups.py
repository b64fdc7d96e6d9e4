"""Process groups whose ranks are threads of this process: torch's own functions and classes call
them as they call Gloo's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ..threads import replaced

_bindings: Any = torch._C._distributed_c10d
_c10d: Any = torch.distributed.distributed_c10d
_Work: Any = _bindings.Work
_Group: Any = dist.ProcessGroup
Store: Any = _bindings.Store
# Posts a collective of this rank: its name, what must be equal on all ranks, the tensors that it
# writes, and those that it reads. Returns it, with `is_done` and `wait`.
Post = Callable[..., Any]
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
Tensors = Sequence[torch.Tensor]


class RankWork(_Work):
    """torch's handle of a posted collective.

    Args:
        pending: the collective, which tells whether it is done, and waits until it is.
        outs: the tensors that it writes.
    """

    def __init__(self, pending: Any, outs: list[torch.Tensor]) -> None:
        super().__init__()
        self.pending, self.outs = pending, outs

    def wait(self, timeout: Any = None) -> bool:
        self.pending.wait()
        return True

    def is_completed(self) -> bool:
        return self.pending.is_done()

    def is_success(self) -> bool:
        return self.pending.is_done()

    def synchronize(self) -> None:
        self.pending.wait()

    def result(self) -> list[torch.Tensor]:
        self.pending.wait()
        return self.outs

    def exception(self) -> None:
        return None

    def _source_rank(self) -> int:
        return self.pending.sender

    def get_future(self) -> Any:
        """Return a future that is done: C++ waits for futures without asking Python."""
        self.pending.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.outs)
        return future


def reduction_name(op: Any) -> str:
    """Return the name of a ReduceOp, such as `SUM`. `SUM*0.5` is the sum of what is multiplied by a
    half, as FSDP2 has of NCCL.
    """
    if op == dist.ReduceOp.PREMUL_SUM:
        return f"SUM*{float(op.factor)!r}"
    for name in REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name
    return str(op)


class RankGroup(_Group):
    """A rank's process group. Each method posts a collective; names before torch 2.13 follow those
    of torch 2.13.

    Args:
        name: of the group, equal on all its ranks.
        rank: of this rank in it.
        n: its ranks.
        post: posts a collective.
    """

    def __init__(self, name: str, rank: int, n: int, post: Post) -> None:
        super().__init__(rank, n)
        self.group_name_, self.rank_, self.n, self.posted = name, rank, n, post
        self.desc = "undefined"

    def post(self, kind: str, same: tuple[Any, ...], outs: Tensors, ins: Tensors) -> RankWork:
        """Post a collective.

        Args:
            kind: its name.
            same: its options, equal on all ranks.
            outs: the tensors that it writes.
            ins: the tensors that it reads.
        """
        outs = [x.detach() for x in outs]
        return RankWork(self.posted(self, kind, same, outs, [x.detach() for x in ins]), outs)

    # What torch asks of a group

    def size(self) -> int:
        return self.n

    def rank(self) -> int:
        return self.rank_

    getSize, getRank = size, rank

    @property
    def group_name(self) -> str:
        return self.group_name_

    def getGroupName(self) -> str:
        return self.group_name_

    @property
    def group_desc(self) -> str:
        return self.desc

    def _set_group_desc(self, desc: str) -> None:
        self.desc = desc

    def _set_group_name(self, name: str) -> None:
        self.group_name_ = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return "ranks"

    def __repr__(self) -> str:
        return f"RankGroup({self.group_name_!r}, rank {self.rank_} of {self.n})"

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> RankWork:
        return self.post("all_reduce", (_reduction(opts),), tensors, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> RankWork:
        return self.post("reduce", (_reduction(opts), opts.rootRank), tensors, tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> RankWork:
        return self.post("broadcast", (opts.rootRank,), tensors, tensors)

    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> RankWork:
        return self.post("all_gather", (), _flat(outs), ins)

    allgather_coalesced = allgather

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> RankWork:
        return self.post("all_gather_into_tensor", (), [out], [x])

    def all_gather_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Any:
        return self.post("all_gather_into_tensor", (), outs, ins)

    def gather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any) -> RankWork:
        return self.post("gather", (opts.rootRank,), _flat(outs), ins)

    def scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> RankWork:
        return self.post("scatter", (opts.rootRank,), outs, _flat(ins))

    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any = None) -> RankWork:
        return self.post("reduce_scatter", (_reduction(opts),), outs, _flat(ins))

    def reduce_scatter_single(
        self, out: torch.Tensor, x: torch.Tensor, opts: Any = None
    ) -> RankWork:
        return self.post("reduce_scatter_tensor", (_reduction(opts),), [out], [x])

    def reduce_scatter_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Any:
        return self.post("reduce_scatter_tensor", (_reduction(opts),), outs, ins)

    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> RankWork:
        return self.post("all_to_all", (), outs, ins)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_sizes: Sequence[int] | None = None,
        in_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> RankWork:
        outs, ins = _split(out, out_sizes, self.n), _split(x, in_sizes, self.n)
        return self.post("all_to_all_single", (), outs, ins)

    def barrier(self, opts: Any = None) -> RankWork:
        return self.post("barrier", (), [], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def send(self, tensors: Tensors, to: int, tag: int) -> RankWork:
        return self.post("isend", (to, tag), [], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> RankWork:
        return self.post("recv", (source, tag), tensors, [])

    def recv_anysource(self, tensors: Tensors, tag: int) -> RankWork:
        return self.post("recv", (None, tag), tensors, [])

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> RankWork:
        return self.post("nothing", (), [], [])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction(opts: Any) -> str:
    return "SUM" if opts is None else reduction_name(opts.reduceOp)


def _flat(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [x for tensors in lists for x in tensors]


def _split(x: torch.Tensor, sizes: Sequence[int] | None, n: int) -> list[torch.Tensor]:
    return [*x.detach().split([*sizes] if sizes else [len(x) // n] * n)]


class RankWorld(_c10d._World):
    """torch's record of the process groups of one process."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


def enter_world(world: Any) -> Any:
    """Make a record that of torch.distributed. Returns the one before."""
    c10d: Any = torch.distributed.distributed_c10d
    before, c10d._world = c10d._world, world
    return before


def groups_are_of_threads(is_so: bool) -> None:
    """Say whether names of process groups are those of the thread that asks."""
    _bindings._set_thread_isolation_mode(is_so)


@contextlib.contextmanager
def rank_groups(
    new_group: Callable[..., RankGroup], store: Any, place: Callable[[], Sequence[int]]
) -> Iterator[None]:
    """Make every new process group one of threads.

    Args:
        new_group: makes one of a name, a rank, a size, the ranks of the world that it has (all if
            there are none), and a description.
        store: the key-value store of all ranks.
        place: gives the rank and the number of ranks of the calling thread.
    """

    def init(original: Any) -> Any:
        def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
            if dist.is_initialized() and getattr(_c10d._world, "is_ready", False):
                _c10d._world.is_ready = False  # the group that every rank has at its start
                _c10d._world.pg_map[_c10d._world.default_pg] = (_backend(backend), store)
                return
            rank, n = place()
            original(_backend(backend), store=store, rank=rank, world_size=n)

        return init_process_group

    def helper(original: Any) -> Any:
        def make(
            n: int, rank: int, ranks: Any, backend: Any, store: Any, group_name: Any, **options: Any
        ) -> Any:
            tag, desc = options.get("pg_tag"), options.get("group_desc")
            if tag and (known := _c10d._find_pg_by_ranks_and_tag(tag, ranks)):
                return known, _c10d._world.pg_map[known][1]
            if ranks and _c10d._get_default_group().rank() not in ranks:
                return dist.GroupMember.NON_GROUP_MEMBER, None
            group = new_group(str(group_name), rank, n, ranks, desc or "undefined")
            group._set_group_desc(desc or "undefined")
            _register(group, str(backend), store, group_name, tag)
            return group, store

        return make

    with contextlib.ExitStack() as stack:
        for module in _modules_with("init_process_group"):
            stack.enter_context(replaced(module, "init_process_group", init))
        stack.enter_context(replaced(_c10d, "_new_process_group_helper", helper))
        # torch replaces it
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        yield


def _modules_with(name: str) -> list[Any]:
    """Return the modules of torch.distributed that have imported a function of it."""
    function = getattr(_c10d, name)
    modules = [m for x, m in sys.modules.items() if x.startswith("torch.distributed")]
    return [m for m in modules if vars(m).get(name) is function]


def _backend(name: Any) -> str:
    return "gloo" if name is None else str(name)


def _register(group: RankGroup, backend: str, store: Any, name: Any, tag: str | None) -> None:
    """Note a group in the tables of torch.distributed."""
    world = _c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = f"cpu:{backend}"
    _c10d._register_process_group(name, group)
    tags = [f"user:{tag}"] if tag else ["", f"ptd:{name}"]
    for each in tags:
        world.tags_to_pg.setdefault(each, []).append(group)
    world.pg_to_tag[group] = tags[-1]


def start_world() -> None:
    """Make the default process group of a rank, which the program may make itself later."""
    dist.init_process_group("gloo")
    _c10d._world.is_ready = True
