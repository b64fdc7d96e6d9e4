"""The modes of a copied module, train or eval: those of the module that it was copied from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ... import _compat

Origin = weakref.ReferenceType[torch.nn.Module]


class Modes:
    """Which submodules of a copied module train, as in the module that it was copied from. It
    follows the originals as long as they exist.

    Args:
        name: of the module in errors and explanations.
        parts: the submodules of the copy by path.
        origins: references to the module that each was copied from. None to follow no module.
    """

    def __init__(
        self, name: str, parts: dict[str, torch.nn.Module], origins: Sequence[Origin] | None = None
    ) -> None:
        self.name = name
        self.parts = parts
        self.origins = None if origins is None else tuple(origins)
        self.flags = tuple(part.training for part in parts.values())
        # equal modes are one object, which a call compares by identity
        self.known: dict[tuple[bool, ...], tuple[str, ...]] = {}

    @classmethod
    def following(cls, name: str, module: torch.nn.Module, copies: dict[int, Any]) -> Modes:
        """The modes of a copy of a module.

        Args:
            name: of the module.
            module: the original.
            copies: the copy of each object, by id.
        """
        origin_of: dict[int, Origin] = {}
        for part in module.modules():
            copied = copies[id(part)]
            origin_of[id(copied)] = weakref.ref(part)
        shadow = copies[id(module)]
        parts = dict(shadow.named_modules())
        origins = [origin_of[id(part)] for part in parts.values()]
        return cls(name, parts, origins)

    @property
    def read(self) -> _compat.Read:
        """The read of the modes, for the key of a capture."""
        place = ("scope", _compat.Itself(self)), ("training", self.name)
        return _compat.Read(place, "CONSTANT_MATCH", None)

    @property
    def training(self) -> tuple[str, ...]:
        """The paths of the submodules that train; that of the module itself is ''."""
        flags = self.latest()
        if flags not in self.known:
            paths: list[str] = []
            for path, trains in zip(self.parts, flags, strict=True):
                if trains:
                    paths.append(path)
            self.known[flags] = tuple(paths)
        return self.known[flags]

    def latest(self) -> tuple[bool, ...]:
        """Whether each submodule trains now."""
        if self.origins is not None:
            self.flags = tuple(map(_trains, self.origins, self.flags))
        return self.flags

    def set_on(self, copies: dict[int, Any]) -> None:
        """Set the modes of a further copy, given the copy of each submodule by id."""
        rows = zip(self.parts.values(), self.latest(), strict=True)
        for part, trains in rows:
            copies[id(part)].training = trains

    def __getstate__(self) -> dict[str, Any]:
        """The state of a pickled or copied record, which follows no module."""
        self.latest()
        return {"name": self.name, "parts": self.parts, "flags": self.flags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["parts"])
        self.flags = state["flags"]


def _trains(origin: Origin, before: bool) -> bool:
    """Whether the original module trains; if it no longer exists, the last answer."""
    module = origin()
    return before if module is None else module.training
