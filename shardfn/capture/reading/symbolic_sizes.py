"""A function that has been read for any sizes of some dims of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from ... import _compat
from ...errors import CaptureError
from ...types import Aval
from ..closure.reads import Reads
from ..shard_map import axis_names as named
from .capture_settings import Settings


@attrs.frozen(eq=False)
class Template:
    """A function that Dynamo has read with symbols for sizes: its graph, and the conditions on the
    sizes. A capture for given sizes replays it, and reads no Python.

    Args:
        python: Dynamo's graph.
        sizes: its symbols, and the conditions that the function puts on them.
        dynamic: by leaf of the arguments, the dims that are symbols.
        names: the paths of the tensors among the leaves, by leaf.
        reads: the function's reads outside of its arguments.
        scope: the meshes that it names.
    """

    python: torch.fx.GraphModule
    sizes: _compat.Sizes
    dynamic: Mapping[int, Mapping[int, bool]]
    names: Mapping[int, str]
    reads: Reads
    scope: named.Scope
    # the function and the user's, which the capture closes over
    fns: tuple[Callable[..., Any], Callable[..., Any]]
    facts: _compat.Facts  # what it has asked of its argument tensors

    def misfit(self, leaves: Sequence[Any]) -> str | None:
        """The condition on sizes that arguments break, in words; None if they keep all. None if
        they keep all.

        Args:
            leaves: of the arguments: an `Aval` for each tensor.
        """
        numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Aval)]
        given = {k: _layout(leaves[i]) for k, i in enumerate(numbers)}
        names = {k: self.names[i] for k, i in enumerate(numbers)}
        return self.sizes.misfit(given, names)

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments have tensors in the places of those that it was read with."""
        tensors = {i for i, leaf in enumerate(leaves) if isinstance(leaf, Aval)}
        return tensors == self.names.keys()

    def is_alike(self, leaves: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether the arguments of two calls differ in sizes of dynamic dims at most. Strides
        count as sizes.
        """
        rows = zip(leaves, others, strict=True)
        return all(
            a == b or (i in self.dynamic and _differ_in_dims(a, b, self.dynamic[i]))
            for i, (a, b) in enumerate(rows)
        )

    def refuse_constants(self, settings: Settings) -> None:
        """Refuse a function that needs the size of a strict dim constant.

        Raises:
            CaptureError: it does. Names the line and the constant.
        """
        numbers = [*self.names]
        for (k, dim), (value, line) in self.sizes.constants().items():
            if self.dynamic.get(numbers[k], {}).get(dim, False):
                raise not_dynamic(
                    settings,
                    self.names[numbers[k]],
                    f"the function needs a constant size of dim {dim}: {value}",
                    line,
                )


def refuse_strict(settings: Settings, paths: Sequence[str], reason: str) -> None:
    """Refuse a function with a strict dim that cannot be read with symbols.

    Raises:
        CaptureError: a dim is strict.
    """
    for i, dims in settings.dynamic.items():
        for dim, is_strict in dims.items():
            if is_strict:
                raise not_dynamic(
                    settings,
                    paths[i],
                    f"the size of dim {dim} cannot be read as a symbol: {reason}",
                )


def not_dynamic(settings: Settings, path: str, got: str, line: str | None = None) -> CaptureError:
    """The error for a function that needs a strict dim constant."""
    return CaptureError.of(
        f"{settings.name}, argument {path}",
        got,
        needed="a size that may change between calls",
        fix="strict=False, with which shardfn captures the function again for each size",
        source=line,
        arg_path=path,
    )


def _layout(aval: Aval) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return aval.shape, aval.stride


def _differ_in_dims(a: Any, b: Any, dims: Mapping[int, bool]) -> bool:
    """Whether two tensors differ in the sizes of these dims at most."""
    if not isinstance(a, Aval) or not isinstance(b, Aval):
        return False
    if (a.dtype, a.device, len(a.shape)) != (b.dtype, b.device, len(b.shape)):
        return False
    pairs = enumerate(zip(a.shape, b.shape, strict=True))
    return all(m == n or dim in dims for dim, (m, n) in pairs)
