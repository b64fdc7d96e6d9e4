"""Annotations of a Program's nodes: the user's line, the phase, checkpointed calls,
implicit_comm.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _compat
from ..errors import is_users, source_at
from ..ops.nodes import origin_of
from ..source_text import NOWHERE, Origin
from .checkpoint import policies
from .modules.submodule_paths import module_of, path_of_stack

ASKS = "implicit_comm="  # followed by a setting: the implicit_comm of a shard inside another
# followed by a dtype: gradients are reduced in it, after the cast that makes them
REDUCES = "reduce="
# marks casts to float16, whose gradients are too small without a scaled loss
IN_FLOAT16 = "in float16"
# marks the op that scales a loss
SCALES = "scales the loss"
INHERITED = (ASKS, REDUCES, IN_FLOAT16)  # by the backward of an op
# followed by a number: one call of a checkpointed function; the value is its policy
REGION = "checkpoint="
# of a scan over microbatches that a pipeline runs: the text of its schedule and axis
PIPELINE = "pipeline"
# marks a copy of a forward op that the backward of a checkpointed call runs
RECOMPUTED = "recomputed"
# marks a backward that is not itself differentiated, if annotated
OUTERMOST = "outermost"
# one number for each such call, unique even among nested captures
_numbers = itertools.count()
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def follow_backward(roots: Iterable[Any], inside: dict[str, Any]) -> None:
    """Have every node of a backward record the autograd sequence number of its forward op.

    Args:
        roots: the autograd nodes that the backward starts from.
        inside: the annotations of the grad call itself.
    """
    seen = set()
    queue = [fn for fn in roots if fn is not None]
    while queue:
        fn = queue.pop()
        if fn in seen:
            continue
        seen.add(fn)
        fn.register_prehook(
            functools.partial(_annotate_backward, _compat.sequence_number(fn)(), inside)
        )
        queue += [after for after, _ in fn.next_functions if after is not None]


def _annotate_backward(number: int, inside: dict[str, Any], gradients: Any) -> None:
    torch.fx.traceback.get_current_meta()["custom"] = {
        "phase": "backward",
        "belongs_to": number,
        **inside,
    }


def regions(noted: dict[str, Any]) -> dict[str, str]:
    """The calls of `checkpoint` around a node, as annotations, each with its policy."""
    return {key: policy for key, policy in noted.items() if key.startswith(REGION)}


def call_annotations(noted: dict[str, Any]) -> dict[str, Any]:
    """The annotations of a node about checkpointed calls and about the outermost backward."""
    return {key: said for key, said in noted.items() if key.startswith(REGION) or key == OUTERMOST}


def is_checkpointed(noted: dict[str, Any]) -> bool:
    """Whether a node is in a checkpointed call that does not save everything."""
    return any(policy != policies.EVERYTHING for policy in regions(noted).values())


@_compat.read_by_dynamo
def annotate_checkpointed(region: str, policy: str) -> Any:
    """A context that annotates the nodes captured in it with a checkpointed call."""
    return torch.fx.traceback.annotate({region: policy})


@_compat.read_by_dynamo
def as_backward() -> Any:
    """A context that annotates the nodes captured in it as a backward that is not
    differentiated.
    """
    return torch.fx.traceback.annotate({"phase": "backward", OUTERMOST: True})


@_compat.constant_in_graph
def fresh_region() -> str:
    """The annotation of a new checkpointed call."""
    return f"{REGION}{next(_numbers)}"


@contextlib.contextmanager
def annotations_restored() -> Iterator[None]:
    """A context that restores the current annotations of make_fx when it is left."""
    meta = torch.fx.traceback.get_current_meta()
    before = meta.get("custom")
    try:
        yield
    finally:
        meta["custom"] = before if before is not None else {}


@_compat.read_by_dynamo
def annotate_implicit_comm(setting: str) -> Any:
    """A context that annotates the nodes captured in it with a setting of implicit_comm. Their
    backward inherits it.
    """
    return torch.fx.traceback.annotate({f"{ASKS}{setting}": True})


@_compat.read_by_dynamo
def annotate_cast(dtype: str, reduced: str) -> Any:
    """A context that annotates casts to a dtype with the dtype in which their gradients are
    reduced.
    """
    notes = {f"{REDUCES}{reduced}": True}
    if dtype == "torch.float16":
        notes[IN_FLOAT16] = True
    return torch.fx.traceback.annotate(notes)


@_compat.read_by_dynamo
def annotate_pipeline(text: str) -> Any:
    """A context that annotates a scan with the schedule and the axis of a pipeline."""
    return torch.fx.traceback.annotate({PIPELINE: text})


def is_of_pipeline(node: torch.fx.Node) -> bool:
    """Return whether a loop over microbatches is that of a pipeline."""
    return PIPELINE in (node.meta.get("custom") or {})


def is_pipelined() -> bool:
    """Whether the scan that is being traced is one over the microbatches of a pipeline."""
    return PIPELINE in (torch.fx.traceback.get_current_meta().get("custom") or {})


@_compat.read_by_dynamo
def annotate_loss_scale() -> Any:
    """A context that annotates the op that scales a loss."""
    return torch.fx.traceback.annotate({SCALES: True})


def reduced_in(node: torch.fx.Node) -> str | None:
    """The dtype in which the gradient that a cast makes is reduced, if one is set."""
    noted = node.meta.get("custom") or {}
    dtypes = [key for key in noted if key.startswith(REDUCES)]
    return dtypes[-1].removeprefix(REDUCES) if dtypes else None


def attach(graph: torch.fx.GraphModule) -> None:
    """Give every node its `source` ("file:line" or None), the `module` in which its op was called
    (the path of the submodule, or None) and its `phase` ("forward" or "backward").

    torch gives the nodes of a backward the line of the grad call. Here they get the line and the
    module of their forward op. `annotate_checkpointed` records the checkpointed calls of that op.
    """
    # the sequence numbers of the ops so far, ascending, and the ops
    numbers: list[int] = []
    owners: list[torch.fx.Node] = []
    for node in graph.graph.nodes:
        noted = node.meta.get("custom") or {}
        owner = _forward_op(noted.get("belongs_to"), numbers, owners)
        phase = noted.get("phase", "forward")
        origin = _origin(node, noted, owner)
        node.meta.update(
            phase=phase, **origin, custom={**noted, **_inherited(owner), "phase": phase, **origin}
        )
        if owner and phase == "backward" and "inside" not in noted:
            node.meta["custom"]["inside"] = owner.meta["custom"].get("inside") or tuple(
                regions(owner.meta["custom"])
            )
        is_known = node.meta["source"] or reduced_in(node)
        newest = numbers[-1] if numbers else -1
        if is_known and node.meta.get("seq_nr", -1) > newest:
            numbers.append(node.meta["seq_nr"])
            owners.append(node)


def _origin(node: torch.fx.Node, noted: dict[str, Any], owner: torch.fx.Node | None) -> Origin:
    """The user's line and the submodule of a node's op: of a backward op those of its forward."""
    before = origin_of(owner) if owner else NOWHERE
    stack = node.meta.get("stack_trace")
    line = noted.get("source") or before["source"] or line_of(stack)
    module = (
        noted.get("module")
        or before["module"]
        or module_of(stack)
        or path_of_stack(node.meta.get("nn_module_stack"))
    )
    if line is None and node.op == "call_function":
        # a prim, such as one that places a gradient: that of its input
        known = (x for x in node.all_input_nodes if x.meta.get("source"))
        return next(map(origin_of, known), {"source": None, "module": module})
    return {"source": line, "module": module}


def _inherited(owner: torch.fx.Node | None) -> dict[str, Any]:
    """The annotations of a forward op that its backward ops have too."""
    noted = owner.meta["custom"] if owner else ()
    return {key: True for key in noted if key.startswith(INHERITED)}


def _forward_op(
    number: int | None, numbers: list[int], owners: list[torch.fx.Node]
) -> torch.fx.Node | None:
    """The forward op with this autograd sequence number. Under several gradients an op takes
    several numbers, and the last is its own.
    """
    at = len(numbers) if number is None else bisect.bisect_left(numbers, number)
    return owners[at] if at < len(owners) else None


def line_of(stack: str | None) -> str | None:
    """The innermost line of user code in a stack trace."""
    frames = [(file, line) for file, line in _FRAME.findall(stack or "") if is_users(file)]
    return source_at(*frames[-1]) if frames else None


def user_line(node: torch.fx.Node) -> str | None:
    """The user's line of a node of Dynamo's graph."""
    return line_of(node.meta.get("stack_trace"))
