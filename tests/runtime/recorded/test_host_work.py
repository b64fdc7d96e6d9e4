"""A program of the CPU cannot be recorded. Programs of GPUs: tests/compat/cuda/test_captures.py."""

from __future__ import annotations

import pytest
import torch

import shardfn as sf
from shardfn import P


def test_a_program_of_the_cpu_is_refused_with_a_condition_that_runs_everywhere() -> None:
    step = sf.jit(lambda x: x * 2, cuda_graphs=True)
    with pytest.raises(sf.ShardError) as caught:
        step(torch.ones(3))
    text = str(caught.value)
    assert text.startswith("jit(<lambda>): cuda_graphs=True, but the program runs on cpu")
    assert 'cuda_graphs=mesh.device_type == "cuda"' in text


def test_it_changes_nothing_where_nothing_is_compiled() -> None:
    x = torch.arange(6.0)
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        step = sf.shard(lambda x: x * 2, mesh, P("dp"), cuda_graphs=True)
        assert sf.full(step(x)).tolist() == (x * 2).tolist()
