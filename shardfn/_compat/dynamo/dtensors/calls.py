"""Methods and functions of DTensors that Dynamo meets: it reads ours in their place."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ....errors import is_ours
from ...distributed.fsdp_hooks import key_of, takes_itself
from .. import argument_facts, shown
from ..refused import collective_refused, refuse_call, refuse_class_of_followed
from ..sizes import is_dense
from . import arguments


def overwrite(x: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value over a tensor. Dynamo reads the value in its place, where nothing else shows
    the tensor's memory.
    """
    x.copy_(value)


def for_a_while(fn: Callable[..., Any], *args: Any) -> None:
    """Call a function that changes objects, which the traced body changes back before it ends."""
    fn(*args)


WAIT = "wait"  # of a tensor that a functional collective returns
CONTIGUOUS = "contiguous"  # the tensor itself where it is, which a collective may overwrite


class DTensors(Protocol):
    """Our replacements of DTensor's methods, and the tensors of a capture that stand
    for DTensors.
    """

    methods: Mapping[str, Callable[..., Any]]
    attributes: Mapping[str, Callable[..., Any]]
    functions: Mapping[Any, Callable[..., Any]]
    of_losses: Mapping[Any, Callable[..., Any]]
    of_meshes: Mapping[str, Callable[..., Any]]
    of_groups: Mapping[str, Callable[..., Any]]

    def placed(self, name: str, node: torch.fx.Node, outer: Mapping[Any, Any]) -> str | None:
        """The placements of a DTensor's node as text; None for a plain tensor."""
        ...

    def check(self, node: torch.fx.Node, outer: Callable[[], Mapping[Any, Any]]) -> None:
        """Refuse a new node that mixes DTensors and plain tensors."""
        ...

    def closed_over(self, x: DTensor) -> tuple[Callable[..., Any], str]:
        """The function that places a closed-over DTensor, and the text that it takes."""
        ...

    def stand_in(self, x: DTensor) -> torch.Tensor:
        """Make the fake tensor that stands for a DTensor in Dynamo's graph."""
        ...

    def is_replaceable(self, x: torch.fx.Node, value: torch.fx.Node, graph: torch.fx.Graph) -> bool:
        """Whether a value may be read in place of a tensor that it overwrites."""
        ...

    def mesh(self, node: torch.fx.Node, outer: Mapping[Any, Any]) -> DeviceMesh:
        """The mesh of a DTensor's node."""
        ...

    def flattened(self, mesh: DeviceMesh, *args: Any) -> DeviceMesh:
        """The 1-D mesh over all ranks of a mesh."""
        ...

    def has_class(self, node: torch.fx.Node, outer: Mapping[Any, Any]) -> bool:
        """Whether the value of a node is a DTensor, for user code that asks for its class."""
        ...

    def asked_for(self, node: torch.fx.Node, outer: Mapping[Any, Any]) -> bool:
        """Whether the value of a node is a DTensor, for code that asks."""
        ...


def method_called(
    dtensors: DTensors,
    call: Callable[..., Any],
    tensor: Any,
    tx: Any,
    name: str,
    args: Any,
    kwargs: Any,
) -> Any:
    """Patch Dynamo's call of a tensor method, which may be a method of DTensor."""
    if name == WAIT and not args:
        return tensor  # a value is available where it is read
    if name == CONTIGUOUS and not (args or kwargs) and is_dense(node_of(tensor)):
        return tensor
    if name not in dtensors.methods:
        return call(tensor, tx, name, args, kwargs)
    ours = dtensors.methods[name]
    method = getattr(DTensor, name)
    arguments.check(method, ours, [tensor, *args], kwargs, own=[tensor, None])
    placed = dtensors.placed(name, node_of(tensor), _outer(tx))
    return read_ours(tx, ours, [tensor, placed, *args], kwargs)


def _overwritten(dtensors: DTensors, tx: Any, args: Any) -> Any:
    """Give a tensor a new value under every name by which Dynamo knows it."""
    tensor, value = args[0].realize(), args[1].realize()
    graph = tx.output.current_tracer.graph
    if dtensors.is_replaceable(node_of(tensor), node_of(value), graph):
        tensor.proxy = value.as_proxy()
        return tensor
    return tensor.call_method(tx, "copy_", [value], {})


def _changed(call: Callable[..., Any], function: Any, tx: Any, args: Any) -> Any:
    """Run a function that changes objects; Dynamo refuses such changes in bodies of
    control flow.
    """
    tracer = tx.output.current_tracer
    before = tracer.unsafe_allow_externally_visible_side_effects
    tracer.unsafe_allow_externally_visible_side_effects = True
    try:
        return call(function, tx, args, {})
    finally:
        tracer.unsafe_allow_externally_visible_side_effects = before


def attribute_read(
    dtensors: DTensors, read: Callable[..., Any], tensor: Any, tx: Any, name: str
) -> Any:
    """Patch Dynamo's read of a tensor attribute, which may be one of DTensor."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import GetAttrVariable

    if name in dtensors.methods:
        return GetAttrVariable(tensor, name)
    if name == "__class__" and _is_asked_for_class(dtensors, tensor, tx):
        return VariableTracker.build(tx, DTensor)
    if name == "device_mesh":
        return mesh_variable(tx, dtensors.mesh(node_of(tensor), _outer(tx)))
    if name == "_local_tensor":
        placed = dtensors.placed(name, node_of(tensor), _outer(tx))
        return read_ours(tx, dtensors.methods["to_local"], [tensor, placed], {})
    if name not in dtensors.attributes:
        return read(tensor, tx, name)
    placed = dtensors.placed(name, node_of(tensor), _outer(tx))
    return read_ours(tx, dtensors.attributes[name], [placed], {})


def declared_member(dtensors: DTensors, look_up: Callable[..., Any], tensor: Any, name: str) -> Any:
    """A member that torch 2.15 declares in a table and reads before any other attribute. The
    class of a tensor is one: not that of the fake argument, which its source would show.
    """
    from torch._dynamo.variables.base import VariableTracker

    member = look_up(tensor, name)
    if name != "__class__" or member is None:
        return member

    def read(tensor: Any, tx: Any, name: str) -> Any:
        return VariableTracker.build(tx, tensor.python_type())

    def getter(tensor: Any, tx: Any) -> Any:
        return attribute_read(dtensors, read, tensor, tx, name)

    return dataclasses.replace(member, getter=getter)


def has_attribute(
    dtensors: DTensors, asked: Callable[..., Any], tensor: Any, tx: Any, name: str
) -> Any:
    """Patch Dynamo's hasattr of a tensor, whose attribute may be one of DTensor."""
    from torch._dynamo.variables.base import VariableTracker

    own = {*dtensors.methods, *dtensors.attributes, "device_mesh", "_local_tensor"}
    if name not in own:
        return asked(tensor, tx, name)
    found = dtensors.asked_for(node_of(tensor), _outer(tx))
    return VariableTracker.build(tx, found)


def function_called(
    dtensors: DTensors, call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """A call of any function or class, which may be one of DTensors, or one that is refused. One
    patch for both, since each is one more frame of every call that Dynamo reads inside another.
    """
    called = getattr(function, "fn", None) or getattr(function, "value", None)
    key = key_of(called)
    shows = shown.of_function(called)
    if shows is not None:
        return shown.show(shows, tx, args, kwargs)
    if called is logging.getLogger:
        return shown.logger_found(tx, args, kwargs)
    ours = dtensors.functions.get(key)
    if ours is not None:
        owner = getattr(function, "obj", None)  # of a method
        owner = owner or getattr(function, "im_self", None)  # from torch 2.15 on
        own = [function] if takes_itself(key) else [owner] if owner else []
        if key is called:
            arguments.check(called, ours, args if takes_itself(key) else [*own, *args], kwargs)
        return read_ours(tx, ours, [*own, *args], kwargs)
    if called is overwrite:
        return _overwritten(dtensors, tx, args)
    if called is for_a_while:
        return _changed(call, function, tx, args)
    if (method := _unbound(dtensors, called)) is not None:
        tensor, *rest = args
        return tensor.realize().call_method(tx, method, rest, kwargs)
    if key in dtensors.of_losses:
        args, kwargs = _with_labels(dtensors, tx, called, args, kwargs)
    refuse_call(called, args, kwargs)
    return call(function, tx, args, kwargs)


def _with_labels(dtensors: DTensors, tx: Any, called: Any, args: Any, kwargs: Any) -> Any:
    """Replace the labels among the arguments of a loss by the form that the loss takes."""
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    if not {"input", "target"} <= given.keys():
        return args, kwargs
    both = [given["input"], given["target"]]
    target = read_ours(tx, dtensors.of_losses[called], both, {})
    if "target" in kwargs:
        return args, {**kwargs, "target": target}
    return [args[0], target, *args[2:]], kwargs


def _unbound(dtensors: DTensors, called: Any) -> str | None:
    """Return the name of a DTensor method that is called as a function, such as
    DTensor.to_local.
    """
    name = getattr(called, "__name__", "")
    is_method = name in dtensors.methods and called is getattr(DTensor, name)
    return name if is_method else None


def collective_called(
    dtensors: DTensors, call: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Patch Dynamo's rewriting of torch.distributed collectives: read ours instead."""
    ours = dtensors.functions.get(function.fn)
    if ours is None:
        return collective_refused(call, function, tx, args, kwargs)
    arguments.check(function.fn, ours, args, kwargs)
    return read_ours(tx, ours, args, kwargs)


def node_created(
    dtensors: DTensors, create: Callable[..., Any], tracer: Any, *args: Any, **kw: Any
) -> Any:
    """Patch Dynamo's creation of graph nodes: refuse one that mixes DTensors and plain tensors."""
    node = create(tracer, *args, **kw)
    if node.op in ("call_function", "call_method"):
        dtensors.check(node, functools.partial(_outside, tracer))
    return node


def is_instance(
    dtensors: DTensors, call: Callable[..., Any], builtin: Any, tx: Any, x: Any, classes: Any
) -> Any:
    """Patch isinstance in Dynamo, which may ask whether a tensor is a DTensor."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    asked = classes.as_python_constant()
    every = asked if isinstance(asked, tuple) else (asked,)
    if isinstance(x, TensorVariable):
        refuse_class_of_followed(node_of(x), every)
        if torch.nn.Parameter in every and _is_parameter(x, tx):
            return VariableTracker.build(tx, True)
    is_asked = DTensor in every and isinstance(x, TensorVariable)
    if is_asked and dtensors.asked_for(node_of(x), _outer(tx)):
        return VariableTracker.build(tx, True)
    return call(builtin, tx, x, classes)


def class_of(dtensors: DTensors, call: Callable[..., Any], builtin: Any, tx: Any, x: Any) -> Any:
    """Patch type() in Dynamo, which may ask for the class of a DTensor."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    held = x.realize()
    is_tensor = isinstance(held, TensorVariable)
    if is_tensor and _is_asked_for_class(dtensors, held, tx):
        return VariableTracker.build(tx, DTensor)
    if is_tensor and _is_parameter(held, tx):
        return VariableTracker.build(tx, torch.nn.Parameter)
    return call(builtin, tx, x)


def _is_parameter(tensor: Any, tx: Any) -> bool:
    """Return whether code that is not ours looks at an argument that is an nn.Parameter."""
    if is_ours(tx.f_code.co_filename):
        return False
    return argument_facts.is_parameter(node_of(tensor).meta.get("example_value"))


def _is_asked_for_class(dtensors: DTensors, tensor: Any, tx: Any) -> bool:
    """Return whether the user's code asks for the class of a tensor that stands for a DTensor."""
    is_users = not is_ours(tx.f_code.co_filename)
    return is_users and dtensors.has_class(node_of(tensor), _outer(tx))


def read_ours(tx: Any, fn: Callable[..., Any], args: list[Any], kwargs: Any) -> Any:
    """Have Dynamo read a function of ours. Arguments may be constants."""
    from torch._dynamo.variables.base import VariableTracker

    given = [x if isinstance(x, VariableTracker) else VariableTracker.build(tx, x) for x in args]
    return VariableTracker.build(tx, fn).call_function(tx, given, kwargs)


def mesh_variable(tx: Any, mesh: DeviceMesh) -> Any:
    """Wrap a DeviceMesh as a Dynamo variable."""
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.builder import VariableBuilder

    name = tx.output.install_global_by_id("mesh", mesh)
    return VariableBuilder(tx, GlobalSource(name))(mesh)


def node_of(tensor: Any) -> torch.fx.Node:
    return tensor.as_proxy().node


def _outer(tx: Any) -> dict[Any, Any]:
    return _outside(tx.output.current_tracer)


def _outside(tracer: Any) -> dict[Any, Any]:
    """Map the inputs of a subgraph, and of the subgraphs around it, to the values outside."""
    found = {}
    while tracer is not None:
        for outside, inside in tracer.lifted_freevars.items():
            found[inside.node] = outside.node
        tracer = tracer.parent
    return found
