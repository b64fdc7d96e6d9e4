"""Where Dynamo stops: calls, classes and attributes that a captured function may not use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..threads import is_capturing
from ..tracing import is_wrapped, unwrapped
from . import generators
from .restored import Place
from .shells import opened
from .tensor_classes import class_name, holds_tensors, is_foreign, is_foreign_class

# torch's words for a custom op whose derivative torch.func does not take
NO_DERIVATIVE = "must override the setup_context"
ASKS_RANK = "the function asks for its rank"

MAKES_DTENSOR = "the function makes a DTensor or reads its local tensor"

# as Dynamo refuses torch.Tensor([x, y]); of torch.FloatTensor([x, y]) it would make a gradient
OF_LIST = "call_function <class 'torch.Tensor'>: data is not allocated yet"
FOREIGN = "the function closes over a tensor of class"

FOLLOWED = "the function reads an attribute of a differentiated or mapped tensor of class"

MADE_OF_FOLLOWED = "the function makes, from differentiated or mapped tensors, a tensor of class"

MADE = "makes a tensor of class"

COMMUNICATES = "communicates by itself:"

READS_VERSION = "the function asks a tensor for its ._version;"

READS_CONTEXT = "of class `ContextVar`"  # in torch's error, before 2.15

OF_DTENSORS = ("torch.distributed.tensor", "shardfn.simulated.dtensor")
READABLE = (  # by calls of DTensor that Dynamo reads ours for
    "torch.distributed.tensor.placement_types",
    "torch.distributed.tensor.experimental._func_map",
    "torch.distributed.tensor.experimental.local_map",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor._api.distribute_module.",
)


def outside_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse calls of this function, which makes DTensors, while Dynamo traces."""
    fn.makes_dtensors = True
    return fn


def makes_dtensors(fn: Any) -> bool:
    """Return whether a function makes DTensors: those of torch.distributed.tensor, except for what
    Dynamo can read, and marked ones.
    """
    if getattr(fn, "makes_dtensors", False) is True:
        return True
    module = getattr(fn, "__module__", None)
    inside = isinstance(module, str) and module.startswith(OF_DTENSORS)
    name = f"{module}.{getattr(fn, '__qualname__', '')}"
    return inside and not name.startswith(READABLE)


def refusal(fn: Any) -> str | None:
    """Say why a captured function may not call a function or class; None if it may."""
    if makes_dtensors(fn):
        return MAKES_DTENSOR
    if is_foreign_class(fn):
        return f"{MADE} {fn.__name__};"
    if isinstance(fn, type) and _runs_code_unread(fn):
        return (
            f"{fn.__name__} has a __del__, or a metaclass with a __call__, which Dynamo does not "
            "trace"
        )
    collective = getattr(fn, "__module__", None) == "torch.distributed._functional_collectives"
    return f"{COMMUNICATES} {fn.__name__};" if collective else None


def _runs_code_unread(cls: type) -> bool:
    """Return whether making or deleting an object of a class runs Python that Dynamo leaves out."""
    made = getattr(type(cls).__call__, "__code__", None)
    is_enum = issubclass(cls, enum.Enum)
    is_deleted = hasattr(getattr(cls, "__del__", None), "__code__")
    return is_deleted or (made is not None and not is_enum)


RANK = {
    "get_rank",
    "get_local_rank",
    "get_coordinate",
    "rank",
}  # torch.distributed, a mesh or a group


def _followed(fake: Any, name: Any) -> str | None:
    """Why an attribute of a tensor may not be read: it is one of the tensors that it holds, and a
    transform follows the tensor alone.
    """
    if not isinstance(name, str) or not is_wrapped(fake):
        return None
    inner = unwrapped(fake)
    is_held = holds_tensors(inner) and name in opened(inner)[1].names
    return f"{FOLLOWED} {class_name(inner)}: .{name};" if is_held else None


def refuse(text: str | None) -> None:
    """Stop Dynamo with a text that `explained` recognizes. Does nothing without a text."""
    from torch._dynamo import exc

    if text:
        raise exc.UserError(exc.UserErrorType.ANTI_PATTERN, text)


def rank_call_refused(call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Patch Dynamo's call of a torch function, which may ask for the rank."""
    refuse(ASKS_RANK if function.value is dist.get_rank else None)
    return call(function, *args, **kwargs)


def rank_method_refused(
    call: Callable[..., Any], owner: Any, tx: Any, name: str, *args: Any, **kw: Any
) -> Any:
    """Patch Dynamo's call of a method of a mesh or group, which may ask for the rank."""
    refuse(ASKS_RANK if name in RANK else None)
    return call(owner, tx, name, *args, **kw)


def context_refused(read: Callable[..., Any], variable: Any, tx: Any, *args: Any) -> Any:
    """Refuse a read of a ContextVar, which torch 2.15 takes for a constant. Those of torch's
    settings are in the key of a capture.
    """
    is_torchs = tx.f_globals.get("__name__", "").startswith("torch.")
    refuse(None if is_torchs else f"a read of a variable {READS_CONTEXT}")
    return read(variable, tx, *args)


def refuse_attribute(fake: Any, name: Any) -> None:
    """Stop Dynamo where one of the tensors is read that a tensor holds, under a transform, or how
    often a tensor was written to, which a pure graph does not do.
    """
    refuse(READS_VERSION if name == "_version" else _followed(fake, name))


def refuse_class_of_followed(node: Any, classes: tuple[Any, ...]) -> None:
    """Stop Dynamo where a function asks for the class of a tensor that holds others, under a
    transform: the answer would be a plain tensor.
    """
    fake = node.meta.get("example_value")
    if not is_wrapped(fake) or not holds_tensors(inner := unwrapped(fake)):
        return
    if any(isinstance(inner, c) is not isinstance(fake, c) for c in classes):
        refuse(f"{FOLLOWED} {class_name(inner)}: .__class__;")


def refuse_call(called: Any, args: Any, kwargs: Any) -> None:
    """Stop Dynamo at a call that makes a DTensor, communicates or seeds a generator, or that makes
    a tensor of those that a transform follows, or of a list of tensors.
    """
    refuse(refusal(called) or generators.seeds(called, kwargs))
    if isinstance(called, type(torch.FloatTensor)) and any(map(_is_list_of_tensors, args)):
        refuse(OF_LIST)
    if isinstance(called, type) and hasattr(called, "__tensor_flatten__"):
        given = [*args, *kwargs.values()]
        held = [x.proxy.node.meta.get("example_value") for x in given if hasattr(x, "proxy")]
        if any(map(is_wrapped, held)):
            refuse(f"{MADE_OF_FOLLOWED} {called.__name__};")


def _is_list_of_tensors(x: Any) -> bool:
    """Check for a list in which Dynamo reads a tensor."""
    from torch._dynamo.variables import ListVariable, TupleVariable

    given = x.realize()
    is_list = isinstance(given, (ListVariable, TupleVariable))
    return is_list and any(item.realize().is_tensor() for item in given.items)


def collective_refused(_: Any, function: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a torch.distributed collective that Dynamo would rewrite."""
    refuse(f"{COMMUNICATES} {function.fn.__name__};")


def method_refused(
    call: Callable[..., Any], tensor: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """A call of a tensor's method, which may be given a generator, or make a tensor of another
    class: tensor.as_subclass(cls).
    """
    if generators.is_given("generator", kwargs):
        refuse(generators.READS_GENERATOR)
    if name == "as_subclass" and args:
        refuse(refusal(getattr(args[0].realize(), "value", None)))
    return call(tensor, tx, name, args, kwargs)


def class_refused(wrap: Callable[..., Any], builder: Any, value: Any) -> Any:
    """Patch Dynamo's wrapping of a new tensor, to refuse unknown subclasses."""
    is_refused = is_foreign(value) and not (isinstance(value, DTensor) or holds_tensors(value))
    refuse(f"{FOREIGN} {class_name(value)};" if is_refused else None)
    return wrap(builder, value)


def side_effects_listed(memo: Any, listed: Any, output: Any, **options: Any) -> list[str]:
    """The sources of the objects that a function changes, for the error that refuses them, with
    the attributes and keys that change. Torch leaves out the dicts of torch.export: in a capture
    there are none. Notes the places that a function may store values in.
    """
    if not is_capturing():
        return listed(output, **options)
    from torch._dynamo.source import _get_source_debug_name
    from torch._dynamo.variables import base

    outside = base.AttributeMutationExisting, base.ValueMutationExisting
    changed = [
        variable
        for variable in output.side_effects._get_modified_vars()
        if isinstance(getattr(variable, "mutation_type", None), outside)
    ]
    stored = output.side_effects.store_attr_mutations
    places = [_places(output, x, stored.get(x, {})) for x in changed]
    if all(rows is not None for rows in places):
        memo.places = tuple(place for rows in places for place in rows or ())
    return [
        _get_source_debug_name(variable.source) + part
        for variable in changed
        for part in _changed_parts(variable, stored.get(variable, {})) or [""]
    ]


def _places(output: Any, variable: Any, stored: dict[str, Any]) -> list[Place] | None:
    """List the attributes of an object, or the keys of a dict, that a function stores values in.
    Buffers of modules are left out. None if it changes the object in another way.
    """
    from torch._dynamo.variables.misc import DeletedVariable

    try:
        owner = output.resolve_source_value(variable.source)
    except Exception:
        return None
    if any(isinstance(x, DeletedVariable) for x in stored.values()):
        return None
    if stored and isinstance(variable.mutation_type, _attributes()):
        own = getattr(type(owner), "__setattr__", None)
        is_plain = own in (object.__setattr__, torch.nn.Module.__setattr__)
        if not is_plain or isinstance(owner, type) or not hasattr(owner, "__dict__"):
            return None
        buffers = getattr(owner, "_buffers", ())
        others = {*getattr(owner, "_parameters", ()), *getattr(owner, "_modules", ())}
        if not others.isdisjoint(stored):
            return None
        return [Place(owner, "attr", name) for name in stored if name not in buffers]
    held = getattr(variable, "_base_vt", None) or variable
    before, now = getattr(held, "original_items", None), getattr(held, "items", None)
    if type(owner) is not dict or not isinstance(before, dict) or not isinstance(now, dict):
        return None
    keys = [key.vt for key in now]
    is_gone = any(key not in keys for key in before)
    new = [k.vt for k, x in now.items() if k.vt not in before or held.is_new_item(before[k.vt], x)]
    if is_gone or not all(key.is_python_constant() for key in new):
        return None
    return [Place(owner, "item", key.as_python_constant()) for key in new]


def _attributes() -> type:
    from torch._dynamo.variables.base import AttributeMutationExisting

    return AttributeMutationExisting


def _changed_parts(variable: Any, stored: Iterable[str]) -> list[str]:
    """List the attributes and keys that a function stores in an object."""
    parts = [f".{name}" for name in stored if name != "cell_contents"]
    held = getattr(variable, "_base_vt", None) or variable
    before, now = getattr(held, "original_items", None), getattr(held, "items", None)
    if isinstance(before, dict) and isinstance(now, dict):
        new = [k for k, x in now.items() if k.vt not in before or held.is_new_item(before[k.vt], x)]
        parts += [f"[{k.vt.as_python_constant()!r}]" for k in new if k.vt.is_python_constant()]
    return parts
