"""CUDA's graphs: copies here, and what is recorded where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from shardfn._compat.cuda import CudaGraph, copy_all


def test_tensors_are_copied_together() -> None:
    sources = [torch.arange(3.0), torch.ones(2, 2, dtype=torch.float64)]
    targets = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)]
    copy_all(sources, targets)
    torch.testing.assert_close(targets, sources)
    copy_all([], [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_recording_runs_when_it_is_replayed() -> None:
    x = torch.ones(3, device="cuda")

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0].mul_(2), inputs[0].sum()]

    graph = CudaGraph(run, [x])
    for k in (1, 2, 3):
        graph.begin()
        graph.replay()
        graph.end()
        assert float(graph.results[1]) == 3.0 * 2**k
