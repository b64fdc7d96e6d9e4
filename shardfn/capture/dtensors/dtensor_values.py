"""Which values of Dynamo's graph are DTensors, and how torch places each.

A DTensor inside a captured function is a global tensor. Its placements are needed where the code
asks for them, as `to_local` does. They are those that torch gives it: torch's own code runs the
ops that lead to the value, on DTensors without values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ... import _compat, _tree
from ...errors import CaptureError
from ...mesh import axes_of, entered_meshes
from ...ops import placement
from ...ops.nodes import args_of, returned_by
from ...ops.prims import CALLS
from ...ops.text_formats import parse_placed, print_placed
from ...simulated import is_on_part, placements_on
from ..control_flow import bodies
from ..dynamo_nodes import BACKWARD, PLUMBING, is_wrap, name_of
from ..shard_map.axis_names import current_scope
from ..transform_levels import dtensor_at
from . import placement_checks, replaced_calls
from .flattened_meshes import flattened
from .mixed_ops import of_control_flow, origin_of, refuse_mixed, refuse_two_meshes
from .shared_memory_writes import is_replaceable

Outer = Mapping[torch.fx.Node, torch.fx.Node]
APART = (*placement.PLACING_CALLS, placement.forget_dtensor)
PLACING = ("redistribute", "full_tensor")
HOOKED = "register_hook"  # of a value, which it stands for, and the body of a hook
FIX = "call x.redistribute(mesh, placements) before this op: redistribute sets the placements of x"


class DTensors:
    """Which values are DTensors in one capture, and what Dynamo asks about them."""

    methods = replaced_calls.METHODS
    attributes = replaced_calls.ATTRIBUTES
    functions = replaced_calls.FUNCTIONS
    of_meshes = replaced_calls.OF_MESHES
    of_losses = replaced_calls.OF_LOSSES
    of_groups = replaced_calls.OF_GROUPS

    def __init__(
        self, mode: _compat.FakeTensorMode, arguments: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.mode = mode
        self.arguments = arguments  # the path and the fake tensor of each
        self.known: dict[torch.fx.Node, Any] = {}  # on the meta device
        self.meshes: set[tuple[str, ...]] = set()  # the axes of each
        self.left: list[torch.fx.Node] = []  # the results of bodies that nothing runs yet
        self.bodies: dict[torch.fx.Node, torch.fx.Node] = {}  # those of what runs

    @property
    def kinds(self) -> dict[torch.fx.Node, bool]:
        """Which values are known to be DTensors or plain."""
        return current_scope().are_dtensors

    @_compat.located
    def check(self, node: torch.fx.Node, outer: Callable[[], Outer]) -> None:
        """Refuse a new node of Dynamo's graph that mixes DTensors and plain tensors.

        Raises:
            CaptureError: it does.
        """
        if node.target in placement.PLACING_CALLS:
            self.meshes.add(_axes_of(node, {}))
        if self.meshes:
            around = outer()
            self._note_result(node, around)
            is_placed = lambda x: self.is_dtensor(x, around)
            refuse_mixed(node, is_placed, lambda x: origin_of(x, around, self.arguments))
            if len(self.meshes) > 1:
                refuse_two_meshes(node, is_placed, lambda x: _axes_of(x, around))

    def _note_result(self, node: torch.fx.Node, outer: Outer) -> None:
        """Note whether a result of a body is a DTensor, whatever else enters the body."""
        if node.target is bodies.mark_results:
            self.left.append(node)
            for x in args_of(node)[0]:
                self.is_dtensor(x, outer)
        if node.target is not operator.getitem:
            return
        every, k = args_of(node)
        if is_wrap(every) and isinstance(k, int):
            left = self._left_by(every)
            x = args_of(left)[0][args_of(returned_by(left.graph)[k])[1]]
            self.kinds[node] = self.kinds[x]

    def _left_by(self, wrap: torch.fx.Node) -> torch.fx.Node:
        """The results of the body that a node runs."""
        if wrap not in self.bodies:
            self.bodies[wrap] = self.left.pop()
        return self.bodies[wrap]

    def is_dtensor(self, node: torch.fx.Node, outer: Outer) -> bool:
        """Whether the value of a node is a DTensor."""
        return is_dtensor(node, outer, self.kinds)

    @_compat.located
    def asked_for(self, node: torch.fx.Node, outer: Outer) -> bool:
        """Whether a value is a DTensor, where the code calls isinstance.

        Raises:
            NeedsRanks: it may be, and is read as a global tensor.
        """
        here = current_scope()
        if here.may_be_of_ranks and here.mesh is not None and not here.manual:
            raise placement_checks.needs_ranks("isinstance(x, DTensor)", here.mesh)
        return self.is_dtensor(node, outer)

    @_compat.located
    def flattened(self, mesh: Any, *args: Any) -> Any:
        """The mesh of one axis with the ranks of a mesh, made once for each name.

        Raises:
            CaptureError: torch refuses it.
        """
        return flattened(mesh, *args)

    @_compat.located
    def has_class(self, node: torch.fx.Node, outer: Outer) -> bool:
        """Whether a value is a DTensor, for code that asks for its class.

        Raises:
            NeedsRanks: it may be, and is read as a global tensor: no mesh is entered, so there is
                one by a DTensor that is an argument.
        """
        return self.asked_for(node, outer) if not entered_meshes() else self.is_dtensor(node, outer)

    @_compat.located
    def placed(self, name: str, node: torch.fx.Node, outer: Outer) -> str | None:
        """The placements of a DTensor, as text; None for a plain tensor.

        Raises:
            CaptureError: torch does not say how it is placed.
        """
        if not self.is_dtensor(node, outer):
            return None
        if node.target in placement.PLACING_CALLS:
            return str(node.args[1])
        if name in PLACING:  # they say themselves how the result is placed
            staged = {
                axis
                for text in _placed_before(node, outer)
                for axis in placement_checks.stages_in(text)
            }
            unknown = lambda axis: placement_checks.STAGE if axis in staged else "?"
            return print_placed((axis, unknown(axis)) for axis in _axes_of(node, outer))
        try:
            with _compat.neutral():
                found = self.value(node, outer)
        except Exception as error:
            if name in replaced_calls.OURS:
                return None
            raise CaptureError.of(
                f"DTensor.{name}", f"torch cannot place this DTensor: {_first_line(error)}", fix=FIX
            ) from error
        if not isinstance(found, DTensor) and name in replaced_calls.OURS:
            return None
        if not isinstance(found, DTensor):
            raise CaptureError.of(
                f"DTensor.{name}",
                "the placements of this DTensor are not known at this point",
                fix=FIX,
            )
        return dtensor_placements_text(found)

    @_compat.located
    def closed_over(self, x: DTensor) -> tuple[Any, str]:
        """How a DTensor that the function closes over becomes a global tensor: the function of a
        tensor and a text that places it, and the text.

        Raises:
            NeedsRanks: among plain tensors.
            PlacementError: its mesh is another one.
        """
        placement_checks.check_closed_over(x.device_mesh)
        if placement_checks.among_global_tensors():
            current_scope().closes_over = True
            return _constrained, dtensor_placements_text(x, current_scope().mesh)
        if not is_on_part(x, current_scope().mesh):
            return placement.placed, dtensor_placements_text(x)
        placement_checks.refuse_uneven_part("a closed-over DTensor", "", x)
        current_scope().parts.append(x)
        return replaced_calls.CLOSED_OVER[replaced_calls.PART], dtensor_placements_text(x)

    def is_replaceable(self, x: torch.fx.Node, value: torch.fx.Node, graph: torch.fx.Graph) -> bool:
        """Whether a value may be read in place of a tensor that it overwrites."""
        return is_replaceable(x, value, graph)

    def stand_in(self, x: DTensor) -> torch.Tensor:
        """A fake tensor for a DTensor."""
        with _compat.neutral():
            return fake_global_tensor(x, self.mode)

    @_compat.located
    def mesh(self, node: torch.fx.Node, outer: Outer) -> Any:
        """The mesh of a DTensor."""
        if not self.is_dtensor(node, outer):
            placement_checks.refuse_plain("DTensor.device_mesh", None)
        return _mesh_of(_axes_of(node, outer))

    def value(self, node: torch.fx.Node, outer: Outer) -> Any:
        """The value of a node, as torch places it."""
        node = outer.get(node, node)
        if node not in self.known:
            made = self._made(node, outer)
            self.known[node] = _tree.tree_map(_with_own_masks, made)
        return self.known[node]

    def _made(self, node: torch.fx.Node, outer: Outer) -> Any:
        name = name_of(node)
        if node.target in placement.PLACING_CALLS:
            return self._from_text(node, str(node.args[1]))
        if name == HOOKED:
            return self.value(args_of(node)[0], outer)
        if any(x.op == "get_attr" for x in node.all_input_nodes):
            return None  # of a subgraph
        if not self.is_dtensor(node, outer):
            return self._plain(node.meta.get("example_value"))
        if name in PLUMBING:
            x, *rest = args_of(node)
            return dtensor_at(name, self.value(x, outer), rest)
        if name in BACKWARD:
            return [self.value(x, outer) for x in args_of(node)[1]]
        if node.target is placement.align:
            return [self.value(x, outer) for x in args_of(node)[1]]
        if any(self.value(x, outer) is None for x in node.all_input_nodes):
            return None
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda x: self.value(x, outer)
        )
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        call: Any = node.target
        return call(*args, **kwargs)

    def _from_text(self, node: torch.fx.Node, text: str) -> DTensor:
        placement_checks.refuse_stages("a result", text)
        placement_checks.refuse_unknown("a result", text)
        x = node.meta["example_value"]
        rows = parse_placed(text)
        mesh = _mesh_of(tuple(axis for axis, _ in rows))
        placements = [placement_of(said) for _, said in rows]
        shape = tuple(map(int, x.shape))  # torch places no symbols
        stride = tuple(map(int, x.stride()))
        return _compat.empty_dtensor(mesh, placements, shape, stride, x.dtype)

    def _plain(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        shape = tuple(map(int, x.shape))
        stride = tuple(map(int, x.stride()))
        return torch.empty_strided(shape, stride, dtype=x.dtype, device="meta")


def _with_own_masks(x: Any) -> Any:
    return _compat.with_own_masks(x) if isinstance(x, DTensor) else x


# values that are made of a DTensor and are none
SIZES = torch.Size, int, float, torch.SymInt, torch.SymFloat, torch.SymBool


@_compat.read_by_dynamo
def _constrained(x: torch.Tensor, text: str) -> torch.Tensor:
    """A global tensor with a placement constraint, which does not count as a DTensor."""
    return placement.forget_dtensor(placement.placed(x, text))


def fake_global_tensor(x: DTensor, mode: Any) -> torch.Tensor:
    """A fake tensor of the global shape, with the device of the local tensor. For a DTensor on a
    part of the mesh one of each rank's own tensors.
    """
    shape = tuple(x.shape)
    stride = tuple(x.stride())
    scope = current_scope()
    if any(x is part for part in scope.parts):
        local = _compat.local_tensor(x)  # shards are even
        shape = (scope.mesh.size(), *local.shape)
        stride = (max(local.numel(), 1), *local.stride())
    with mode, torch.enable_grad():
        made = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)


def is_dtensor(node: torch.fx.Node, outer: Outer, known: dict[torch.fx.Node, bool]) -> bool:
    """Whether the value of a node of Dynamo's graph is a DTensor.

    Args:
        node: the node.
        outer: the inputs of subgraphs, each with the value outside.
        known: answers so far.
    """
    stack = [] if node in known else [node]
    while stack:
        here = stack[-1]
        sources = _deciding_inputs(here, outer)
        missing = [x for x in sources if x not in known]
        if missing:
            stack += missing
            continue
        is_size = isinstance(here.meta.get("example_value"), SIZES)
        known[here] = here.target in placement.PLACING_CALLS or (
            not is_size and any(known[x] for x in sources)
        )
        stack.pop()
    return known[node]


def _deciding_inputs(node: torch.fx.Node, outer: Outer) -> list[torch.fx.Node]:
    """The values that decide whether a value is a DTensor: it is one if any of them is."""
    if node in outer:
        return [outer[node]]
    if node.target in APART or node.target in CALLS:
        return []
    if (like := _gradient_of(node)) is not None:
        return [like]
    if (found := of_control_flow(node)) is not None:
        return found
    if name_of(node) in BACKWARD:
        return [x for x in args_of(node)[1] if isinstance(x, torch.fx.Node)]
    return node.all_input_nodes


def _gradient_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """For one of several gradients: the value whose gradient it is."""
    if node.target is not operator.getitem:
        return None
    every, k = args_of(node)
    if not isinstance(every, torch.fx.Node) or not isinstance(k, int):
        return None
    is_backward = name_of(every) in BACKWARD
    if not is_backward and every.target is not placement.align:
        return None
    like = args_of(every)[1][k]
    return like if isinstance(like, torch.fx.Node) else None


def _axes_of(node: torch.fx.Node, outer: Outer) -> tuple[str, ...]:
    """The axes of the mesh of a DTensor."""
    text = next(_placed_before(node, outer), "")
    return tuple(axis for axis, _ in parse_placed(text))


def _placed_before(node: torch.fx.Node, outer: Outer) -> Iterator[str]:
    """The placements, as text, of the DTensors of which a DTensor is made."""
    seen = set()
    queue = [node]
    while queue:
        here = queue.pop()
        if here.target in placement.PLACING_CALLS:
            yield str(here.args[1])
        elif here not in seen:
            seen.add(here)
            queue += _deciding_inputs(here, outer)


def _mesh_of(names: tuple[str, ...]) -> Any:
    """The mesh of a capture, or the part of it with these axes."""
    mesh = current_scope().mesh
    return mesh if axes_of(mesh).names == names else mesh[names]


def dtensor_placements_text(x: DTensor, mesh: Any = None) -> str:
    """The placements of a DTensor as text, on its own mesh or on one that it is on a part of."""
    names = axes_of(mesh or x.device_mesh).names
    placements = placements_on(x, mesh) if mesh else x.placements
    return print_placed(zip(names, map(_placement_text, placements), strict=True))


def _placement_text(placement: Placement) -> str:
    """A DTensor placement as text."""
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return f"P{placement.reduce_op}"
    return "R" if isinstance(placement, Replicate) else f"?{type(placement).__name__}"


def placement_of(text: str) -> Placement:
    """The DTensor placement of a text."""
    kind = text[0]
    rest = text[1:]
    assert kind != "?", f"{rest} is refused before"
    if kind == "S":
        return Shard(int(rest))
    return Partial(rest) if kind == "P" else Replicate()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
