"""A pure call of a module. Dynamo keeps it as one call, and the Python code runs when the graph
is replayed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ... import _compat, _tree
from ...errors import CaptureError, ShardError, is_ours
from .. import annotations as sources
from ..aten_trace import hooked_values
from ..refusals import data_dependent, leaked_values, torch_errors
from ..rewrites import python_substitutes, sparse_borders, sparse_matrices
from ..rewrites.custom_op_gradients import refuse_dropped_call
from ..rewrites.einsum_batches import EINSUMS, einsum
from . import module_copies
from .attribute_stores import stored_at
from .backward_hooks import HookedCall
from .module_results import ModuleResults
from .parameter_hooks import Hook, hooked_parameter
from .submodule_paths import Paths
from .train_modes import Modes

DATA: Any = torch.Tensor.data.__get__
# torch.func's error text for an in-place write to an unbatched buffer.
UNBATCHED = (
    "inplace arithmetic",
    "updated in place, were not batched",
    "doesn't match the broadcast shape",
    "being vmapped over but `self` not being vmapped over",
)


class PureModule:
    """A module without values, which is called with the values of its parameters and buffers.

    Args:
        name: its name in errors.
        shadow: a private copy of the module whose parameters and buffers are stand-ins.
        hooks: the hooks of parameters, by name.
        modes: which of its submodules train.
    """

    def __init__(
        self, name: str, shadow: torch.nn.Module, hooks: dict[str, tuple[Hook, ...]], modes: Modes
    ) -> None:
        self.name, self.shadow, self.hooks = name, shadow, hooks
        self.modes = modes
        self.returned = ModuleResults(name)
        self.known: list[
            dict[str, Any]
        ] = []  # for each call in a traced function: the result of Dynamo's run of it
        self.number, self.flat, self.tree = self._steps()

    def _steps(self) -> tuple[Any, Any, Any]:
        """The functions that Dynamo calls: one numbers the call, one is the call as an op on
        tensors, one returns the tree of its result.
        """

        def number() -> int:
            self.known.append({})
            return len(self.known) - 1

        def flat(
            call: int, params: Any, buffers: Any, args: Any, kwargs: Any
        ) -> tuple[torch.Tensor, ...]:
            call_record = self.known[call]
            given = sparse_borders.rejoined((params, buffers, args, kwargs))
            with running(self.name):
                out = self.batched_if_needed(call_record, *given)
            tensors: list[torch.Tensor] = []
            call_record["tree"] = self.returned.pair(out, tensors)
            return tuple(tensors)

        def tree(call: int) -> Any:
            return self.known[call]["tree"]

        return (
            _compat.constant_in_graph(number),
            sparse_borders.takes_parts(_compat.keep_in_graph(flat)),
            _compat.constant_in_graph(tree),
        )

    def __getstate__(self) -> dict[str, Any]:
        names = "name", "shadow", "hooks", "modes"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def batched_if_needed(
        self, call_record: dict[str, Any], params: Any, buffers: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run the module; under vmap, with a shared buffer batched if the module writes to it."""
        if "batched" not in call_record:
            try:
                out = self.run(params, buffers, args, kwargs)
                call_record["batched"] = False
                return out
            except RuntimeError as error:
                if not is_unbatched(error):
                    raise
                call_record["batched"] = True
        if call_record["batched"]:
            frozen = frozen_names(self.shadow)
            buffers = spread(buffers, frozen, (params, buffers, args, kwargs))
        return self.run(params, buffers, args, kwargs)

    def run(
        self, params: dict[str, Any], buffers: dict[str, Any], args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run a copy of the module with these values. Returns its result, and its buffers and
        frozen parameters afterwards.
        """
        module = self.module_with(params, buffers)
        leaked_values.note_modes(self.modes)
        before = module_copies.snapshot(module)
        hooks = [hook for hooks in self.hooks.values() for hook in hooks]
        # keeps the module alive, for torch's old backward hooks
        for fn in (module, *module_copies.user_functions(module), *hooks):
            leaked_values.watch(self.name, fn)
        with _compat.patched("backward hooks", hook=HookedCall):
            out = module(*args, **kwargs)
        self.refuse_changes(
            module_copies.changed_attributes(before, module_copies.snapshot(module), module), module
        )
        return out, {name: _value_at(module, name) for name in buffers}

    def module_with(self, params: dict[str, Any], buffers: dict[str, Any]) -> torch.nn.Module:
        """A copy of the module with these values."""
        known = hooked_values()
        seen_by_hooks = {
            name: hooked_parameter(params[name], hooks, known) for name, hooks in self.hooks.items()
        }
        own_buffers = {name: x.clone() for name, x in buffers.items()}
        values = {**params, **seen_by_hooks, **own_buffers}
        stand_ins = (*self.shadow.named_parameters(), *self.shadow.named_buffers())
        memo: dict[int, Any] = {id(x): values[name] for name, x in stand_ins}
        module = module_copies.copied_module(self.shadow, memo)
        self.modes.set_on(memo)
        return module

    def refuse_changes(self, changes: list[str], module: torch.nn.Module) -> None:
        """Refuse a module that changes anything besides its buffers.

        Raises:
            CaptureError: lists the changes.
        """
        if changes:
            raise CaptureError.of(
                self.name,
                f"the function changes an object outside of itself: {', '.join(changes)}",
                fix="use self.register_buffer(...) for state that changes, or return the new value",
                source=stored_at(module, changes[0]),
            )


def _value_at(module: torch.nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    return (
        _compat.buffers_of(part)[name]
        if name in _compat.buffers_of(part)
        else _compat.parameters_of(part)[name]
    )


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """The parameters that do not require grad. They are passed with the buffers."""
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad)


def is_unbatched(error: RuntimeError) -> bool:
    """Whether torch.func refuses an in-place write to a tensor without the batch dim."""
    return any(sign in str(error) for sign in UNBATCHED)


def spread(
    buffers: dict[str, torch.Tensor], frozen: frozenset[str], values: Any
) -> dict[str, torch.Tensor]:
    """The buffers, expanded to every batch dim of any of the values; frozen parameters stay as they
    are.
    """
    zero = sum(
        x.new_zeros((), dtype=torch.int8)
        for x in _tree.quick_leaves(values)
        if isinstance(x, torch.Tensor)
    )

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return x | (zero != 0) if x.dtype == torch.bool else x + zero.to(x.dtype)

    return {name: x if name in frozen else expanded(x) for name, x in buffers.items()}


def _refuse_rank(file: str) -> None:
    """Refuse a question for the rank from code in this file. torch's own code may ask, since it
    does so for logging.
    """
    if "/torch/distributed/tensor/" in file:
        _refuse_dtensor()
    if not is_ours(file):
        raise RuntimeError(_compat.ASKS_RANK)


@contextlib.contextmanager
def _checkpointed() -> Iterator[None]:
    """The context of a call of torch.utils.checkpoint in a module."""
    with sources.annotate_checkpointed(sources.fresh_region(), "nothing_saveable"):
        yield


def _refuse_dtensor() -> None:
    """Refuse a DTensor that a module makes."""
    raise RuntimeError(_compat.MAKES_DTENSOR)


def _plain_modules() -> contextlib.AbstractContextManager[None]:
    """The context of patches in which the Python of a module runs."""
    return _compat.patched(
        "module", asked=_refuse_rank, checkpointed=_checkpointed, making=_refuse_dtensor
    )


@contextlib.contextmanager
def running(name: str) -> Iterator[bool]:
    """The context of Python code that is run while it is captured, not read. Yields whether Dynamo
    runs it, for the shapes of its results, and not the replay, for its ops.

    Raises:
        CaptureError: the code is not one pure graph. It has this name.
        Exception: an error of the user's, as it is.
    """
    with _compat.reading() as mode, _plain_modules(), ModuleTracing(mode, name) as traced:
        try:
            yield mode is not None
        except ShardError:
            raise
        except Exception as error:
            if refusal := torch_errors.module_error_of(error, name):
                raise refusal from error
            raise
    traced.refuse_written()


class ModuleTracing(TorchFunctionMode):
    """The torch function mode under which a module runs in a capture. It gives each op its source
    line, and applies Dynamo's substitutes.

    Args:
        mode: makes fake tensors of other tensors than parameters and buffers that the module
            holds or closes over. None leaves them.
        name: the name of the module in errors.
    """

    def __init__(self, mode: _compat.FakeTensorMode | None, name: str) -> None:
        super().__init__()
        self.mode, self.name = mode, name
        self.paths = Paths()
        self.fakes: dict[
            int, tuple[Any, Any, int]
        ] = {}  # held tensors by id, with their counts of in-place writes
        self.split: dict[int, tuple[Any, Any]] = {}  # held sparse tensors by id, with their parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {}), **python_substitutes.dropped_by_torch(func, sys._getframe(1))}
        line = self.paths.running_line(sys._getframe(1), PureModule.run.__code__)
        if line:
            torch.fx.traceback.set_stack_trace([line])
        refuse_dropped_call(func, (*args, *kwargs.values()), line)
        name = getattr(func, "__name__", "")
        if any(issubclass(t, DTensor) for t in types):
            raise RuntimeError(_compat.MAKES_DTENSOR)
        if func is torch.Tensor.__bool__:
            passed = _compat.check_passed(sys._getframe(1))
            if passed is not None:
                return passed
            if args[0].numel() != 1:
                return func(*args)  # torch's error
        if (reads := data_dependent.cause_in_method(name)) and isinstance(args[0], torch.Tensor):
            file = sys._getframe(1).f_code.co_filename
            return self.read(func, args, data_dependent.cause_in_file(file) or reads, line)
        if self.mode is not None:
            args, kwargs = _tree.map_held(self.fake, (args, kwargs))
        if any(map(sparse_borders.is_supported, args)):
            args = tuple(map(self.dense_parts, args))
            return sparse_matrices.called(name, args, kwargs)
        try:
            return _substitute_of(func)(*args, **kwargs)
        except (_compat.DATA_DEPENDENT, _compat.DYNAMIC_SHAPE) as error:
            raise self.refused(
                data_dependent.cause_in_file(sys._getframe(1).f_code.co_filename)
                or data_dependent.cause_in_function(name)
                or data_dependent.cause_of_error(error, str(error)),
                line,
            ) from error

    def read(self, method: Any, args: Any, reads: Any, line: str | None) -> Any:
        """The value of a tensor that the module reads, if it is known: it was made from numbers."""
        try:
            with contextlib.nullcontext() if _compat.is_fake(args[0]) else _compat.values():
                return method(*args)
        except (RuntimeError, _compat.DATA_DEPENDENT) as error:
            raise self.refused(reads, line) from error

    def refused(self, cause: Any, line: str | None) -> CaptureError:
        """The error for a call that needs the value of a tensor."""
        (got, fix), source = cause, sources.line_of(line)
        return CaptureError.of(
            self.name, got, needed="one pure graph of tensor ops", fix=fix, source=source
        )

    def fake(self, x: Any) -> Any:
        """A fake tensor in place of a tensor with values."""
        if not isinstance(x, torch.Tensor) or _compat.is_fake(x):
            return x
        if sparse_borders.is_supported(x) or not _compat.is_faking():  # inside of an op
            return x
        if id(x) not in self.fakes:
            assert self.mode is not None
            made = self.mode.from_tensor(x)
            self.fakes[id(x)] = (x, made, _compat.version_of(made))
        return self.fakes[id(x)][1]

    def dense_parts(self, x: Any) -> Any:
        """The parts of a sparse tensor that the module holds."""
        if not sparse_borders.is_supported(x):
            return x
        if id(x) not in self.split:
            self.split[id(x)] = x, sparse_borders.split(x)
        made = self.split[id(x)][1]
        if self.mode is None:
            return made
        positions, elements = _tree.map_held(self.fake, (made.positions, made.elements))
        return sparse_matrices.SparseMatrix(made.kind, made.shape, made.state, positions, elements)

    def refuse_written(self) -> None:
        """Refuse in-place writes to a tensor with values: they would change it during the
        capture.

        Raises:
            CaptureError: there was one.
        """
        if any(_compat.version_of(fake) > version for _, fake, version in self.fakes.values()):
            got, fix = torch_errors.HELD
            raise CaptureError.of(self.name, got, needed="one pure graph of tensor ops", fix=fix)


def _substitute_of(func: Any) -> Any:
    """The function that is called in place of a function of torch."""
    if func in EINSUMS:
        return einsum
    if func == DATA:
        return torch.Tensor.detach  # torch.func has no .data
    substitute = python_substitutes.TABLE.get(func) or _compat.MODULE_OPS.get(func)
    return substitute or _compat.recurrent(func) or _compat.on_fakes(func)
