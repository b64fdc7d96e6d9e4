"""functionalize: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from typing import Any, ClassVar

import attrs
import torch
from torch.distributed.tensor import DTensor

from .. import _compat
from ..accepted import accept
from ..capture import PureModule
from ..capture.modules import module_copies
from ..capture.modules.module_call import frozen_names
from ..capture.modules.parameter_hooks import hooks_of
from ..capture.modules.train_modes import Modes
from ..capture.rewrites.as_strided import refuse_unshaped
from ..errors import TreeError
from ..runtime import Request
from ._transformed import Transformed


class Shown:
    """The signature of a module's pure function: two dicts, then the parameters of the module's
    forward.
    """

    def __get__(self, instance: Any, owner: Any = None) -> inspect.Signature:
        if instance is None:
            raise AttributeError("__signature__")  # of the class, it is that of its constructor
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        mine = [
            inspect.Parameter(name, positional, annotation="dict[str, Tensor]")
            for name in instance.leading
        ]
        try:
            forward = inspect.signature(instance.fn.forward)
            return forward.replace(
                parameters=[*mine, *forward.parameters.values()],
                return_annotation="tuple[Any, dict[str, Tensor]]",
            )
        except ValueError:  # a forward may have an argument of that name
            return inspect.signature(instance.inline)


@attrs.define(eq=False, repr=False, slots=False)
class Functional(Transformed):
    """A module as a pure function: (params, buffers, *args, **kwargs) -> (result, new buffers)."""

    verb: ClassVar[str] = "functionalize"
    leading: ClassVar[tuple[str, ...]] = ("params", "buffers")
    held: tuple[torch.nn.Module]
    pure: PureModule
    names: tuple[tuple[str, ...], tuple[str, ...]]  # names of the parameters, names of the buffers

    __signature__: ClassVar[Any] = Shown()

    @_compat.read_by_dynamo
    def inline(self, params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> Any:
        first, second = self.names
        given = _names(self.pure.name, "params", params)
        check_names(self.pure.name, "params", given, first, second)
        given = _names(self.pure.name, "buffers", buffers)
        check_names(self.pure.name, "buffers", given, second, first)
        if not _compat.is_tracing():
            return self.pure.run(params, buffers, args, kwargs)
        call = self.pure.number()
        tensors = self.pure.flat(call, params, buffers, args, kwargs)
        return _filled(self.pure.tree(call), tensors, self.pure.returned, [])

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, self)

    def options(self) -> Any:
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Functional:
        (shadow,) = copy.deepcopy(self.held, memo)
        modes = copy.deepcopy(self.pure.modes, memo)
        pure = PureModule(self.pure.name, shadow, self.pure.hooks, modes)
        return Functional((shadow,), pure, self.names)


@_compat.read_by_dynamo
def _filled(shape: Any, tensors: Any, returned: Any, made: list[Any]) -> Any:
    """The result of a module, from its tree of literals and its tensors. Adds its containers to
    a list.
    """
    kind, what, children = shape
    if kind == "tensor":
        return tensors[what]
    if kind == "constant":
        return what
    if kind == "class":
        return getattr(returned, what)
    if kind == "same":
        return made[what]
    filled = [_filled(child, tensors, returned, made) for child in children]
    made.append(_container(kind, what, filled, returned))
    return made[-1]


@_compat.read_by_dynamo
def _container(kind: str, what: Any, filled: list[Any], returned: Any) -> Any:
    """Build a list, tuple, dict or namedtuple of these values."""
    if kind == "list":
        return filled
    if kind == "tuple":
        return tuple(filled)
    if kind == "dict":
        return dict(zip(what, filled, strict=True))
    if kind == "OrderedDict":
        return OrderedDict(zip(what, filled, strict=True))
    name, names = what
    return _object(kind, getattr(returned, name), names, filled)


@_compat.read_by_dynamo
def _object(kind: str, cls: Any, names: Any, values: list[Any]) -> Any:
    """Build an instance of a user's class, such as a HF ModelOutput, with these attributes."""
    if kind == "named":
        return cls(*values)
    if kind == "keywords":
        return cls(**dict(zip(names, values, strict=True)))
    made = object.__new__(cls)
    for name, x in zip(names, values, strict=True):
        setattr(made, name, x)
    return made


@_compat.read_by_dynamo
def _names(name: str, what: str, values: Any) -> tuple[str, ...]:
    """List the parameter or buffer names in the dict that a call passes."""
    if not isinstance(values, dict):
        refuse_values(name, what, isinstance(values, torch.Tensor))
    return tuple(values)


@_compat.constant_in_graph
def refuse_values(name: str, what: str, is_tensor: bool) -> None:
    """Refuse something else in the place of the values of a module.

    Raises:
        TreeError: always.
    """
    raise TreeError.of(
        f"{name}, argument {what}",
        f"it is {'a tensor' if is_tensor else 'not a dict'}",
        needed=f"the {what} that functionalize returned",
        fix="fn(params, buffers, *args)",
        arg_path=what,
    )


@_compat.constant_in_graph
def check_names(
    name: str, what: str, got: tuple[str, ...], wanted: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Check that there is a value for each parameter or buffer, and no others.

    Raises:
        TreeError: names the missing and the unknown ones.
    """
    missing = [k for k in wanted if k not in got]
    extra = [k for k in got if k not in wanted]
    if missing or extra:
        lines = [
            f"{label} {', '.join(keys)}"
            for label, keys in (("it lacks", missing), ("it has also", extra))
            if keys
        ]
        fix = f"pass the {what} that functionalize returned, or a dict with the same names"
        if any(k in others for k in extra):
            fix += "; frozen parameters (requires_grad=False) are in buffers"
        raise TreeError.of(
            f"{name}, argument {what}",
            *lines,
            needed=f"the {what} of the module",
            fix=fix,
            arg_path=what,
        )


def functionalize(
    module: torch.nn.Module, *, share: bool = False
) -> tuple[Functional, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Turn a module into a pure function of its parameters and buffers: `fn, params, buffers =
    functionalize(module)`.

    The call `out, buffers = fn(params, buffers, *args)` changes neither the module nor its
    arguments. The call of `fn` returns the new values of the buffers that the module writes to or
    assigns, such as BatchNorm's statistics. The returned function follows later calls of `train()`
    and `eval()` on the module and on each submodule. The returned function is captured once for
    each mode (`train` or `eval`). Call `functionalize` again after you change an attribute, a hook,
    a parametrization, a submodule, or which parameters are frozen. The returned function and the
    module share objects that are not modules, such as `model.config`. Do not change attributes of
    shared objects after `functionalize`.

    The returned function holds no parameter values, and does not keep the module alive. After `del
    module`, the returned function keeps the last `train` or `eval` mode of the module. Copies and
    pickles of the returned function do not follow `train()` and `eval()` calls on the module.

    A frozen parameter (requires_grad=False) is treated as a buffer. No gradient of a frozen
    parameter is computed, sent or returned. A hook on a parameter (`p.register_hook`) gets the
    gradient, summed over all uses of the parameter, and may replace the gradient. Under
    `vmap(grad(f))`, a hook on a parameter gets the gradient of one sample.

    Args:
        module: any nn.Module whose forward is a function of trees of tensors and constants. A tied
            weight is one parameter, under its first name, and its gradient is the sum over all uses
            of the weight. All values of the module that are neither parameters nor buffers become
            constants of the program. For a module on the meta device, params and buffers are on the
            meta device, so that `trace` and `lower` need no memory for them.
        share: whether params and buffers share memory with the module. With `share`, writing to a
            parameter or buffer in place, or donating it, also changes the module. Without `share`,
            params and buffers are copies of those of the module.

    Returns:
        A tuple (fn, params, buffers). `fn(params, buffers, *args, **kwargs)` returns a tuple of the
        module's result and the new buffers. `fn` can be called alone or under any transform.
        `params` is a dict from names in `module.named_parameters()` to detached values of the
        parameters that require grad. `buffers` is a dict from names to the values of the buffers,
        including non-persistent ones, and of the frozen parameters. Under `vmap`, each sample gets
        its own copy of a buffer that the module writes to.

    Raises:
        TreeError: module is not an nn.Module, or its parameters have no shapes yet (lazy modules).
        CaptureError: a parameter has a post-accumulate-grad hook or a multi-grad hook. A call of
            the returned function raises a CaptureError if the module stores a value outside of its
            buffers, or cannot be captured as one pure graph.

    Source: torch.func.functional_call; flax.nnx.split; haiku.transform_with_state.

    Example:
        >>> import torch, shardfn as sf
        >>> fn, params, buffers = sf.functionalize(torch.nn.Linear(2, 1, bias=False))
        >>> grads = sf.grad(lambda p, x: fn(p, buffers, x)[0].sum())(
        ...     params, torch.tensor([[1.0, 2.0]])
        ... )
        >>> grads
        {'weight': tensor([[1., 2.]])}
    """
    _refuse(module)
    accept("functionalize", share=share)
    tensors = (*module.named_parameters(), *module.named_buffers())
    stand_ins = {id(x): _stand_in(x) for _, x in tensors}
    memo: dict[int, Any] = dict(stand_ins)
    shadow = module_copies.copied_module(module, memo)
    name = f"functionalize({type(shadow).__name__})"
    originals = {id(stand_ins[id(x)]): x for _, x in tensors}
    params, buffers = _values(shadow, originals, share)
    by_path = {p: originals[id(x)] for p, x in shadow.named_parameters()}
    every = {path: hooks_of(name, path, by_path[path]) for path in params}
    hooks = {path: of_path for path, of_path in every.items() if of_path}
    modes = Modes.following(name, module, memo)
    pure = PureModule(name, shadow, hooks, modes)
    names = (tuple(params), tuple(buffers))
    return Functional((shadow,), pure, names), params, buffers


def _values(
    shadow: torch.nn.Module, originals: dict[int, torch.Tensor], share: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The detached values of the parameters that require grad, and of all others with the
    buffers, by name; `originals` has the module's tensor for the id of each stand-in.
    """
    detached = {key: x.detach() for key, x in originals.items()}
    values = {key: x if share else x.clone() for key, x in detached.items()}
    frozen = frozen_names(shadow)
    params, frozen_params = {}, {}
    for path, x in shadow.named_parameters():
        (frozen_params if path in frozen else params)[path] = values[id(x)]
    buffers = {path: values[id(x)] for path, x in shadow.named_buffers()}
    return params, buffers | frozen_params


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the same shape and dtype on the meta device."""
    made = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return (
        torch.nn.Parameter(made, requires_grad=x.requires_grad)
        if isinstance(x, torch.nn.Parameter)
        else made
    )


def _refuse(module: Any) -> None:
    kind = type(module).__name__
    if not isinstance(module, torch.nn.Module):
        fix = "call functionalize(model) with the module; a function needs no functionalize"
        raise TreeError.of("functionalize", f"a {kind}", needed="an nn.Module", fix=fix)
    if isinstance(module, torch.jit.ScriptModule):
        fix = "pass the Python module from which the TorchScript module was compiled"
        raise TreeError.of(
            f"functionalize({kind})", "a TorchScript module", needed="a module in Python", fix=fix
        )
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    refuse_unshaped(f"functionalize({kind})", tensors)
    placed = [name for name, x in tensors if isinstance(x, DTensor)]
    if placed:
        fix = "call functionalize first, then sf.distribute(params, mesh, placements)"
        raise TreeError.of(
            f"functionalize({kind})",
            f"{', '.join(placed)} is a DTensor",
            needed="global tensors",
            fix=fix,
            arg_path=placed[0],
        )
