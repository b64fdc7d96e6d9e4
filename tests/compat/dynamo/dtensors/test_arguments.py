"""Arguments of calls that Dynamo reads ours for: an error names the function, what it got, and its
parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from message import without_line
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from versions import needs_torch

import shardfn as sf
from shardfn import P

X = torch.arange(8.0).reshape(4, 2)
S, R = [Shard(0)], [Replicate()]


def refused(call: Any) -> str:
    """The text of an error, which has a line of this file and a suggestion."""
    with pytest.raises(sf.ShardError) as caught:
        call()
    text = str(caught.value)
    assert f"  at: {__file__}:" in text, text
    assert "\n  try: " in text, text
    return without_line(caught.value)


def local(x: Any, mesh: Any) -> Any:
    return DTensor.from_local(x, mesh, S)


WRONG = {  # a call, and what its error says
    "a keyword of full_tensor": (
        lambda x, mesh: local(x, mesh).full_tensor(placements=R),
        "DTensor.full_tensor: got an unexpected keyword argument 'placements'",
        "needed: full_tensor(*, grad_placements=None)",
    ),
    "an argument of to_local": (
        lambda x, mesh: local(x, mesh).to_local(S),
        "DTensor.to_local: too many positional arguments",
        "needed: to_local(*, grad_placements=None)",
    ),
    "a keyword of redistribute": (
        lambda x, mesh: local(x, mesh).redistribute(placement=R),
        "DTensor.redistribute: got an unexpected keyword argument 'placement'",
        "placements=None",
    ),
    "a keyword of from_local": (
        lambda x, mesh: DTensor.from_local(x, mesh=mesh, placements=S),
        "DTensor.from_local: got an unexpected keyword argument 'mesh'",
        "needed: from_local(local_tensor, device_mesh=None, placements=None",
    ),
    "a keyword of zeros": (
        lambda x, mesh: torch.distributed.tensor.zeros(4, device_mesh=mesh, placement=S),
        "zeros: got an unexpected keyword argument 'placement'",
        "needed: zeros(*size",
    ),
    "a keyword of all_reduce": (
        lambda x, mesh: dist.all_reduce(x.clone(), reduce_op="sum"),
        "all_reduce: got an unexpected keyword argument 'reduce_op'",
        "needed: all_reduce(tensor, op=",
    ),
    "a text": (
        lambda x, mesh: DTensor.from_local(x, mesh, ["dp"]),
        "DTensor.from_local, placements: got a list with a str",
        "needed: a list of Shard, Replicate and Partial",
    ),
    "a P": (
        lambda x, mesh: distribute_tensor(x, mesh, P("dp")),
        "distribute_tensor, placements: got P",
        "needed: a list of Shard, Replicate and Partial",
    ),
    "the gradient of a text": (
        lambda x, mesh: local(x, mesh).to_local(grad_placements="dp"),
        "DTensor.to_local, grad_placements: got str",
        "needed: a list of Shard, Replicate and Partial",
    ),
    "no tensor": (
        lambda x, mesh: DTensor.from_local([x], mesh, S),
        "DTensor.from_local: its first argument is a list",
        "try: a tensor",
    ),
    "a dtype": (
        lambda x, mesh: local(x, mesh).redistribute(mesh, R, forward_dtype=32),
        "DTensor.redistribute, forward_dtype: a int",
        "try: a dtype, such as torch.bfloat16",
    ),
    "an axis": (
        lambda x, mesh: x * mesh.get_local_rank("zz"),
        "get_local_rank, mesh_dim: got 'zz', of a mesh with axes ('dp',)",
        "needed: a mesh axis, by name or by number",
    ),
    "a size": (
        lambda x, mesh: x * mesh.size(3),
        "mesh.size, mesh_dim: got 3, of a mesh with axes ('dp',)",
        "needed: the number of a mesh axis, below 1",
    ),
    "a part": (
        lambda x, mesh: x * mesh["zz"].size(),
        "the function asks a mesh for an axis that the mesh does not have",
        "try: one of the names in mesh.mesh_dim_names",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    fn, got, rest = WRONG[case]
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        text = refused(lambda: sf.jit(lambda x: fn(x, mesh))(X))
    assert got in text and rest in text


@needs_torch("2.12", "placements are of Python before")
def test_a_placement_of_something_else_is_named() -> None:
    wrong: Any = "dp"
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        fn = sf.jit(lambda x: DTensor.from_local(x, mesh, [Shard(wrong)]))
        text = refused(lambda: fn(X))
    assert "calls Shard(x) with an x that is not the number of a tensor dim" in text
