"""The functions that Dynamo reads in place of those of DTensors. `transforms/dtensors` fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

METHODS: dict[str, Callable[..., Any]] = {}  # of (tensor, its placements, *args)
ATTRIBUTES: dict[str, Callable[..., Any]] = {}  # of the placements of the tensor
FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # of torch, each with ours
OF_LOSSES: dict[Any, Callable[..., Any]] = {}  # of torch: its labels, of (input, target)
OF_GROUPS: dict[str, Callable[..., Any]] = {}  # methods of (group, *args)
OF_MESHES: dict[str, Callable[..., Any]] = {}  # methods of (mesh, *args)
PART = "_part"  # an attribute of ours: the placements of a DTensor on a part, else nothing
PARTIAL = "_partial"  # an attribute of ours: the placements of a Partial DTensor, else nothing
OURS = PART, PARTIAL  # attributes that a DTensor may lack
CLOSED_OVER: dict[str, Callable[..., Any]] = {}  # of (tensor, its placements): of PART alone
