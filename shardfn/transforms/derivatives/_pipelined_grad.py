"""pipelined_grad: value and gradient of the mean over microbatches, run by a pipeline schedule.

Dynamo reads this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch

from ... import _compat, _tree
from ...argnums import Argnums, check_argnums, is_number
from ...capture.pipelined_values import is_followed, with_known_derivative
from ...errors import ShardError
from ...ops.text_formats import print_record
from ...pipelines import Schedule
from ...pipelines.named import NAMES
from .._flattened import picked
from .._transformed import name_of
from ..control_flow._scan import pipelined
from ._accumulate import as_tensors, batches, check_microbatches
from ._bucketed_grad import BucketedGrad
from ._grad import check_derivative

CAPS = ("25MB", None, "1GiB")  # those of bucketed_grad


@attrs.define(eq=False, repr=False, slots=False)
class PipelinedGrad(BucketedGrad):
    """`pipelined_grad` of a function."""

    verb: ClassVar[str] = "pipelined_grad"
    microbatches: int
    batch_argnums: tuple[int, ...] | None
    pipeline: str  # the text of the schedule and of its axis

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        wishes = self.wishes(args)
        k = self.microbatches
        where = f"{self.verb}({name_of(self.fn)})"
        numbers = batches(where, self, k, self.batch_argnums, args)
        parameters = _tree.tensors(picked(args, self.numbers(len(args))))
        whole = [args[n] for n in numbers]
        columns = [_stacked(x, k) for x in _tree.tensors(whole) if x.dim()]

        def step(row: list[torch.Tensor]) -> Any:
            inside = _with_rows(args, numbers, whole, row)
            value, aux, gradients = self.found(inside, kwargs)
            return gradients, (value, as_tensors(aux))

        means, (values, auxes) = pipelined(step, parameters, columns, k, self.pipeline)
        found = (values.sum() / k, auxes if self.has_aux else None, means)
        placed = self.placed(found, args, wishes)
        return self.returned(*(_followed(*placed, parameters) if is_followed() else placed))

    def options(self) -> Any:
        own = (self.microbatches, self.batch_argnums, self.pipeline)
        return (*super().options(), *own)


def _followed(
    value: torch.Tensor, aux: Any, gradients: Any, parameters: list[torch.Tensor]
) -> tuple[torch.Tensor, Any, Any]:
    """Results of which autograd follows the value, whose derivative are the gradients."""
    others, own = _tree.tensors(aux), _tree.tensors(gradients)
    value, *rest = with_known_derivative(value, others, own, parameters)
    aux = _tree.with_tensors(aux, rest[: len(others)])
    return value, aux, _tree.with_tensors(gradients, rest[len(others) :])


def _stacked(x: torch.Tensor, k: int) -> torch.Tensor:
    """A batch as k microbatches along a new first dim: rows i, i + k, i + 2k, ... are the i-th."""
    return x.reshape(x.shape[0] // k, k, *x.shape[1:]).transpose(0, 1)


def _with_rows(
    args: tuple[Any, ...], numbers: tuple[int, ...], whole: list[Any], row: list[torch.Tensor]
) -> tuple[Any, ...]:
    """The arguments with the tensors of one microbatch in place of the batch."""
    feed = iter(row)
    tensors = [next(feed) if x.dim() else x for x in _tree.tensors(whole)]
    own = _tree.with_tensors(whole, tensors)
    rows = dict(zip(numbers, own, strict=True))
    return tuple([rows.get(n, arg) for n, arg in enumerate(args)])


@_compat.constant_in_graph
def checked_pipeline(name: str, schedule: Any, axis: Any) -> str:
    """The text of a schedule and its axis.

    Raises:
        ShardError: it is neither a schedule nor the name of one, or the axis is not a name.
    """
    if not isinstance(axis, str) or not axis.isidentifier():
        raise ShardError.of(
            f"{name}, axis", f"{axis!r}", needed="the name of a mesh axis", fix='axis="pp"'
        )
    if isinstance(schedule, Schedule):
        return print_record((axis, schedule.to_json()))
    if isinstance(schedule, str) and schedule in NAMES:
        return print_record((axis, schedule))
    names = ", ".join(repr(x) for x in NAMES)
    raise ShardError.of(
        f"{name}, schedule", f"{schedule!r}", needed=f"an sf.Schedule, or one of {names}"
    )


def pipelined_grad(
    loss_fn: Callable[..., Any],
    microbatches: int,
    *,
    schedule: str | Schedule = "1f1b",
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] | None = None,
    axis: str = "pp",
) -> PipelinedGrad:
    """Compute the mean loss over microbatches and its gradient, on pipeline stages, in the order of
    a schedule.

    An op runs on the stage (`sf.Stage`) of the parameters that the op reads, and an op without
    parameters runs on the stage of its inputs. Outside of `shard`, or if no parameter has an
    `sf.Stage`, `pipelined_grad` runs the microbatches one after the other. `pipelined_grad` always
    returns the same values as `accumulate(value_and_grad(loss_fn), microbatches)`.

    Args:
        loss_fn: a function that returns a floating-point scalar, or (scalar, aux) with `has_aux`.
            If the value of loss_fn is a mean over the rows of the batch, the result equals the
            value and gradient for the global batch. If the value of loss_fn is not a mean over
            rows, the result is the mean of the results of the microbatches.
        microbatches: the number of microbatches. The first dim of every batch tensor must be a
            multiple of `microbatches`.
        schedule: an `sf.Schedule`, or one of the names "gpipe", "1f1b", "interleaved",
            "zero_bubble", "zbv" and "dualpipev".
        argnums: the positions of the arguments to differentiate, each a tree of floating-point
            tensors.
        has_aux: whether loss_fn also returns auxiliary data, a tree, in addition to the scalar.
        batch_argnums: the positions of the arguments that are batches. By default, the batches are
            the arguments that are not differentiated. `pipelined_grad` splits batches like
            `accumulate`.
        axis: the pipeline axis: the mesh axis over whose ranks the stages are distributed.

    Returns:
        A function with the same arguments as loss_fn, which returns (value, gradients), or ((value,
        aux), gradients). aux has a leading dim of size microbatches. A gradient has the shape,
        dtype and placement of the differentiated argument.

    Raises:
        ShardError: microbatches, schedule or axis has a wrong type, or, in a call of the returned
            function, the schedule does not fit the stages.
        TreeError: in a call of the returned function, the rows of a batch cannot be split evenly
            into microbatches.
        CaptureError: in a call of the returned function, loss_fn does not return a scalar.

    Source: GPipe (arXiv 1811.06965); PipeDream-Flush, 1F1B (arXiv 2006.09503); torch.distributed
        .pipelining.

    Example:
        >>> import torch, shardfn as sf
        >>> loss = lambda w, x: ((x @ w) ** 2).mean()
        >>> sf.pipelined_grad(loss, 2)(torch.ones(1), torch.tensor([[1.0], [3.0]]))
        (tensor(5.), tensor([10.]))
    """
    check_derivative("pipelined_grad", loss_fn, argnums, has_aux)
    name = f"pipelined_grad({name_of(loss_fn)})"
    check_microbatches(name, is_number(microbatches) and microbatches >= 1, repr(microbatches))
    numbers = None if batch_argnums is None else check_argnums(name, "batch_argnums", batch_argnums)
    text = checked_pipeline(name, schedule, axis)
    return PipelinedGrad(
        (loss_fn,), argnums, has_aux, CAPS, None, None, None, microbatches, numbers, text
    )
