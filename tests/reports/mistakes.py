"""Ten mistakes in placements that people make, each a small program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf
from shardfn import P

Tensor = torch.Tensor
S = sf.ShapeDtype


@attrs.frozen(eq=False)
class Mistake:
    """A program with a mistake, and the collective that it costs.

    Args:
        fn: of global tensors.
        args: their shapes.
        placements: of the arguments, with the mistake.
        kind: of the collective.
        line: a part of the text of the line that the report blames; "" for a result or a bucket.
        module: that it blames.
        out_placements: of the results.
        axes: of the mesh.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    placements: tuple[Any, ...]
    kind: str
    line: str
    module: str | None = None
    out_placements: Any = None
    axes: Mapping[str, int] = {"dp": 4}


def perceptron(p: Any, x: Tensor) -> Tensor:
    hidden = F.relu(x @ p["up"])
    return hidden @ p["down"]


WEIGHTS = {"up": S((256, 1024)), "down": S((1024, 256))}
COLUMNS_AND_ROWS = {"up": P(None, "tp"), "down": P("tp", None)}


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -1e9).softmax(-1)


def logits(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def transposed(w: Tensor, x: Tensor) -> Tensor:
    return x @ w.T


def loss_of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y)


def trained(w: Tensor, x: Tensor, y: Tensor) -> Any:
    loss, grad = sf.value_and_grad(loss_of)(w, x, y)
    return w - 0.1 * grad, loss


def with_momentum(w: Tensor, m: Tensor, x: Tensor, y: Tensor) -> Any:
    loss, grad = sf.bucketed_grad(loss_of)(w, x, y)
    m = 0.9 * m + grad
    return w - 0.1 * m, m, loss


def losses_of_samples(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, y, reduction="none")


def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(1)


def mixed(x: Tensor) -> Tensor:
    folded = x.reshape(64, 3, 32)
    return folded.softmax(1)


class Layer(nn.Module):
    """A module whose weight is sharded on the dim that is summed over."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024, bias=False)
        self.down = nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


MODULE, PARAMETERS, _ = sf.functionalize(Layer())


def of_module(p: Any, x: Tensor) -> Tensor:
    return MODULE(p, {}, x)[0]


LOSS_ARGS = S((64, 100)), S((128, 64)), S((128,), torch.int64)
MISTAKES = {
    "the contraction of a weight is sharded": Mistake(
        perceptron,
        (WEIGHTS, S((64, 256))),
        ({**COLUMNS_AND_ROWS, "up": P("tp", None)}, P()),
        "all_gather",
        'x @ p["up"]',
        axes={"tp": 4},
    ),
    "the contraction of a module's weight is sharded": Mistake(
        of_module,
        (PARAMETERS, S((64, 256))),
        ({"up.weight": P(None, "tp"), "down.weight": P(None, "tp")}, P()),
        "all_gather",
        "self.up(x)",
        module="up",
        axes={"tp": 4},
    ),
    "a mask has another placement": Mistake(
        masked,
        (S((64, 256)), S((64, 256), torch.bool)),
        (P("dp"), P(None, "dp")),
        "all_to_all",
        "masked_fill",
    ),
    "the batch is on the axis of the weights": Mistake(
        perceptron,
        (WEIGHTS, S((64, 256))),
        (COLUMNS_AND_ROWS, P("tp")),
        "all_gather",
        'x @ p["up"]',
        axes={"dp": 2, "tp": 2},
    ),
    "a parameter is left replicated": Mistake(
        trained, LOSS_ARGS, (P(), P("dp"), P("dp")), "all_reduce", "sf.value_and_grad"
    ),
    "optimizer state is left replicated": Mistake(
        with_momentum, (LOSS_ARGS[0], *LOSS_ARGS), (P(), P(), P("dp"), P("dp")), "all_reduce", ""
    ),
    "logits are gathered": Mistake(
        logits,
        (S((64, 1000)), S((16, 64))),
        (P(None, "tp"), P()),
        "all_gather",
        "",
        out_placements=P(),
        axes={"tp": 4},
    ),
    "the loss of each sample is replicated": Mistake(
        losses_of_samples, LOSS_ARGS, (P(), P("dp"), P("dp")), "all_gather", "", out_placements=P()
    ),
    "a placement is transposed": Mistake(
        transposed,
        (S((1000, 64)), S((16, 64))),
        (P(None, "tp"), P()),
        "all_gather",
        "x @ w.T",
        axes={"tp": 4},
    ),
    "the dim of a running sum is sharded": Mistake(
        cumulative, (S((64, 256)),), (P(None, "dp"),), "all_gather", "cumsum"
    ),
    "a reshape mixes a sharded dim": Mistake(
        mixed, (S((96, 64)),), (P(None, "dp"),), "all_gather", "x.reshape"
    ),
}
