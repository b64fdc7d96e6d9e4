"""A module that is built inside a capture, so that its first values are part of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import _compat
from ...errors import ShardError, TreeError
from ...random import ambient
from ...random.torch_ops import patched_initialisation
from ..refusals import torch_errors
from .constructor_numbers import Numbers
from .module_call import ModuleTracing, frozen_names

Builder = Callable[[], torch.nn.Module]


class Building:
    """The constructor of a module, as a function from a random key to the values of its tensors.

    Args:
        name: of the constructor, for errors.
        module_fn: builds the module on torch's default device.
        device: where its tensors live.
    """

    def __init__(self, name: str, module_fn: Builder, device: str) -> None:
        self.name, self.module_fn, self.device = name, module_fn, device

        def values(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._values(key)

        self.values = _compat.keep_in_graph(values)

    def empty(self) -> torch.nn.Module:
        """The constructed module without values: its tensors are fake.

        Raises:
            TreeError: it returns something else, or a module with a tensor that is not a
                buffer.
        """
        key = torch.zeros(2, dtype=torch.int64)
        with _compat.fake_mode() as mode:
            module = self._built(mode.from_tensor(key), mode)
        _refuse(self.name, module)
        return module

    def _values(self, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values of the constructed module: parameters that require grad, buffers, frozen
        parameters.
        """
        with _compat.reading() as mode:
            module = self._built(key, mode)
        frozen = frozen_names(module)
        parameters = dict(module.named_parameters())
        named = [
            *(x for name, x in parameters.items() if name not in frozen),
            *dict(module.named_buffers()).values(),
            *(x for name, x in parameters.items() if name in frozen),
        ]
        return tuple(x.detach().clone() for x in named)

    def _built(self, key: torch.Tensor, mode: Any) -> torch.nn.Module:
        """The constructed module, whose random calls draw from this key."""
        state = torch.cat([key, torch.zeros_like(key[:1])])
        with (
            ambient.drawing_from(ambient.Traced(state)),
            patched_initialisation(),
            torch.device(self.device),
            ModuleTracing(mode, self.name) as traced,
            Numbers(),
        ):
            try:
                module = self.module_fn()
            except ShardError:
                raise
            except Exception as error:
                if refusal := torch_errors.module_error_of(error, self.name):
                    raise refusal from error
                raise
        traced.refuse_written()
        if isinstance(module, torch.nn.Module):
            _compat.settle(module)
        return module


def _refuse(name: str, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TreeError.of(
            name,
            f"module_fn returns a {type(module).__name__}",
            needed="an nn.Module",
            fix="pass a function that builds and returns a module",
        )
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                place = f"{path}.{key}" if path else key
                raise TreeError.of(
                    name,
                    f"{place} is a tensor, but neither a parameter nor a buffer",
                    needed="parameters and buffers, which have names",
                    fix=f"self.register_buffer({key!r}, value, persistent=False)",
                    arg_path=place,
                )
