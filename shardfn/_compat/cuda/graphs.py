"""CUDA graphs: record the kernels of one run of a function, and replay them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy source tensors to target tensors, those of one dtype with one kernel."""
    if sources:
        torch.ops.aten._foreach_copy_.default(list(targets), list(sources))


class CudaGraph:
    """A CUDA graph of the kernels that a function launches.

    Args:
        run: the function. It has run before, so that what is made once is made.
        inputs: its inputs, whose memory each replay reads and writes.
    """

    def __init__(self, run: Run, inputs: Sequence[torch.Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        # other threads, such as NCCL's, go on asking CUDA what they ask
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = run(list(inputs))

    def begin(self) -> None:
        """Make the current stream wait until the previous replay has left the graph's memory."""
        torch.cuda.current_stream().wait_event(self.done)

    def replay(self) -> None:
        """Launch the recorded kernels."""
        self.graph.replay()

    def end(self) -> None:
        """Record that the graph's memory is free for the next replay."""
        self.done.record()
