"""Functions of trees that Dynamo runs as they are: it would read hundreds of bytecodes for each
leaf of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from .shells import Shell

Function = TypeVar("Function", bound=Callable[..., Any])

LOOKUP = "pytree_node_registry_get"  # optree's

CONTAINERS = (dict, list, tuple)

CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype)


class UnknownVariable(Exception):
    """A variable of Dynamo's that is neither a plain container, nor a tensor, nor a constant."""


def of_trees(fn: Function) -> Function:
    """Have Dynamo run this function as it is, where it meets a call of it.

    The function takes trees of tensors and constants, and other functions marked so, and returns
    new trees of them. It changes none of its arguments.
    """
    fn.__dict__["of_trees"] = True
    return fn


TORCHS = {  # torch.func calls these at every level
    _pytree.tree_flatten,
    _pytree.tree_leaves,
    _pytree.tree_unflatten,
    _pytree._broadcast_to_and_flatten,
}


def is_of_trees(fn: Any) -> bool:
    """Return whether a function is marked `of_trees`, or is an equivalent one of torch's."""
    return "of_trees" in fn.__dict__ or fn in TORCHS


def owned(tree: Any) -> Any:
    """Copy the dicts, lists and tuples of a tree, so that a captured function may change them."""
    return tree


def run_as_it_is(read: Callable[..., Any], function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Patch Dynamo's call of a Python function: one marked `of_trees` is run, not traced."""
    fn = function.fn
    run = _mapped if fn is _pytree.tree_map else _run if is_of_trees(fn) else read
    if fn.__name__ == LOOKUP:
        run = _registered_class
    if fn is owned:
        return _owned(args[0])
    try:
        return run(function, tx, args, kwargs)
    except UnknownVariable:
        return read(function, tx, args, kwargs)


def _run(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of trees on the Python values of Dynamo's variables."""
    values = Values()
    given = [values.of(x) for x in args]
    named = {name: values.of(x) for name, x in kwargs.items()}
    return values.variable(function.fn(*given, **named))


def _registered_class(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Replace optree's lookup of a class; Dynamo cannot compare `sys.version_info` before torch
    2.13.
    """
    from torch._dynamo import variables
    from torch._dynamo.source import GlobalSource

    cls = args[0].as_python_constant()
    named = {name: x.as_python_constant() for name, x in kwargs.items()}
    entry = function.fn(cls, **named)
    if entry is None:
        return Values().variable(None)
    # with a name, since objects that leave the function are made by the classes that it has
    name = tx.output.install_global_by_id("registered_class", entry)
    return variables.UserDefinedObjectVariable(entry, source=GlobalSource(name))


def _mapped(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's tree_map, tracing the function that it applies to leaves."""
    if kwargs or len(args) != 2:
        raise UnknownVariable
    values = Values()
    leaves, treedef = _pytree.tree_flatten(values.of(args[1]))
    mapped = [args[0].call_function(tx, [values.variable(x)], {}).realize() for x in leaves]
    return values.variable(_pytree.tree_unflatten(mapped, treedef))


def _owned(variable: Any) -> Any:
    """Copy a Dynamo variable of a tree with new containers."""
    from torch._dynamo import variables
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lazy import LazyVariableTracker

    is_lazy = isinstance(variable, LazyVariableTracker)
    is_read = not is_lazy or variable.is_realized()
    if not is_read and variable.peek_type() not in CONTAINERS:
        return variable  # nothing may ever read this leaf
    variable = variable.realize()
    kind = type(variable).__name__
    if kind in ("ListVariable", "TupleVariable"):
        children = [_owned(x) for x in variable.items]
        return type(variable)(children, mutation_type=ValueMutationNew())
    if kind != "ConstDictVariable" or variable.python_type() is not dict:
        return variable
    variable.install_dict_keys_match_guard()
    items = {key.vt: _owned(x) for key, x in variable.items.items()}
    return variables.ConstDictVariable(items, mutation_type=ValueMutationNew())


class Values:
    """Python's values for Dynamo's variables, with a fake tensor for each tensor."""

    def __init__(self) -> None:
        # by the id of a fake tensor, or of a symbol: its variable
        self.tensors: dict[int, Any] = {}

    def of(self, variable: Any) -> Any:
        """Convert a Dynamo variable to a Python value.

        Raises:
            UnknownVariable: it has none that a function of trees may see.
        """
        variable = variable.realize()
        read = READ.get(type(variable).__name__)
        if read is None:
            raise UnknownVariable
        return read(self, variable)

    def tensor(self, variable: Any) -> torch.Tensor:
        fake = variable.proxy.node.meta["example_value"]
        if self.tensors.setdefault(id(fake), variable) is not variable:
            raise UnknownVariable
        return fake

    def size(self, variable: Any) -> Any:
        """Convert a symbolic size."""
        self.tensors[id(variable.sym_num)] = variable
        return variable.sym_num

    def constant(self, variable: Any) -> Any:
        if type(variable.value) not in CONSTANTS:
            raise UnknownVariable
        return variable.value

    def function(self, variable: Any) -> Any:
        if not is_of_trees(variable.fn):
            raise UnknownVariable
        return variable.fn

    def row(self, variable: Any) -> list[Any]:
        return [self.of(x) for x in variable.items]

    def mapping(self, variable: Any) -> dict[Any, Any]:
        if variable.python_type() is not dict:
            raise UnknownVariable
        variable.install_dict_keys_match_guard()
        return {self.of(key.vt): self.of(x) for key, x in variable.items.items()}

    def structure(self, variable: Any) -> _pytree.TreeSpec:
        # one that Dynamo has read the making of keeps its fields elsewhere
        is_whole = variable.mutation_type is None
        if not is_whole or not isinstance(variable.value, _pytree.TreeSpec):
            raise UnknownVariable
        return variable.value

    def variable(self, value: Any) -> Any:
        """Convert a Python value back to a Dynamo variable: a tensor's own, or a new container."""
        from torch._dynamo import variables
        from torch._dynamo.variables.base import ValueMutationNew

        kind = type(value)
        if kind in CONSTANTS:
            return variables.ConstantVariable.create(value)
        if isinstance(value, torch.Tensor) or id(value) in self.tensors:
            return self.tensors[id(value)]
        if isinstance(value, torch.SymInt):
            raise UnknownVariable
        if isinstance(value, variables.VariableTracker):
            return value
        if isinstance(value, (_pytree.TreeSpec, Shell)):
            return variables.UserDefinedObjectVariable(value)
        if kind is dict:
            items = {self.variable(k): self.variable(x) for k, x in value.items()}
            return variables.ConstDictVariable(items, mutation_type=ValueMutationNew())
        make = {list: variables.ListVariable, tuple: variables.TupleVariable}[kind]
        children = [self.variable(x) for x in value]
        return make(children, mutation_type=ValueMutationNew())


READ: dict[str, Callable[[Values, Any], Any]] = {  # by the name of Dynamo's class
    "TensorVariable": Values.tensor,
    "ConstantVariable": Values.constant,
    "SymNodeVariable": Values.size,
    "UserFunctionVariable": Values.function,
    "ListVariable": Values.row,
    "TupleVariable": lambda values, x: tuple(values.row(x)),
    "ConstDictVariable": Values.mapping,
    "UserDefinedObjectVariable": Values.structure,
}
