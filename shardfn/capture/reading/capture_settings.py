"""The settings of a capture, and torch patched for it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from ... import _compat
from ..aten_trace import Recording, recording
from ..dtensors.dtensor_values import DTensors
from ..modules import backward_hooks
from ..refusals import leaked_values, rank_numbers
from ..rewrites import (
    autograd_function_code,
    autograd_functions,
    decompositions,
    inner_gradients,
    packed_sequences,
    python_substitutes,
    sparse_borders,
    sparse_matrices,
    substitutes_under_transforms,
    tensor_indices,
)
from ..rewrites.custom_op_gradients import custom_op_runner
from ..shard_map import axis_names as named


@attrs.frozen(eq=False)
class Settings:
    """The settings of a capture, besides the function and its arguments.

    Args:
        name: of the function in errors and printed programs.
        signature_of: the user's function, for the line of errors without one.
        device: where `ShapeDtype`s live.
        undecomposed: ops that are not decomposed.
        mesh: the mesh of the call, which a shard_map inside may use.
        may_be_of_ranks: whether to raise NeedsRanks for the code of one rank.
        gradients: the paths of the tensors whose gradients fn returns beside its value. None if
            it returns the value alone.
        with_known: whether these gradients are read from pipelines, not computed of them.
        dynamic: by leaf of the arguments, the dims whose sizes are read as symbols, and whether
            it is an error if one must be constant.
        rank: of code of one rank: the coordinate of the rank whose code is read, or nothing if
            all share one program; else None.
        differing: the nodes whose constants differ by rank: `own_sizes.differing`.
    """

    name: str = ""
    signature_of: Callable[..., Any] | None = None
    device: str = "cpu"
    undecomposed: frozenset[Any] = frozenset()
    mesh: Any = None
    may_be_of_ranks: bool = False
    gradients: tuple[str, ...] | None = None
    with_known: bool = False
    dynamic: Mapping[int, Mapping[int, bool]] = types.MappingProxyType({})
    rank: tuple[int, ...] | None = None
    differing: frozenset[Any] = frozenset()


class Tracing(NamedTuple):
    """The records that are filled during a capture."""

    recorded: Recording
    watched: leaked_values.WatchedFunctions
    names: named.Scope


@contextlib.contextmanager
def tracing(
    settings: Settings,
    mode: _compat.FakeTensorMode,
    memo: _compat.Memo,
    arguments: Sequence[tuple[str, torch.Tensor]] = (),
) -> Iterator[Tracing]:
    """The context of a capture: torch patched, and new records."""
    table = decompositions.table(settings.undecomposed)
    scope = named.scope(settings.mesh, settings.device, settings.may_be_of_ranks, settings.rank)
    recorder = recording(settings.name, table, mode, with_known=settings.with_known)
    with (
        _patched_torch(mode, settings, memo, arguments),
        leaked_values.swept() as watched,
        _compat.unwound(),
        recorder as recorded,
        scope as names,
        rank_numbers.noting_rank_calls(names),
    ):
        yield Tracing(recorded, watched, names)


@contextlib.contextmanager
def _patched_torch(
    mode: _compat.FakeTensorMode,
    settings: Settings,
    memo: _compat.Memo,
    arguments: Sequence[tuple[str, torch.Tensor]],
) -> Iterator[None]:
    """The context in which torch is patched for a capture."""
    with (
        _compat.staging(),  # first, since the rest is global to the process
        _compat.inference_off(),
        _compat.anomaly_off(),
        mode,
        _compat.paused_gc(),
        _compat.patched(
            "capture",
            substitutes={
                **python_substitutes.TABLE,
                **packed_sequences.TABLE,
                **sparse_matrices.TABLE,
                **inner_gradients.TABLE,
                **_compat.substitutes(),
            },
            custom_ops=custom_op_runner(),
            functions=autograd_functions.apply_function,
            functions_read=autograd_function_code.function_to_read,
            hooked=backward_hooks.hooked_module,
            device=settings.device,
            is_dynamic=bool(settings.dynamic),
            dtensors=DTensors(mode, arguments),
            sparse=sparse_borders.IN_DYNAMO,
            memo=memo,
            steps=tensor_indices.FUNCTIONS,
            under_transforms=substitutes_under_transforms.GIVEN._replace(
                is_recorded=settings.gradients is not None
            ),
        ),
    ):
        yield
