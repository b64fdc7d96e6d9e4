"""What a function asks of its argument tensors besides their values: their flags, attributes and
class.

A fake tensor knows the argument that it stands for. The answers are those of the arguments of the
call that is captured. A capture serves the calls whose arguments answer as these did.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from ..tracing import unwrapped
from .refused import refuse

READS_ARGUMENT = "the function asks an argument tensor for"
NAME = "_argument"  # of the attribute of a fake tensor
# questions that are no name of an attribute
IDENTITY = "which argument it is"
PARAMETER = "whether it is an nn.Parameter"
ENABLED = "whether gradients are enabled"
CONSTANT = (bool, int, float, str, bytes, type(None))
Facts = tuple[tuple[str, tuple[Any, ...]], ...]  # what was asked, and the answer of each leaf


def _has_gradient(x: torch.Tensor) -> bool:
    return x.is_leaf and x.grad is not None


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad": _has_gradient,
    PARAMETER: lambda x: isinstance(x, torch.nn.Parameter),
    ENABLED: lambda x: torch.is_grad_enabled(),
    IDENTITY: id,  # compared by the first leaf of each
}


def _attribute(x: torch.Tensor, name: str) -> tuple[Any, ...]:
    """Return the class and the value of an attribute that the user gave to a tensor."""
    if isinstance(x, DTensor) or name not in x.__dict__:
        return ()
    value = x.__dict__[name]
    return (type(value), value if isinstance(value, CONSTANT) else None)


@attrs.define(eq=False)
class Asked:
    """What one reading of a function has asked of its arguments.

    Args:
        leaves: the arguments.
        questions: those of `QUESTIONS`, and the names of attributes.
        is_grad_enabled: whether gradients are enabled where the function is called.
        replayed: the part of Dynamo's graph that was run to answer for computed tensors.
    """

    leaves: Sequence[Any]
    questions: set[str] = attrs.field(factory=set)
    is_grad_enabled: bool = attrs.field(factory=torch.is_grad_enabled)
    replayed: Any = None

    def facts(self) -> Facts:
        """Return the answers to all that was asked."""
        return tuple((name, _answers(name, self.leaves)) for name in sorted(self.questions))


def _answers(question: str, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the answer of each leaf. A question that has no row is the name of an attribute."""
    ask = QUESTIONS.get(question) or (lambda x: _attribute(x, question))
    answers = [ask(x) if isinstance(x, torch.Tensor) else None for x in leaves]
    return tuple(map(answers.index, answers) if question == IDENTITY else answers)


def have_facts(leaves: Sequence[Any], facts: Facts) -> bool:
    """Return whether arguments answer as those of a capture did."""
    return all(_answers(name, leaves) == answers for name, answers in facts)


@attrs.frozen(eq=False)
class Argument:
    """The argument that a fake tensor stands for."""

    asked: Asked
    number: int

    def ask(self, question: str) -> torch.Tensor | None:
        """Note a question, and return the tensor; None for a shape."""
        self.asked.questions.add(question)
        x = self.asked.leaves[self.number]
        return x if isinstance(x, torch.Tensor) else None


def stand_in(fake: torch.Tensor, asked: Asked, number: int) -> None:
    """Let a fake tensor know the argument that it stands for."""
    setattr(fake, NAME, Argument(asked, number))


def pass_on(x: Any, fake: Any) -> None:
    """Let a fake tensor that Dynamo makes of another know its argument, too."""
    argument = argument_of(x)
    if argument is not None and isinstance(fake, torch.Tensor):
        setattr(fake, NAME, argument)


def argument_of(fake: Any) -> Argument | None:
    """Return the argument that a fake tensor stands for, also under a transform."""
    return getattr(unwrapped(fake), NAME, None) if isinstance(fake, torch.Tensor) else None


def answer(fake: Any, name: Any) -> Any:
    """Return the value of an attribute of an argument; NotImplemented where the fake tensor knows.

    Stops Dynamo at an attribute that is no value of the argument.
    """
    argument = argument_of(fake)
    if argument is None:
        return NotImplemented
    if name in ("requires_grad", "is_leaf"):
        x = argument.ask(name)
        return NotImplemented if x is None else getattr(x, name)
    if name == "grad":
        x = argument.ask("grad")
        is_there = x is not None and _has_gradient(x)
        refuse(f"{READS_ARGUMENT} its .grad;" if is_there else None)
    elif not hasattr(torch.Tensor, name):
        x = argument.ask(name)
        if x is None or not (found := _attribute(x, name)):
            return NotImplemented
        kind, value = found
        refuse(None if issubclass(kind, CONSTANT) else f"{READS_ARGUMENT} its .{name};")
        return value
    return NotImplemented


def identified(call: Callable[..., Any], builtin: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Patch Dynamo's call of a builtin, which may be id()."""
    if builtin.fn is id and len(args) == 1:
        _refuse_twice([args[0].realize()])
    return call(builtin, tx, args, kwargs)


def compared(call: Callable[..., Any], builtin: Any, tx: Any, left: Any, right: Any) -> Any:
    """Patch Dynamo's comparison of a tensor, which may be `x is y`."""
    if builtin.fn in (operator.is_, operator.is_not) and left.is_tensor() and right.is_tensor():
        _refuse_twice([left, right])
    return call(builtin, tx, left, right)


def hashed(call: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    """Patch Dynamo's hash of a tensor, by which sets and dicts tell tensors apart."""
    _refuse_twice([tensor])
    return call(tensor, *args)


def _refuse_twice(asked: Sequence[Any]) -> None:
    """Stop Dynamo where a function asks which object an argument is, and it is given twice: a
    program has an input for each.
    """
    held = [x.as_proxy().node.meta.get("example_value") for x in asked if x.is_tensor()]
    for argument in filter(None, map(argument_of, held)):
        x, leaves = argument.ask(IDENTITY), argument.asked.leaves
        is_twice = x is not None and sum(other is x for other in leaves) > 1
        refuse(f"{READS_ARGUMENT} its identity;" if is_twice else None)


def is_parameter(fake: Any) -> bool:
    """Return whether the argument that a fake tensor stands for is an nn.Parameter."""
    argument = argument_of(fake)
    return argument is not None and isinstance(argument.ask(PARAMETER), torch.nn.Parameter)
