"""rule: users' sharding rules, for their own ops or in place of shardfn's rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...capture.rewrites import decompositions
from ...capture.rewrites.custom_op_gradients import has_derivative, is_composite
from ...errors import RuleError, problem
from ...partition.propagation import refusals
from ...partition.rule_api import registry
from ...partition.rule_api.einsum import parsed, tensor_arguments
from ...partition.rule_api.strategy import Choice, OpCall
from ...partition.rule_api.strategy import Rule as Choices
from ...partition.rule_api.user_rules import from_function
from .._transformed import name_of
from ._proof import prove_gradient, prove_values


@attrs.frozen(eq=False, repr=False)
class Rule:
    """A registered sharding rule. The method `remove()`, or the end of a `with` block, unregisters
    the rule.
    """

    entry: registry.Registered
    said: str

    @property
    def op(self) -> Any:
        """The OpOverload that the rule is for."""
        return self.entry.op

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Check the sharding rule for the given arguments of the op.

        Raises:
            RuleError: a strategy is wrong. The message contains a counterexample.
        """
        prove_values(self.entry.rule, self.op, args, kwargs)
        if has_derivative(self.op):
            prove_gradient(self.entry.rule, self.op, args, kwargs)

    def remove(self) -> None:
        """Unregister the sharding rule, so that the previous rule of the op applies again."""
        registry.remove(self.entry)

    def __call__(self, call: OpCall) -> list[Choice]:
        return self.entry.rule(call)

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"rule({self.op}): {self.said}"


def rule(
    op: Any,
    mapping: str | Callable[[OpCall], Any] | None = None,
    *,
    need_whole: str | Sequence[str] = (),
    example: Sequence[Any] | None = None,
) -> Any:
    """Register a sharding rule for an operator. The new rule replaces an existing rule of the
    operator.

    A sharding rule is a string of dim names, as in einsum, or a function. A string of dim names
    such as "b i k, k j -> b i j" names every dim of every tensor argument and result in the op's
    schema. The dim names in the string, such as b and k, are called factors. If a factor is
    sharded, every tensor with a dim of the same name is sharded, and results without the factor
    become Partial sums. In the string of dim names, `...` stands for any leading dims, and 1 stands
    for a dim of size 1.

    If the sharding rule is a function, shardfn calls the function with an object `call`, which
    describes one call of the op. The object `call` has the attributes `shapes`, `out_shapes`, `ins`
    and `outs`, and `call["name"]` is the value of the op's argument `name`. The function of a
    sharding rule returns a string of dim names, or a list of strategies for one mesh axis. In a
    sharding rule, a strategy is a pair (placements of the inputs, placements of the results). In a
    strategy, each placement is "R" (replicated), a dim, a pair (dim, block size), "sum", "max",
    "min" or a DTensor placement. A pair (dim, block size) shards the dim without splitting any
    block of that many consecutive elements.

    Args:
        op: the operator: torch.ops.lib.name.overload, the result of `torch.library.custom_op`, or
            "lib::name".
        mapping: the sharding rule: a string of dim names such as "b i k, k j -> b i j", as in
            einsum, or a function that returns such a string or a list of strategies. Without
            `mapping`, `rule` returns a decorator for the function of the sharding rule.
        need_whole: the dim names in the string `mapping` whose dims are never sharded, because the
            op needs all elements along these dims. In `need_whole`, "..." stands for all leading
            dims.
        example: positional arguments of the op, on the CPU, of uneven sizes and distinct values.
            With `example`, `rule` checks every strategy, and the gradient of `register_autograd`,
            on 2, 3 and 5 simulated ranks. For a string of dim names, `example` is required if a
            result lacks a dim name of an input, and the dim name is not in `need_whole`. Sharding
            such a dim makes the result a Partial sum.

    Returns:
        The registered rule. The method `remove()` of the rule, or the end of its `with` block,
        unregisters the rule. The method `check(*args)` checks the rule for the given arguments of
        the op.

    Raises:
        RuleError: the op cannot have a sharding rule, the sharding rule does not fit the op, or a
            strategy gives a wrong result. The RuleError shows arguments for which the rule is
            wrong.

    Source: sharding_rule of jax.experimental.custom_partitioning (Shardy); register_sharding of
    torch.distributed.tensor.

    Example:
        >>> import torch, shardfn as sf
        >>> x = torch.rand(5, 3, 3)
        >>> with sf.rule(
        ...     torch.ops.aten.tril.default, "b i j -> b i j", need_whole=("i", "j"), example=(x,)
        ... ) as tril:
        ...     print(tril, sf.check(torch.tril, x, worlds=[2]))
        rule(aten.tril.default): b i j -> b i j {2: 0.0}
    """
    target, whole = (
        _overload(op),
        (need_whole,) if isinstance(need_whole, str) else tuple(need_whole),
    )
    _refuse(target, example)
    if mapping is None:
        return functools.partial(_registered, target, whole=whole, example=example)
    return _registered(target, mapping, whole, example)


def _registered(
    target: Any, mapping: Any, whole: tuple[str, ...], example: Sequence[Any] | None
) -> Rule:
    """Build a rule from the user's mapping, prove it on the example, and register it."""
    _refuse_arguments(target, mapping, whole, example)
    choices = (
        _from_text(target, mapping, whole, example)
        if isinstance(mapping, str)
        else from_function(mapping)
    )
    entry = registry.Registered(target, choices)
    made = Rule(entry, mapping if isinstance(mapping, str) else name_of(mapping))
    if example is None:
        registry.add(entry)
        return made
    prove_values(choices, target, tuple(example), {})
    registry.add(entry)  # before the gradient, whose program has the op in it
    try:
        if has_derivative(target):
            prove_gradient(choices, target, tuple(example), {})
    except BaseException:
        registry.remove(entry)
        raise
    return made


def _refuse_arguments(target: Any, mapping: Any, whole: tuple[str, ...], example: Any) -> None:
    causes = (
        (
            not isinstance(mapping, str) and not callable(mapping),
            f"the rule is a {type(mapping).__name__}",
            "a text, or a function",
        ),
        (
            bool(whole) and not isinstance(mapping, str),
            "need_whole goes with a text",
            "'R' in the function's strategies",
        ),
        (
            isinstance(example, torch.Tensor),
            "example is a tensor",
            "example=(x,), with all positional arguments of the op",
        ),
    )
    for wrong, got, fix in causes:
        if wrong:
            raise RuleError.of(f"rule({target})", got, fix=fix)


def _from_text(target: Any, text: str, whole: tuple[str, ...], example: Any) -> Choices:
    where = f"rule({target}), {text!r}"
    factors, wrong = None, []
    try:
        factors = parsed(text, whole)
        wrong = factors.strangers(target)
    except ValueError as error:
        wrong = list(error.args)
    if wrong or factors is None:
        needed = f"a name for each dim, as in 'b i k, k j -> b i j', for {_compat.schema(target)}"
        raise RuleError(problem(where, *wrong, needed=needed), fix=needed)
    if factors.contracted and example is None:
        fix = f"example=(arguments of the op), or need_whole={tuple(factors.contracted)}"
        lines = [
            f"sharding {f} leaves a Partial sum, which is right only if the op sums over {f}"
            for f in factors.contracted
        ]
        raise RuleError.of(
            where, *lines, needed="an example, with which shardfn checks the rule", fix=fix
        )
    return factors.choices


def _overload(op: Any) -> Any:
    """Resolve an op, or the name of one, to its OpOverload."""
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if isinstance(op, str) and op.count("::") == 1:
        library, op_name = op.split("::")
        op = getattr(getattr(torch.ops, library), op_name, None)
    op, found = getattr(op, "_opoverload", op), []
    if isinstance(op, type(torch.ops.aten.add)):
        known = [getattr(op, overload) for overload in op.overloads()]
        found = [
            o
            for o in known
            if tensor_arguments(o) and not any(a.is_out for a in _compat.schema(o).arguments)
        ]
    elif isinstance(op, _compat.OpOverload):
        found = [op]
    if len(found) == 1:
        return found[0]
    what = "" if op is None or isinstance(op, str) else f": it is a {type(op).__name__}"
    got = (
        f"the op has {len(found)} overloads: {', '.join(map(str, found))}"
        if found
        else f"the op does not exist{what}"
    )
    fix = (
        "one of these"
        if found
        else "pass torch.ops.lib.name.overload, or the result of torch.library.custom_op"
    )
    raise RuleError.of(f"rule({name})", got, needed="one op", fix=fix)


def _refuse(target: Any, example: Sequence[Any] | None) -> None:
    """Refuse an op that cannot have a sharding rule, such as one that capture decomposes."""
    schema = _compat.schema(target)
    causes = (
        (
            target.namespace == "shardfn",
            "the op is one of shardfn's own ops",
            "use sf.constrain to place a value",
        ),
        (
            schema.is_mutable,
            f"the op writes to its arguments: {schema}",
            "use an op that returns the new value, as aten.add in place of add_",
        ),
        (
            not tensor_arguments(target),
            "the op takes no tensor, so a rule has nothing to place",
            "leave out the rule, since every rank computes the same",
        ),
        (
            refusals.RANDOM(target),
            "the op draws random numbers, and each rank would draw different ones",
            "pass random tensors as arguments",
        ),
        (is_composite(target), _parts(target, example), "rules for those"),
    )
    for wrong, got, fix in causes:
        if wrong:
            raise RuleError.of(f"rule({target})", got, fix=fix)


def _parts(target: Any, example: Sequence[Any] | None) -> str:
    """List the ops into which capture decomposes a composite op, by capturing its example."""
    said = "the op is composite: shardfn decomposes it into other ops at capture"
    if example is None or not is_composite(target):
        return f"{said}, which `fn.trace(*args)` shows"
    graph = _compat.trace_aten(target, list(example), decompositions.table())
    names = dict.fromkeys(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
    return f"{said}: {', '.join(names)}"
