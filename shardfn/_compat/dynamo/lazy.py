"""Modules whose parameters get their shapes at the first call, such as nn.LazyLinear, while a
function that calls them is captured.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ..tracing import DATA_DEPENDENT, is_fake, neutral, unwrapped
from ..tracing import values as plain
from .refused import refuse

Made = list[tuple["State", "State"]]  # modules before and after their parameters were made
_MADE: contextvars.ContextVar[Made] = contextvars.ContextVar("made")
WITHOUT_SHAPE = "reads a parameter without a shape"
WITHOUT_VALUES = "a lazy module makes parameters from the values of arguments"
AGAIN = "_shardfn_made"  # of an error: makes again what was taken back because of it


class State:
    """A snapshot of a lazy module's class and attributes, and of torch's random state."""

    def __init__(self, module: Any, tensors: list[Any]) -> None:
        self.module, self.kind = module, type(module)
        self.tables = [(vars(module), dict(vars(module)))]
        self.tables += [(x, dict(x)) for x in vars(module).values() if isinstance(x, dict)]
        self.tensors = [(x, type(x), x.data) for x in tensors]
        devices = {x.device for x in tensors if x.is_cuda}
        self.on_devices = [(x, torch.cuda.get_rng_state(x)) for x in devices]
        self.on_cpu = torch.get_rng_state()

    def enter(self) -> None:
        """Restore the module to this snapshot."""
        self.module.__class__ = self.kind
        for table, content in self.tables:
            table.clear()
            table.update(content)
        for x, kind, data in self.tensors:
            x.data = data
            x.__class__ = kind
        self.draw_on()

    def draw_on(self) -> None:
        """Restore torch's random state to this snapshot."""
        torch.set_rng_state(self.on_cpu)
        for device, state in self.on_devices:
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def made_or_not(error: BaseException | None = None) -> Iterator[None]:
    """Restore lazy modules to their uninitialized state if the body raises.

    Args:
        error: of a context before. What that took back is made again.
    """
    made: Made = getattr(error, AGAIN, [])
    for _, after in made:
        after.enter()
    token = _MADE.set(made)
    try:
        yield
    except BaseException as failed:
        for before, _ in reversed(made):
            before.enter()
        if made:
            setattr(failed, AGAIN, made)
        raise
    finally:
        _MADE.reset(token)
    for _, after in made:  # Dynamo puts the state back to that before
        after.draw_on()


def parameters_made(
    infer: Callable[..., None], module: Any, _: Any, args: Any, kwargs: Any = None
) -> None:
    """Initialize a lazy module's parameters with values, for the shapes of its first arguments, as
    a plain call does.

    Args:
        infer: torch's function.
        module: the module.
        _: the module again.
        args: the arguments, fake tensors among them.
        kwargs: the keyword arguments.
    """
    with neutral(), plain():
        args, kwargs = pytree.tree_map(_of_numbers, (tuple(args), kwargs or {}))
        held = (*module._parameters.values(), *module._buffers.values())
        tensors = [x for x in held if is_lazy(x)]
        before = State(module, tensors)
        try:
            infer(module, module, args, kwargs)
        except BaseException as error:
            before.enter()
            refuse(WITHOUT_VALUES if _needs_values(error) else None)
            raise
        _MADE.get([]).append((before, State(module, tensors)))


def shape_read(wrap: Callable[..., Any], builder: Any, value: Any) -> Any:
    """Patch Dynamo's wrapping of a new object, which may be a parameter without a shape yet."""
    refuse(WITHOUT_SHAPE if is_lazy(value) else None)
    return wrap(builder, value)


@contextlib.contextmanager
def made_by_hooks(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have these modules make their parameters so where Python calls them, and not Dynamo."""
    rows = []
    for module in modules:
        hook = getattr(module, "_initialize_hook", None)
        if isinstance(module, LazyModuleMixin) and hook is not None:
            hooks = module._forward_pre_hooks
            rows.append((hooks, hook.id, hooks[hook.id]))
            hooks[hook.id] = module._infer_parameters  # ours, in a capture
    try:
        yield
    finally:
        for hooks, key, before in rows:
            if key in hooks:
                hooks[key] = before


def _needs_values(error: BaseException) -> bool:
    """Return whether an op failed because fake tensors have no values."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    is_read = isinstance(error, (DATA_DEPENDENT, GuardOnDataDependentSymNode))
    return is_read or "convert all Tensors to FakeTensors first" in str(error)


def _of_numbers(x: Any) -> Any:
    """Make a fake tensor with concrete sizes, outside of transforms, from a symbolic one."""
    inner = unwrapped(x) if isinstance(x, torch.Tensor) else x
    if not is_fake(inner):
        return x
    sizes = [n if isinstance(n, int) else n.node.hint for n in x.shape]
    with inner.fake_mode:
        return torch.empty(sizes, dtype=x.dtype, device=x.device)
