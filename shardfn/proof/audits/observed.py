"""What a training step does that can be seen from outside: the values of its parameters when it
begins, its losses, its gradients, and its parameters and buffers after each optimizer step.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..._tree import named_leaves
from ...progress import show_nothing
from .forwards import Call, call_of
from .shards_of_ranks import LocalValue, local_value

# What wrappers of modules put into the names of parameters.
WRAPPERS = re.compile(
    r"(?<![^.])(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)
# The values that a node of a loss keeps, from which follows how many elements its mean has.
ELEMENTS = ("_saved_self_sym_numel", "_saved_self_numel")
FLATTENING = "FullyShardedDataParallel"
MEAN = 1  # of `_saved_reduction`
PASSED = ("Neg", "Mul", "ToCopy", "View", "Squeeze", "Alias")  # nodes that take no mean


class EnoughSteps(BaseException):
    """Ends a program after the optimizer steps that are compared."""


@attrs.frozen(eq=False)
class Loss:
    """The loss of one backward.

    Args:
        value: the loss.
        count: the elements that its mean is taken over; None where it is not known.
    """

    value: LocalValue
    count: float | None


@attrs.frozen(eq=False)
class OptimizerStep:
    """What one step of an optimizer reads and writes.

    Args:
        gradients: by parameter; None for those without.
        after: all parameters after it, when the next call or step begins.
        is_adaptive: whether it divides by the size of gradients, which makes noise large.
    """

    gradients: dict[nn.Parameter, LocalValue | None]
    after: dict[nn.Parameter, LocalValue]
    is_adaptive: bool


class Observed:
    """What is seen of one process.

    Args:
        most_steps: the optimizer steps after which the program is ended; None for no end.
        keeps_calls: whether to keep what modules read and return when they are first called.
    """

    def __init__(self, most_steps: int | None, *, keeps_calls: bool = False) -> None:
        self.most_steps, self.keeps_calls = most_steps, keeps_calls
        self.show = show_nothing  # takes what the process does now
        self.modules: list[nn.Module] = []  # those that no other module called
        self.depth = 0
        self.optimizer_depth = 0  # an optimizer may call another
        self.is_settled = True  # whether what the last step leads to is noted
        self.has_stepped = False  # whether an optimizer has
        self.is_enough = False  # whether the steps that are compared are done
        self.start: dict[nn.Parameter, LocalValue] = {}
        self.calls: dict[nn.Module, Call] = {}  # the first of each module
        self.losses: list[Loss] = []
        self.steps_of_losses: list[int] = []
        self.steps: list[OptimizerStep] = []
        self.rows: list[int] = []  # the batch sizes of calls
        self.axes: dict[str, tuple[int, ...]] = {}  # of meshes: this rank's group along each
        self.result: Any = None
        self.narrow: set[torch.dtype] = set()  # of 16 bits or less, in which losses are computed
        self.drawn: torch.Tensor | None = None  # the state of torch's generator at the first call
        self.is_flattened = False  # by FullyShardedDataParallel
        self.draws = False  # whether random numbers were drawn after it

    # What hooks report

    def enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the call of a module."""
        self.depth += 1
        if self.depth > 1:
            return
        self.settle()
        self.note(module)
        self.show(f"calls {type(module).__name__}")
        if self.drawn is None:
            self.drawn = torch.get_rng_state()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()]
        if tensors:
            self.rows.append(len(tensors[0]))

    def leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        """Note the end of a call."""
        self.depth = max(self.depth - 1, 0)
        if self.keeps_calls and not self.losses and module not in self.calls:
            self.calls[module] = call_of(module, args, result)

    def note(self, module: nn.Module) -> None:
        """Note a module, and the values of parameters that are new."""
        if not any(module is known for known in self.modules):
            self.modules.append(module)
        self.is_flattened |= any(type(m).__name__ == FLATTENING for m in module.modules())
        for parameter in module.parameters():
            self.note_parameter(parameter)

    def note_parameter(self, parameter: nn.Parameter) -> None:
        """Note the value of a parameter, and the axes of its mesh, if it is new."""
        if parameter in self.start:
            return
        self.start[parameter] = local_value(parameter)
        if isinstance(parameter, DTensor):
            self.axes |= groups_of(parameter.device_mesh)

    def goes_back(self, roots: Any) -> None:
        """Note the losses whose gradients are asked for."""
        self.settle()
        for root in [roots] if isinstance(roots, torch.Tensor) else roots:
            if root.numel() == 1 and root.requires_grad:
                if not self.losses:
                    self.narrow = narrow_dtypes(root.grad_fn)
                self.losses.append(Loss(local_value(root.reshape(())), count_of(root.grad_fn)))
                self.steps_of_losses.append(len(self.steps))

    def losses_of(self, step: int) -> list[Loss]:
        """Return the losses before an optimizer step."""
        numbers = zip(self.losses, self.steps_of_losses, strict=True)
        return [loss for loss, number in numbers if number == step]

    @contextlib.contextmanager
    def until_enough_steps(self) -> Iterator[None]:
        """End the program in a context after the steps that are compared."""
        try:
            yield
        except EnoughSteps:
            self.ends(None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients that an optimizer reads."""
        self.has_stepped = True
        self.optimizer_depth += 1
        if self.optimizer_depth > 1:
            return
        gradients: dict[nn.Parameter, LocalValue | None] = {}
        for parameter in parameters_of(optimizer):
            self.note_parameter(parameter)
            gradients[parameter] = gradient_of(parameter)
        is_adaptive = "betas" in optimizer.defaults or "eps" in optimizer.defaults
        if not self.is_settled and not gradients.keys() & self.steps[-1].gradients.keys():
            last = self.steps.pop()  # of another optimizer, with other parameters
            gradients = {**last.gradients, **gradients}
            is_adaptive = is_adaptive or last.is_adaptive
        else:
            self.settle()
            self.show(f"optimizer step {len(self.steps)}")
        self.steps.append(OptimizerStep(gradients, {}, is_adaptive))

    def after_step(self) -> None:
        """Note the end of an optimizer's step, whose parameters may still be sent to others."""
        self.optimizer_depth = max(self.optimizer_depth - 1, 0)
        self.is_settled = self.optimizer_depth > 0

    def settle(self) -> None:
        """Note the parameters that a step and what came after it have written.

        Raises:
            EnoughSteps: the steps that are compared are done.
        """
        if self.is_settled:
            return
        self.is_settled = True
        for parameter in self.start:
            self.steps[-1].after[parameter] = local_value(parameter)
        if self.most_steps is not None and len(self.steps) >= self.most_steps:
            self.is_enough = True
            raise EnoughSteps

    def ends(self, result: Any) -> None:
        """Note the results of the program, and the gradients that no optimizer has read."""
        self.result = result
        with contextlib.suppress(EnoughSteps):
            self.settle()
        for module in modules_in(result):
            self.note(module)
        if self.drawn is not None:
            self.draws = not torch.equal(self.drawn, torch.get_rng_state())
        if not self.steps:
            gradients = {parameter: gradient_of(parameter) for parameter in self.start}
            after = {parameter: local_value(parameter) for parameter in self.start}
            self.steps.append(OptimizerStep(gradients, after, False))

    def before(self, step: int) -> dict[nn.Parameter, LocalValue]:
        """Return the parameters before an optimizer step."""
        before = dict(self.start)
        for earlier in self.steps[:step]:
            before |= earlier.after
        return before

    # Names

    def names(self) -> dict[nn.Parameter, str]:
        """Return the name of each parameter, by the largest module that has it."""
        found: dict[nn.Parameter, str] = {}
        for where, name, parameter in self._named(lambda module: module.named_parameters()):
            if parameter not in found:
                found[parameter] = f"{where}.{name}" if name in found.values() else name
        for parameter in self.start:
            found.setdefault(parameter, f"parameter {len(found)}")
        return found

    def buffers(self) -> dict[str, LocalValue]:
        """Return the buffers of all modules, by name."""
        found: dict[str, LocalValue] = {}
        for _, name, buffer in self._named(lambda module: module.named_buffers()):
            if name not in found:
                found[name] = local_value(buffer)
        return found

    def calls_by_path(self) -> dict[str, Call]:
        """Return the first call of each module by its path, in the order in which they end."""
        paths: dict[nn.Module, str] = {}
        for _, name, module in self._named(lambda module: module.named_modules()):
            paths.setdefault(module, name)
        found: dict[str, Call] = {}
        for module, call in self.calls.items():
            if module in paths:
                found.setdefault(WRAPPERS.sub("", paths[module] + ".").rstrip("."), call)
        return found

    def tensors(self) -> dict[str, LocalValue]:
        """Return the tensors of the result, by path."""
        return {
            path: local_value(x)
            for path, x in leaves_of(self.result)
            if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter)
        }

    def _named(self, each: Any) -> Iterator[tuple[str, str, Any]]:
        """Yield where a module is, and what it has, by name: of the one with most parameters first,
        and of those that are called before those that are returned.
        """
        called = [(type(m).__name__, m) for m in self.modules]
        modules: dict[int, tuple[str, nn.Module]] = {}
        for where, m in [*called, *leaves_of(self.result)]:
            if isinstance(m, nn.Module):
                modules.setdefault(id(m), (where, m))
        for where, module in sorted(modules.values(), key=lambda x: -len([*x[1].parameters()])):
            for name, x in each(module):
                yield where, WRAPPERS.sub("", name), x


def groups_of(mesh: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the calling rank's group along each axis of a mesh."""
    names = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
    place = mesh.get_coordinate()
    if place is None:
        return {}
    found = {}
    for i, name in enumerate(names):
        row = mesh.mesh[(*place[:i], slice(None), *place[i + 1 :])]
        found[name] = tuple(row.tolist())
    return found


def modules_in(result: Any) -> list[nn.Module]:
    """Return the modules in a tree."""
    return [x for _, x in leaves_of(result) if isinstance(x, nn.Module)]


def leaves_of(result: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a result, by path. Modules and optimizers are leaves."""
    return named_leaves(result, lambda x: isinstance(x, (nn.Module, torch.optim.Optimizer)))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradient_of(parameter: nn.Parameter) -> LocalValue | None:
    """Copy the gradient of a parameter."""
    return None if parameter.grad is None else local_value(parameter.grad)


def count_of(node: Any) -> float | None:
    """Return how many elements the mean is taken over that a loss is, from its graph.

    Args:
        node: that made the loss.

    Returns:
        The number, or the product of several divisors; None where the loss is no mean.
    """
    count, is_mean = 1.0, False
    while node is not None and (divisor := _divisor(node)) is not None:
        is_mean = is_mean or not type(node).__name__.startswith(PASSED)
        count *= divisor
        inputs = [x for x, _ in node.next_functions if x is not None]
        if len(inputs) != 1 or (divisor != 1 and not type(node).__name__.startswith("Div")):
            break
        (node,) = inputs
    return count if is_mean and math.isfinite(count) and count > 0 else None


def narrow_dtypes(node: Any) -> set[torch.dtype]:
    """Return the floating dtypes of 16 bits or less of the values in a graph of autograd."""
    found: set[torch.dtype] = set()
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        for x in getattr(node, "_input_metadata", None) or ():
            if x.dtype.is_floating_point and x.dtype.itemsize <= 2:
                found.add(x.dtype)
        more = [x for x, _ in getattr(node, "next_functions", ()) if x is not None]
        waiting += [x for x in more if x not in seen]
        seen.update(more)
    return found


def _divisor(node: Any) -> float | None:
    """Return by what a node of a scalar divides; None where the search ends."""
    name = type(node).__name__
    if name.startswith("NllLoss") and node._saved_reduction == MEAN:
        return float(node._saved_total_weight)
    if getattr(node, "_saved_reduction", None) == MEAN:
        return float(node._saved_self.numel())
    if name.startswith("MeanBackward0"):
        return float(next(getattr(node, x) for x in ELEMENTS if hasattr(node, x)))
    if name.startswith("Div"):
        other = node._saved_other
        other = other if other is not None else 1
        return float(other) if not isinstance(other, torch.Tensor) or other.numel() == 1 else None
    return 1.0 if name.startswith(PASSED) else None
