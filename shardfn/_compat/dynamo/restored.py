"""Objects that a function changes and restores while Dynamo reads it: dicts of modules, as
torch.func.functional_call does, and attributes with constants, such as flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import attrs

from .guards import Itself, Read


class Place(NamedTuple):
    """An attribute of an object, or an item of a dict, that a function stores a value in."""

    owner: Any
    kind: str  # "attr" or "item"
    name: Any


SIDE_EFFECTS = "certain side effects happened"  # in torch's error


@attrs.define(eq=False)
class Memo:
    """The constants that a function stores in attributes of objects, as a lazy default does.

    Such a write is harmless if the function does not write any more once it has been done, as
    long as the attributes stay as they are: they are reads of the captured function.
    """

    constants: dict[tuple[int, str], tuple[Any, str, Any]] = attrs.field(factory=dict)
    before: list[tuple[Any, str, Any]] = attrs.field(factory=list)
    is_all: bool = True  # whether the function writes nothing else
    reads: list[Read] = attrs.field(factory=list)  # attributes that stay as they are
    # where a function stores values, if it changes nothing else
    places: tuple[Place, ...] = ()

    def note(self, owner: Any, attributes: dict[str, Any]) -> None:
        """Add the writes to one object."""
        for name, value in attributes.items():
            self.constants[id(owner), name] = owner, name, value

    def note_read(self, owner: Any, attributes: Iterable[str]) -> None:
        """Add attributes of an object that the function stores as they are."""
        scope = "scope", Itself(owner)
        for name in attributes:
            self.reads.append(Read((scope, ("attr", name)), "CONSTANT_MATCH", None))

    def write(self, error: Exception) -> bool:
        """Do the writes, if they are the reason why a function was refused, and the only one."""
        if not self.constants or not self.is_all or SIDE_EFFECTS not in str(error):
            return False
        for owner, name, value in self.constants.values():
            self.before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        return True

    def undo(self) -> None:
        """Take the writes back."""
        for owner, name, value in self.before:
            setattr(owner, name, value)


def is_changed(memo: Memo, asked: Callable[..., Any], effects: Any, variable: Any) -> bool:
    """Dynamo's check whether a variable has changed, without what was restored."""
    if not asked(effects, variable) or _is_restored(variable):
        return False
    if _is_deleted(effects, variable):
        return False
    own, attributes = _constants(effects, variable)
    if attributes and all(_is_same(own.get(k), x) for k, x in attributes.items()):
        memo.note_read(variable.value, attributes)
        return False
    if attributes:
        memo.note(variable.value, attributes)
    elif _existed(variable):
        memo.is_all = False
    return True


def _existed(variable: Any) -> bool:
    """Whether a variable stands for an object that is not of the call itself."""
    return "New" not in type(variable.mutation_type).__name__


def _constants(effects: Any, variable: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of an object that existed before, and those that were stored in it, if
    all are constants.
    """
    from torch._dynamo.variables.base import AttributeMutationExisting
    from torch._dynamo.variables.constant import ConstantVariable

    if not isinstance(variable.mutation_type, AttributeMutationExisting):
        return {}, {}
    own = getattr(getattr(variable, "value", None), "__dict__", {})
    stored = effects.store_attr_mutations.get(variable, {})
    is_plain = all(isinstance(x, ConstantVariable) and name in own for name, x in stored.items())
    return own, {name: x.value for name, x in stored.items()} if is_plain else {}


def _is_deleted(effects: Any, variable: Any) -> bool:
    """Whether all that a function stored in an object that existed before is deleted again."""
    from torch._dynamo.variables.base import AttributeMutationExisting
    from torch._dynamo.variables.misc import DeletedVariable

    if not isinstance(variable.mutation_type, AttributeMutationExisting):
        return False
    own = getattr(getattr(variable, "value", None), "__dict__", {})
    stored = effects.store_attr_mutations.get(variable, {})
    is_new = own.keys().isdisjoint(stored)
    are_gone = (isinstance(x, DeletedVariable) for x in stored.values())
    return bool(stored) and is_new and all(are_gone)


def _is_same(before: Any, now: Any) -> bool:
    return type(before) is type(now) and before == now


def _is_restored(variable: Any) -> bool:
    """Whether a dict that existed before has its own items again, in their order."""
    from torch._dynamo.variables.base import ValueMutationExisting

    held = getattr(variable, "_base_vt", None) or variable
    before = getattr(held, "original_items", None)
    now = getattr(held, "items", None)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return False
    keys = [key.vt for key in now]
    return (
        isinstance(held.mutation_type, ValueMutationExisting)
        and len(keys) == len(before)
        and all(a is b for a, b in zip(before, keys, strict=True))
        and not any(held.is_new_item(before[k.vt], x) for k, x in now.items())
    )
