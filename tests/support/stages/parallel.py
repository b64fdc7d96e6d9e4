"""Training steps of models of a few blocks, with data and tensor parallel strategies, lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

import shardfn as sf
from shardfn import P

WIDTH, HEADS, VOCAB, LAYERS = 128, 4, 500, 2
WIDE = 4 * WIDTH
ROWS = (512, WIDTH)
SEQUENCES = (8, 64)
COLUMN, ROW = P(None, "tp"), P("tp")
Layer = dict[str, torch.Tensor]
Block = Callable[[Layer, torch.Tensor], torch.Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "up": (WIDTH, WIDE),
    "bias": (WIDE,),
    "gate": (WIDTH, WIDE),
    "down": (WIDE, WIDTH),
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, WIDTH),
    "v": (WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
    "norm": (WIDTH,),
    "norm_bias": (WIDTH,),
    "norm2": (WIDTH,),
    "norm2_bias": (WIDTH,),
}
TENSOR = {  # the weights that are sharded over the axis of tensor parallelism
    "up": COLUMN,
    "bias": ROW,
    "gate": COLUMN,
    "down": ROW,
    "q": COLUMN,
    "k": COLUMN,
    "v": COLUMN,
    "o": ROW,
}


def attention(w: Layer, x: torch.Tensor) -> torch.Tensor:
    """Causal attention of some heads."""
    q, k, v = ((x @ w[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2) @ w["o"]


def gelu(w: Layer, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w["up"] + w["bias"]) @ w["down"]


def relu(w: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x @ w["up"]) @ w["down"])


def dropout(w: Layer, x: torch.Tensor) -> torch.Tensor:
    h = F.dropout(gelu(w, x), 0.1)
    return F.gelu(h)


def residual(w: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + F.dropout(gelu(w, x), 0.1)


def gpt(w: Layer, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (WIDTH,), w["norm"], w["norm_bias"])
    x = x + attention(w, h)
    h = F.layer_norm(x, (WIDTH,), w["norm2"], w["norm2_bias"])
    return x + gelu(w, h)


def llama(w: Layer, x: torch.Tensor) -> torch.Tensor:
    h = F.rms_norm(x, (WIDTH,), w["norm"])
    x = x + attention(w, h)
    h = F.rms_norm(x, (WIDTH,), w["norm2"])
    gate = F.silu(h @ w["gate"])
    return x + (gate * (h @ w["up"])) @ w["down"]


@attrs.frozen
class Model:
    """A model of blocks that are alike.

    Args:
        block: a function of the weights of a layer and a value.
        weights: their names.
        is_language: whether words come in, and are to be predicted.
        around: a transform of the block.
        is_scanned: whether one loop runs all blocks.
    """

    block: Block
    weights: tuple[str, ...]
    is_language: bool = False
    around: Callable[[Block], Block] = lambda block: block
    is_scanned: bool = False

    def loss(self, w: Any, x: torch.Tensor, *target: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        table = w.get("table")
        h = x if table is None else F.embedding(x, table)
        h = self.run(w["layers"], h)
        if table is None:
            return h.square().mean()
        (y,) = target
        return F.cross_entropy((h @ table.T).flatten(0, 1), y.flatten())

    def run(self, layers: Any, h: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        block = self.around(self.block)
        if self.is_scanned:
            return sf.scan(lambda h, w: (block(w, h), None), h, layers)[0]
        for w in layers.values():
            h = block(w, h)
        return h

    def params(self) -> Any:
        """Random weights."""
        every = [self.layer() for _ in range(LAYERS)]
        named = {str(k): layer for k, layer in enumerate(every)}
        layers = {n: torch.stack([w[n] for w in every]) for n in self.weights}
        params: dict[str, Any] = {"layers": layers if self.is_scanned else named}
        if self.is_language:
            params["table"] = torch.randn(VOCAB, WIDTH)
        return params

    def layer(self) -> Layer:
        return {name: torch.randn(SHAPES[name]) for name in self.weights}

    def sharded(self, params: Any) -> Any:
        """The placements of the weights of a tensor parallel model."""
        own = {name: TENSOR.get(name, P()) for name in self.weights}
        layers = dict.fromkeys(params["layers"], own)
        if self.is_scanned:
            layers = {name: P(None, *place.parts) for name, place in own.items()}
        places: dict[str, Any] = {"layers": layers}
        if self.is_language:
            places["table"] = ROW
        return places

    def batch(self) -> list[torch.Tensor]:
        if not self.is_language:
            block = self.block in (gpt, llama)
            return [torch.randn((*SEQUENCES, WIDTH) if block else ROWS)]
        return list(torch.randint(0, VOCAB, (2, *SEQUENCES)))


MLP = ("up", "bias", "down")
GPT = tuple(name for name in SHAPES if name != "gate")
LLAMA = ("up", "gate", "down", "q", "k", "v", "o", "norm", "norm2")
MODELS = {
    "gelu mlp": Model(gelu, MLP),
    "relu mlp": Model(relu, ("up", "down")),
    "dropout mlp": Model(dropout, MLP),
    "residual dropout mlp": Model(residual, MLP),
    "gpt": Model(gpt, GPT),
    "gpt of words": Model(gpt, GPT, is_language=True),
    "llama": Model(llama, LLAMA),
    "llama of words": Model(llama, LLAMA, is_language=True),
    "checkpointed gpt": Model(gpt, GPT, around=sf.checkpoint),
    "checkpointed llama": Model(llama, LLAMA, around=sf.checkpoint),
    "scanned mlp": Model(gelu, MLP, is_scanned=True),
    "scanned gpt": Model(gpt, GPT, is_scanned=True),
}
STRATEGIES = {  # a strategy, over a mesh of one shape, and whether it is tensor parallel too
    "ddp on 2": ("ddp", (2,)),
    "ddp on 4": ("ddp", (4,)),
    "zero1 on 4": ("zero1", (4,)),
    "zero2 on 4": ("zero2", (4,)),
    "zero3 on 2": ("zero3", (2,)),
    "zero3 on 4": ("zero3", (4,)),
    "tensor on 2": ("tensor", (2,)),
    "tensor on 4": ("tensor", (4,)),
    "ddp x tensor": ("ddp", (2, 2)),
    "zero3 x tensor": ("zero3", (2, 2)),
}
STEPS = {"gradient": None, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def lowered(model: str, strategy: str, step: str) -> Any:
    """A lowered step of a model. It needs a world of as many ranks as the mesh."""
    torch.manual_seed(0)
    own = MODELS[model]
    params, batch = own.params(), own.batch()
    plan, mesh = planned(own, strategy, params)
    where = [plan.batch] * len(batch)
    if STEPS[step] is None:
        run = sf.shard(sf.value_and_grad(own.loss), mesh, (plan.params, *where))
        return run.lower(params, *batch)
    opt = sf.optim(STEPS[step], lr=1e-3)

    def train(params: Any, state: Any, *batch: torch.Tensor) -> Any:
        loss, grads = sf.bucketed_grad(own.loss)(params, *batch)
        grads = sf.constrain(grads, plan.grads)
        params, state = opt.update(params, grads, state)
        return params, state, loss

    state = opt.state_placements(plan.state, params)
    places = (plan.params, state, *where), (plan.params, state, P())
    run = sf.shard(train, mesh, *places, donate_argnums=(0, 1))
    return run.lower(params, opt.init(params), *batch)


def planned(model: Model, strategy: str, params: Any) -> Any:
    """The placements of a strategy, and its mesh."""
    name, shape = STRATEGIES[strategy]
    axes = ("dp", "tp") if len(shape) == 2 else ("tp",) if name == "tensor" else ("dp",)
    mesh = sf.make_mesh(shape, axes)
    base = model.sharded(params) if "tp" in axes else None
    return sf.strategy(name, params, mesh, base=base), mesh


def size(strategy: str) -> int:
    """The number of ranks of a strategy."""
    _, shape = STRATEGIES[strategy]
    return torch.Size(shape).numel()
