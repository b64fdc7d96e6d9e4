"""functionalize: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import attrs
import torch

from .. import _compat, _tree
from ..capture import PureModule, module_copy
from ..errors import TreeError, problem
from ..runtime import Request
from ._transformed import Transformed


@attrs.define(eq=False, repr=False, slots=False)
class Functional(Transformed):
    """(params, buffers, *args, **kwargs) -> (what the module returns, its buffers afterwards)."""

    verb: ClassVar[str] = "functionalize"
    held: tuple[torch.nn.Module]
    pure: PureModule
    names: tuple[tuple[str, ...], tuple[str, ...]]  # of the parameters, of the buffers

    def inline(self, params: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
        check_names(self.pure.name, "params", tuple(params), self.names[0])
        check_names(self.pure.name, "buffers", tuple(buffers), self.names[1])
        if not _compat.is_tracing():
            return self.pure.run(params, buffers, args, kwargs)
        call = self.pure.number()
        tensors = self.pure.flat(call, params, buffers, args, kwargs)
        return _filled(self.pure.tree(call), tensors)

    def asked(self) -> Request:
        return Request(self.__name__, self.inline, self.inline)

    def options(self) -> Any:
        return ()


def _filled(shape: Any, tensors: Any) -> Any:
    """The tree that `PureModule` wrote down, with these tensors."""
    kind, what, children = shape
    if kind == "tensor":
        return tensors[what]
    if kind == "constant":
        return what
    filled = [_filled(child, tensors) for child in children]
    if kind == "list":
        return filled
    if kind == "dict":
        return dict(zip(what, filled, strict=True))
    if kind == "OrderedDict":
        return OrderedDict(zip(what, filled, strict=True))
    return what(*filled) if kind == "named" else tuple(filled)


@_compat.constant_in_graph
def check_names(name: str, what: str, got: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    """Check that there is a value for each parameter or buffer, and no other.

    Raises:
        TreeError: naming those that lack or are too many.
    """
    missing, extra = [k for k in wanted if k not in got], [k for k in got if k not in wanted]
    if missing or extra:
        lines = [f"{label} {', '.join(keys)}" for label, keys in (("it lacks", missing), ("it has also", extra)) if keys]
        fix = f"the {what} that functionalize returned, or others under the same names"
        raise TreeError(problem(f"{name}, argument {what}", *lines, needed=f"the {what} of the module", fix=fix), arg_path=what, fix=fix)


def functionalize(module: torch.nn.Module) -> tuple[Functional, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    stand = {id(x): torch.nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=x.requires_grad) for x in module.parameters()}
    stand |= {id(x): torch.empty_like(x, device="meta") for x in module.buffers()}
    shadow = module_copy.copied(module, stand)
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
    pure = PureModule(f"functionalize({type(module).__name__})", shadow)
    return Functional((shadow,), pure, (tuple(params), tuple(buffers))), params, buffers
