"""The ranks' server imports this before it forks ranks: each of them then starts with torch, Dynamo
and Inductor at work, as any process is after its first call, and with no program of ours.

A backward pass would start autograd's threads, and a fork would lose them; so would it lose those
of OpenMP, and of Inductor's pool. So this runs forward, on one thread, and waits for the threads
that the first call starts: a rank forked while they import or lock a file would wait for good.
"""

from __future__ import annotations

import gc
import threading

import torch
import torch._inductor.config as inductor

import shardfn as sf
from shardfn import P, state


def warm() -> None:
    """Call a function in each way that ranks do, then forget its programs."""
    torch.set_num_threads(1)
    x = torch.ones(4, 3, dtype=torch.float64)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        sf.shard(lambda x: (x.sin() @ x.T).sum(0), mesh, P("dp"), backend="aten")(x)
    with inductor.patch(compile_threads=1):
        sf.jit(lambda x: x.sin() + 1, backend="inductor")(x)
    state.clear()
    for thread in threading.enumerate():
        if not (thread.daemon or thread is threading.current_thread()):
            thread.join()


warm()
gc.freeze()  # as in conftest.py
gc.set_threshold(50_000, 20, 20)
