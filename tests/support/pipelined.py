"""Models whose layers are placed on stages, and a training step of each as pipelines run it and as
one device does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import shardfn as sf

MESHES = {
    "alone": (("pp",), None),
    "dp": (("dp", "pp"), "dp"),
    "tp": (("pp", "tp"), None),
    "zero3": (("dp", "pp"), "dp"),
}


@attrs.frozen(eq=False)
class Model:
    """A loss with its arguments.

    Args:
        loss: of (params, batch).
        params: tensors in float64.
        batch: tensors with 24 rows.
        layers: for each parameter the number of its layer.
    """

    loss: Callable[[Any, Any], Any]
    params: Any
    batch: Any
    layers: Any

    @property
    def count(self) -> int:
        """The number of layers."""
        return 1 + max(tree_leaves(self.layers))


def stage_at(schedule: str, coordinates: int, stage: int) -> sf.Stage:
    """The place of a stage, counted from the first, in a schedule."""
    if schedule in ("zbv", "dualpipev") and stage >= coordinates:
        return sf.Stage(2 * coordinates - 1 - stage, 1)
    return sf.Stage(stage % coordinates, stage // coordinates)


def stages_of(schedule: str, coordinates: int) -> int:
    """The number of stages of a schedule, as it is tested here."""
    return coordinates * (2 if schedule in ("interleaved", "zbv", "dualpipev") else 1)


def placements(model: Model, schedule: str, coordinates: int, mesh: str) -> Any:
    """A placement of each parameter, with layers spread evenly over the stages."""
    stages = stages_of(schedule, coordinates)

    def place(w: torch.Tensor, layer: int) -> sf.P:
        at = stage_at(schedule, coordinates, layer * stages // model.count)
        if mesh == "tp" and w.dim() == 2 and w.shape[layer % 2] % 2 == 0:
            return sf.P(*[None] * (layer % 2), "tp", pp=at)
        if mesh == "zero3" and w.dim() and w.shape[0] % 2 == 0:
            return sf.P("dp", pp=at)
        return sf.P(pp=at)

    return sf.tree_map(place, model.params, model.layers)


def updated(params: Any, gradients: Any) -> Any:
    """The parameters after a step of gradient descent."""
    return sf.tree_map(lambda w, g: w - 0.1 * g, params, gradients)


def difference(one: Any, other: Any) -> float:
    """The largest difference of two trees' tensors, whose shapes and dtypes are equal."""
    pairs = [*zip(tree_leaves(one), tree_leaves(other), strict=True)]
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    gaps = [(x.double() - y.double()).abs().max().item() for x, y in pairs if x.numel()]
    return max(gaps, default=0.0)


@attrs.frozen(eq=False)
class Ran:
    """A step in both ways.

    Args:
        pipelined: what the pipeline returns, on one device.
        expected: what one device returns.
        lowered: the pipeline's programs.
    """

    pipelined: Any
    expected: Any
    lowered: Any

    @property
    def gap(self) -> float:
        """The largest difference."""
        return difference(self.pipelined, self.expected)


def ran(
    model: Model,
    schedule: str,
    coordinates: int,
    microbatches: int,
    *,
    mesh: str = "alone",
    step: Callable[[Any], Callable[[Any, Any], Any]] | None = None,
    has_aux: bool = False,
    is_lowered: bool = False,
    places: Callable[[Any], Any] | None = None,
) -> Ran:
    """Run a training step.

    Args:
        model: its loss and arguments.
        schedule: the name of a schedule.
        coordinates: of the axis of stages.
        microbatches: of the batch.
        mesh: one of MESHES.
        step: a step of (params, batch), made of a function that returns value and gradients.
        has_aux: whether the loss returns aux too.
        is_lowered: whether the programs are wanted.
        places: the placements of the parameters on a mesh; by default those of the model's layers.
    """

    def descent(derivative: Any) -> Callable[[Any, Any], Any]:
        def one(params: Any, batch: Any) -> Any:
            value, gradients = derivative(params, batch)
            return value, gradients, updated(params, gradients)

        return one

    make = step or descent
    plain = sf.value_and_grad(model.loss, has_aux=has_aux)
    sf.random.state.seed(7)
    expected = make(sf.accumulate(plain, microbatches))(model.params, model.batch)
    names, rows = MESHES[mesh]
    sizes = tuple(coordinates if name == "pp" else 2 for name in names)
    with sf.fake_world(math.prod(sizes)):
        derivative = sf.pipelined_grad(model.loss, microbatches, schedule=schedule, has_aux=has_aux)
        device_mesh = sf.make_mesh(sizes, names)
        own = lambda _: placements(model, schedule, coordinates, mesh)
        stepped = sf.shard(
            make(derivative),
            device_mesh,
            in_placements=((places or own)(device_mesh), None if rows is None else sf.P(rows)),
            backend="aten",
        )
        sf.random.state.seed(7)
        pipelined = sf.full(stepped(model.params, model.batch))
        lowered = stepped.lower(model.params, model.batch) if is_lowered else None
    return Ran(pipelined, expected, lowered)


def randn(*shape: int) -> torch.Tensor:
    """Normal numbers in float64, small enough to be multiplied often."""
    return torch.randn(*shape, dtype=torch.float64) / 3


def mlp(layers: int = 5) -> Model:
    """An MLP whose layers have other shapes, and a skip from the first layer to the loss."""
    torch.manual_seed(0)
    widths = [6, *[4 + 2 * (k % 3) for k in range(layers - 1)], 6]
    params = [{"w": randn(m, n), "b": randn(n)} for m, n in itertools.pairwise(widths)]

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        h = x
        for layer in params:
            h = torch.tanh(h @ layer["w"] + layer["b"])
        return F.mse_loss(h + x * params[0]["b"].sum(), y)

    numbers = [{"w": k, "b": k} for k in range(layers)]
    return Model(loss, params, (randn(24, 6), randn(24, 6)), numbers)


def gpt(layers: int = 2, dropout: float = 0.1) -> Model:
    """A GPT with tied embeddings and dropout."""
    torch.manual_seed(0)
    d, words, heads, length = 8, 12, 2, 5

    def block() -> dict[str, torch.Tensor]:
        weights = {"qkv": randn(d, 3 * d), "o": randn(d, d)}
        weights |= {"up": randn(d, 4 * d), "down": randn(4 * d, d)}
        return weights | {"g1": 1 + randn(d), "g2": 1 + randn(d)}

    blocks = [block() for _ in range(layers)]
    params = {"embedding": randn(words, d), "blocks": blocks, "norm": 1 + randn(d)}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        ids, labels = batch
        rows, t = ids.shape
        h = F.embedding(ids, params["embedding"])
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        for w in params["blocks"]:
            a = F.layer_norm(h, (d,), w["g1"])
            q, k, v = (a @ w["qkv"]).view(rows, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1)
            a = (F.dropout(scores, dropout) @ v).transpose(1, 2).reshape(rows, t, d)
            h = h + F.dropout(a @ w["o"], dropout)
            a = F.layer_norm(h, (d,), w["g2"])
            h = h + F.gelu(a @ w["up"]) @ w["down"]
        logits = F.layer_norm(h, (d,), params["norm"]) @ params["embedding"].t()
        return F.cross_entropy(logits.view(-1, words), labels.view(-1))

    batch = (torch.randint(0, words, (24, length)), torch.randint(0, words, (24, length)))
    numbers = {
        "embedding": 0,
        "blocks": [dict.fromkeys(blocks[k], k) for k in range(layers)],
        "norm": layers - 1,
    }
    return Model(loss, params, batch, numbers)


def _squares(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [randn(4, 4) for _ in range(count)]


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    return randn(24, 4), randn(24, 4)


def late_readers() -> Model:
    """Late stages read positions, masks and integers; each stage has an auxiliary loss; a parameter
    is a scalar, one has no element and one is not read.
    """
    params = {
        "w": _squares(4),
        "positions": randn(7, 4),
        "scale": torch.randn((), dtype=torch.float64),
        "unread": randn(3),
        "empty": randn(0, 4),
    }

    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y, ids, mask = batch
        auxiliary = 0.0
        for k, w in enumerate(params["w"]):
            h = torch.tanh(h @ w) + (params["positions"][ids] if k == 0 else ids.unsqueeze(1) * 0.1)
            auxiliary = auxiliary + 0.01 * (h**2).mean()
        h = torch.where(h > 0, h, h * params["scale"]) + params["empty"].sum()
        return F.mse_loss(h * mask.unsqueeze(1), y) + auxiliary

    batch = (*_rows(), torch.randint(0, 7, (24,)), torch.rand(24) > 0.3)
    numbers = {"w": [0, 1, 2, 3], "positions": 0, "scale": 3, "unread": 2, "empty": 3}
    return Model(loss, params, batch, numbers)


def late_parameters() -> Model:
    """Late stages alone read parameters of earlier ones; ops read those of two stages."""
    params = [*_squares(4), 1 + randn(4), randn(4), randn(4, 3), randn(4, 1), randn(4)]

    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y = batch
        for w in params[:4]:
            h = torch.tanh(h @ w) + h
        h = F.group_norm(h.unsqueeze(2), 2, params[4], params[5]).squeeze(2)
        h = h @ torch.cat(params[6:8], 1)
        return F.mse_loss(h * params[8], y)

    return Model(loss, params, _rows(), [0, 1, 2, 3, 0, 1, 2, 0, 1])


def views() -> Model:
    """Views, masks and indices of a value of the first stage are read by later ones."""
    params = [*_squares(4), randn(4)]

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        a = x @ params[0]
        h = torch.tanh(a @ params[1]) * a.t().t() + a.sum(1, keepdim=True).expand(-1, 4)
        h = torch.tanh(h @ params[2]) + a.view(-1, 2, 2).permute(0, 2, 1).reshape(-1, 4)
        h = torch.where(a > 0, h, h @ params[3]) + F.one_hot(a.argmax(1), 4) * params[4]
        return F.mse_loss(h + a[:, 1:2], y)

    return Model(loss, params, _rows(), [0, 1, 2, 3, 3])


def shared() -> Model:
    """Late stages read parameters of early ones, and products of them; weights have a decay."""
    params = _squares(4)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y = batch
        product = params[0] @ params[1]
        for w in params:
            h = torch.tanh(h @ w) + h
        h = h @ params[0].t() + h @ params[1] + h @ product
        return F.mse_loss(h, y) + 0.01 * sum((w**2).sum() for w in params)

    return Model(loss, params, _rows(), [0, 1, 2, 3])


def branches() -> Model:
    """Two branches part after the input and meet in the last stage."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        a, c = torch.tanh(x @ params[0]), torch.tanh(x @ params[1])
        d, e = torch.relu(a @ params[2]), torch.relu(c @ params[3] + x.sum())
        return F.mse_loss(d @ params[4] + e @ params[5] + a, y) + (c**2).mean()

    return Model(loss, _squares(6), _rows(), [0, 1, 1, 2, 2, 3])


def _chain(block: Callable[..., Any], params: list[Any], layers: list[int]) -> Model:
    def loss(params: Any, batch: Any) -> torch.Tensor:
        h, y = batch
        for w in params:
            h = block(h, w)
        return F.mse_loss(h, y)

    return Model(loss, params, _rows(), layers)


def checkpointed() -> Model:
    """Every block is computed again in the backward."""
    block = sf.checkpoint(lambda h, w: torch.tanh(torch.tanh(h @ w) @ w) + h)
    return _chain(block, _squares(4), [0, 1, 2, 3])


def scanned() -> Model:
    """Every stage is a scan over its layers."""

    def layer(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.tanh(h @ w) + h, None

    stacks = [torch.stack(_squares(4)[k : k + 2]) for k in (0, 2)]
    return _chain(lambda h, w: sf.scan(layer, h, w)[0], [*stacks, *stacks], [0, 1, 2, 3])


def with_branch() -> Model:
    """A stage chooses a branch by a value of the stage before."""

    def block(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return sf.cond(
            h.sum() > 0, lambda h, w: torch.tanh(h @ w), lambda h, w: torch.tanh(h @ w) + 1, h, w
        )

    return _chain(block, _squares(2), [0, 1])


def without_parameters() -> Model:
    """A stage has no parameter."""
    return _chain(lambda h, w: torch.tanh(h @ w), _squares(3), [0, 2, 3])


def all_last() -> Model:
    """The first stage has no parameter."""
    return _chain(lambda h, w: torch.tanh(h @ w), _squares(2), [1, 1])


class Cubed(torch.autograd.Function):
    """A square whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * g


def own_backward() -> Model:
    """Every block has an autograd function."""
    return _chain(lambda h, w: Cubed.apply(torch.tanh(h @ w)) + h, _squares(4), [0, 1, 2, 3])


MODELS = {
    f.__name__: f
    for f in (
        mlp,
        gpt,
        late_readers,
        late_parameters,
        views,
        shared,
        branches,
        checkpointed,
        scanned,
        with_branch,
        without_parameters,
        all_last,
        own_backward,
    )
}
