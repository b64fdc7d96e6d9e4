"""strategy: the placements of a parallel strategy by its name, such as "zero3"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ... import _compat, _tree
from ...axis_options import OPTIONS, check_option
from ...byte_sizes import human_bytes
from ...errors import PlacementError
from ...extensions import page_of
from ...mesh import axes_of, check_mesh
from ...patterns import near
from ...placement import P, Stage, is_spec
from ...placement_table import Placements
from ...types import ATTENTION, ROWS, MeshAxes
from .fully_sharded import Dims, axes_in, base_of, placed, smallest_of, spec_of
from .leaves import Params, checked_axes, params_of
from .stages import EVEN, stage_placements, with_stage

KINDS = ("params", "grads", "state")
MOMENTS = 2  # of Adam, each of the dtype of its parameter


@attrs.frozen
class Kind:
    """One row of the table of strategies.

    Args:
        axes: the mesh axes by default.
        sharded: which of KINDS are sharded over the last of the axes.
        batch: whether the axes shard the batch.
        sequence: whether the axis shards the sequence between layers.
        base: the plan of a model that says how parameters are sharded over the axis, which `base`
            must have.
        is_of_tokens: whether the axis shards the sequence of the inputs, too.
        has_rows: whether rows of tokens travel over the axis to their experts.
        has_stages: whether each parameter is on one stage of the axis.
    """

    axes: tuple[str, ...] = ("dp",)
    sharded: tuple[str, ...] = ()
    batch: bool = True
    sequence: bool = False
    base: str | None = None
    has_rows: bool = False
    is_of_tokens: bool = False
    has_stages: bool = False


STRATEGIES = {
    "ddp": Kind(),
    "zero1": Kind(sharded=("state",)),
    "zero2": Kind(sharded=("grads", "state")),
    "zero3": Kind(sharded=KINDS),
    "hsdp": Kind(axes=("replica", "dp"), sharded=KINDS),
    "tensor": Kind(axes=("tp",), batch=False, base="tp_plan"),
    "sequence": Kind(axes=("tp",), batch=False, base="tp_plan", sequence=True),
    "context": Kind(axes=("cp",), batch=False, sequence=True, is_of_tokens=True),
    "expert": Kind(axes=("ep",), base="ep_plan", has_rows=True),
    "pipeline": Kind(axes=("pp",), batch=False, has_stages=True),
}


@attrs.frozen
class Strategy:
    """The placements of the values of a training step.

    Args:
        name: the name of the strategy, such as "zero3".
        params: the placement of each parameter between two steps.
        grads: the placement of each gradient, which the step passes to `sf.constrain`.
        state: the placement of the optimizer state of each parameter, to pass to
            `opt.state_placements`.
        batch: the placement of the inputs, whose first dim is the batch.
        activations: the placement of the values between layers, of shape (batch, sequence,
            features), to pass to `sf.pin` or `sf.constrain`.
        attention: for each mesh axis, the method of sharded attention, to pass to
            `sf.shard(attention=)`.
        rows: for each mesh axis, the number of token rows that a rank can receive for its experts,
            to pass to `sf.shard(rows=)`.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(2):
        ...     mesh = sf.make_mesh((2,), ("dp",))
        ...     plan = sf.strategy("zero3", {"w": torch.ones(4, 3)}, mesh)
        >>> plan.name, plan.params["w"], plan.batch
        ('zero3', P('dp'), P('dp'))
    """

    name: str
    params: Placements
    grads: Placements
    state: Placements
    batch: P
    activations: P
    rows: dict[str, int | str] | None = None
    attention: dict[str, str] | None = None

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What a notebook shows: the table."""
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        """Draw a picture in a notebook."""
        return page_of(self)

    def __str__(self) -> str:
        texts = [f"{kind} {human_bytes(getattr(self, kind).nbytes)}" for kind in KINDS]
        both = human_bytes(MOMENTS * self.state.nbytes)
        texts[-1] += f", of Adam's two moments {both}"
        head = f"{self.name}: batch {self.batch}, activations {self.activations}"
        return "\n".join([head, f"  bytes a rank: {', '.join(texts)}"])


@_compat.outside_only
def strategy(
    name: str,
    params: Any,
    mesh: Any,
    *,
    axis: str | tuple[str, ...] | None = None,
    base: Any = None,
    min_bytes: int | str = 0,
    stages: Any = EVEN,
    chunks: int = 1,
    order: str = "loop",
    rows: int | str | None = None,
    attention: Mapping[str, str] | None = None,
) -> Strategy:
    """Return the placements of parameters, gradients and optimizer state for a parallel strategy.

    Args:
        name: the name of the strategy: one of "ddp", "zero1", "zero2", "zero3", "hsdp", "tensor",
            "sequence", "context", "expert" and "pipeline".
        params: a dict of tensors, DTensors or `ShapeDtype`s, or a tree of dicts.
        mesh: a DeviceMesh.
        axis: the mesh axis of the strategy. The strategy "hsdp" needs two axes, of which the last
            shards the parameters. The default axis is ("replica", "dp") for "hsdp", "tp" for
            "tensor" and "sequence", "cp" for "context", "ep" for "expert", "pp" for "pipeline", and
            "dp" for all other strategies. The strategy "expert" may have several axes, over which
            `base` shards the experts.
        base: placements of parameters to keep, as in `sf.fsdp`, or a `Strategy`, which also gives
            the placements of the batch and of activations. The strategies "tensor" and "sequence"
            need a tensor parallel plan in `base`, and "expert" needs the placements of the experts,
            such as `model.ep_plan`.
        min_bytes: the size in bytes below which a parameter is not sharded over `axis`, as in
            `fsdp`.
        stages: for the strategy "pipeline": how the layers are divided into stages. With
            `stages="even"`, the stages hold consecutive layers of `params`, with about the same
            number of elements per stage. With `stages=sf.jit(loss_fn).trace(params, batch)`, the
            layers are sorted by when loss_fn reads their parameters, and are divided into
            consecutive stages that take about the same time. To choose the stages yourself, pass a
            dict from patterns of parameter paths to stage numbers, which start at 0.
        chunks: for the strategy "pipeline": the number of stages on each rank along the axis.
        order: for the strategy "pipeline": how the stages lie on the n ranks of the axis. With
            `order="loop"`, stage s is on rank s mod n of the n ranks. With `order="v"`, which needs
            `chunks=2`, the stages lie on the ranks in ascending and then in descending order, like
            a V.
        rows: for the strategy "expert": the number of token rows that a rank can receive for its
            experts, or text such as "1.5x" for 1.5 times the mean number of rows per rank. By
            default, `rows` is the largest number of token rows that can arrive at a rank.
        attention: for the strategy "context": the method of sharded attention over the axis, such
            as `dict(cp="ring")`. By default, each attention op uses the method that sends the
            fewest bytes.

    Returns:
        A `Strategy` with `params`, `grads`, `state`, `batch`, `activations`, `rows` and
        `attention`.

    Raises:
        PlacementError: the strategy is unknown, the mesh lacks the axis, `base` does not fit the
            strategy, a parameter has no stage, the model has fewer layers than stages, or `rows` or
            `attention` does not fit the strategy.
        TreeError: the tree `base` does not match the parameters.

    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054; Shoeybi et al. 2019, Megatron-LM,
        arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198, for "sequence"; Liu et al.
        2023, arXiv:2310.01889, and Jacobs et al. 2023, arXiv:2309.14509, for "context";
        torch.distributed.fsdp.ShardingStrategy.

    Example:
        >>> import torch, shardfn as sf
        >>> with sf.fake_world(4):
        ...     mesh = sf.make_mesh((4,), ("dp",))
        ...     plan = sf.strategy("zero2", {"w": sf.ShapeDtype((8, 2))}, mesh)
        ...     print(plan)
        zero2: batch P('dp'), activations P('dp')
          bytes a rank: params 64 B, grads 16 B, state 16 B, of Adam's two moments 32 B
        >>> plan.params["w"], plan.grads["w"]
        (P(), P('dp'))
    """
    check_mesh("strategy", mesh)
    axes = axes_of(mesh)
    kind = _kind(name)
    names = _axes(name, kind, axis, axes)
    where = f"strategy({name!r})"
    tree = params_of(where, params)
    smallest = smallest_of(where, min_bytes)
    found = {}
    for which in KINDS:
        under = getattr(base, which) if isinstance(base, Strategy) else base
        before = base_of(where, under, params, tree, axes)
        if kind.base is not None:
            _check_base(where, before, names, kind.base)
        added = names[-1:] if which in kind.sharded else ()
        found[which] = placed(tree, before, added, smallest, axes)
    if kind.has_stages:
        size = axes.sizes[axes.names.index(names[0])]
        at = stage_placements(where, tree.tensors, dict(params), size, stages, chunks, order)
        found = {
            which: _on_stages(tree, specs, names[0], at, axes) for which, specs in found.items()
        }
    batch, activations = _of_batch(kind, names, base, axes)
    bounds = _bounds(where, kind, names, rows, base)
    ways = _ways(where, kind, names[-1], attention, base)
    return Strategy(
        name, **found, batch=batch, activations=activations, rows=bounds, attention=ways
    )


def _ways(where: str, kind: Kind, axis: str, attention: Any, base: Any) -> dict[str, str] | None:
    """The ways of attention by mesh axis, those of a base too.

    Raises:
        PlacementError: a way of a strategy that has none, or over another axis, or no way.
    """
    ways = dict(base.attention or {}) if isinstance(base, Strategy) else {}
    check_option(where, ATTENTION, attention)
    if attention is None:
        return ways or None
    if not kind.is_of_tokens or [*attention] != [axis]:
        of_context = axis if kind.is_of_tokens else "cp"
        raise PlacementError.of(
            f"{where}, attention",
            f"it is {attention!r}",
            needed=f'a dict with a method of attention for the "context" axis {of_context!r}',
            fix=f"attention={{{of_context!r}: 'ring'}}",
            arg_path="attention",
        )
    return {**ways, **attention}


def _bounds(
    where: str, kind: Kind, names: tuple[str, ...], rows: Any, base: Any
) -> dict[str, int | str] | None:
    """The bounds of rows by mesh axis, those of a base too.

    Raises:
        PlacementError: rows of a strategy that has none, or no bound.
    """
    bounds = dict(base.rows or {}) if isinstance(base, Strategy) else {}
    if rows is None:
        return bounds or None
    if not kind.has_rows or not OPTIONS[ROWS].is_value(rows):
        raise PlacementError.of(
            f"{where}, rows",
            f"it is {rows!r}",
            needed='a number of rows, 1 or more, or text such as "1.5x", for kind "expert"',
            fix='sf.strategy("expert", params, mesh, base=base, rows="1.5x")',
            arg_path="rows",
        )
    bounds.update((axis, rows) for axis in names)
    return bounds


def _on_stages(
    tree: Params, specs: Placements, axis: str, stages: dict[str, Stage], axes: MeshAxes
) -> Placements:
    """Placements with the stage of each parameter."""
    rows = dict(_tree.named_leaves(dict(specs), is_spec))
    whole = {path: with_stage(rows[path], axis, stage) for path, stage in stages.items()}
    return Placements(tree.filled(whole), tree.tensors, axes)


def _kind(name: Any) -> Kind:
    """The row of a strategy.

    Raises:
        PlacementError: there is none of this name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise PlacementError.of(
            "strategy, name",
            f"it is {name!r}",
            needed=" or ".join(map(repr, STRATEGIES)),
            fix=repr(near(str(name), STRATEGIES)[0]),
            arg_path="name",
        )
    return STRATEGIES[name]


def _axes(name: str, kind: Kind, axis: Any, axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a strategy, in the order in which they are given.

    Raises:
        PlacementError: the mesh lacks one, or their number is wrong.
    """
    given = kind.axes if axis is None else axis
    where = f"strategy({name!r})"
    checked_axes(where, axes, given)
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(names) != len(kind.axes) and not kind.has_rows:
        is_one = len(kind.axes) == 1
        raise PlacementError.of(
            f"{where}, axis",
            f"it is {given!r}",
            needed="one mesh axis"
            if is_one
            else "two mesh axes: the first replicates, the second shards",
            fix=f"axis={(kind.axes[0] if is_one else kind.axes)!r}",
            arg_path="axis",
        )
    return names


def _check_base(
    where: str, before: dict[str, Dims], names: tuple[str, ...], model_plan: str
) -> None:
    """Check that placements shard some parameter over the axes of a strategy.

    Raises:
        PlacementError: they do not.
    """
    used = {axis for dims in before.values() for axis in axes_in(dims)}
    missing = [axis for axis in names if axis not in used]
    if missing:
        axis = missing[0]
        raise PlacementError.of(
            f"{where}, base",
            f"base shards no parameter over {axis!r}",
            needed=f"placements such as those from a model's {model_plan}",
            fix=f"base=sf.placements(params, model.{model_plan}, axis={axis!r})",
            arg_path="base",
        )


def flattened(parts: Any) -> list[str]:
    """The axes that the parts of a `P` name."""
    rows = [(part,) if isinstance(part, str) else part or () for part in parts]
    return [axis for row in rows for axis in row]


def _of_batch(kind: Kind, names: tuple[str, ...], base: Any, axes: MeshAxes) -> tuple[P, P]:
    """The placements of the inputs, and of values between layers."""
    batch: list[str] = []
    sequence: list[str] = []
    if isinstance(base, Strategy):
        batch = flattened(base.batch.parts)
        sequence = flattened(base.activations.parts[1:])
    batch += names if kind.batch else ()
    sequence += names if kind.sequence else ()
    tokens: list[str] = []
    if isinstance(base, Strategy):
        tokens = flattened(base.batch.parts[1:])
        batch = [axis for axis in batch if axis not in tokens]
    tokens += names if kind.is_of_tokens else ()
    first, second, between = (
        tuple(axis for axis in axes.names if axis in row) for row in (batch, tokens, sequence)
    )
    of_inputs = (first, second) if second else (first,)
    return spec_of(Dims(of_inputs)), spec_of(Dims((first, between)))
