"""What `bench.buckets` trains: an MLP and the demo's GPT, each as a pure function and as
modules that compute the same, and the GPT as an unchanged module with an optimizer of torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfn_demo import gpt

Params = Any  # a tree of tensors: dicts and lists
Loss = Callable[[Params, Tensor, Tensor], Tensor]
RANKS = 2


@attrs.frozen(kw_only=True)
class Job:
    """A model, a batch to train it on again and again, and an optimizer.

    Args:
        name: mlp or gpt.
        params: where training starts.
        loss: (params, x, y) -> mean loss, a 0-d tensor; pure.
        module: the same function as a module of these parameters: called with (x, y) it returns
            the loss, its `layers` are what FSDP wraps one by one, and its parameters have the
            names that `named` gives them.
        x: inputs of all ranks.
        y: targets of all ranks.
        lr: learning rate.
        optimizer: a class of torch's, by which shardfn trains the unchanged module; None: shardfn
            trains the pure function, and subtracts lr times the gradients.
    """

    name: str
    params: Params
    loss: Loss
    module: Callable[[Params], nn.Module]
    x: Tensor
    y: Tensor
    lr: float
    optimizer: type[torch.optim.Optimizer] | None = None

    def torchs(self, module: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the module's parameters, by one fused kernel where it has moments."""
        kind = self.optimizer or torch.optim.SGD
        options = {"fused": True} if kind is torch.optim.AdamW else {}
        return kind(module.parameters(), lr=self.lr, **options)

    def rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """What one rank trains on."""
        return self.x.chunk(RANKS)[rank].clone(), self.y.chunk(RANKS)[rank].clone()


def mlp(width: int, depth: int, batch: int) -> Job:
    """Linear layers with biases and tanh between them, mean squared error.

    Args:
        width: features, of the inputs and targets too.
        depth: how many layers.
        batch: rows of all ranks.
    """
    generator = torch.Generator().manual_seed(0)

    def layer() -> dict[str, Tensor]:
        return {
            "w": torch.randn(width, width, generator=generator) / width**0.5,
            "b": torch.zeros(width),
        }

    params = {"layers": [layer() for _ in range(depth)]}
    x, y = torch.randn(2, batch, width, generator=generator)
    return Job(name="mlp", params=params, loss=mlp_loss, module=Mlp, x=x, y=y, lr=1.0)


def demo_gpt(
    config: gpt.Config,
    batch: int,
    *,
    lr: float = 0.1,
    optimizer: type[torch.optim.Optimizer] | None = None,
) -> Job:
    """The demo's GPT on random tokens.

    Args:
        config: its sizes.
        batch: windows of all ranks.
        lr: learning rate.
        optimizer: as for `Job`.
    """
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(config.vocab, (2, batch, config.context), generator=generator)
    loss = functools.partial(gpt.loss_fn, heads=config.heads)
    module = functools.partial(Gpt, heads=config.heads)
    return Job(
        name="gpt",
        params=gpt.init(config),
        loss=loss,
        module=module,
        x=x,
        y=y,
        lr=lr,
        optimizer=optimizer,
    )


def mlp_loss(params: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of the MLP; x and y are (B, C)."""
    *inner, last = params["layers"]
    for layer in inner:
        x = torch.tanh(F.linear(x, layer["w"], layer["b"]))
    return ((F.linear(x, last["w"], last["b"]) - y) ** 2).mean()


class Held(nn.Module):
    """A dict of tensors, and of dicts of them, as parameters of a module."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, Tensor):
                self.register_parameter(name, nn.Parameter(value.clone()))
            else:
                self.add_module(name, Held(value))

    def tree(self) -> dict[str, Any]:
        """The parameters as the dict that they came from."""
        return {**self._parameters, **{name: child.tree() for name, child in self._modules.items()}}


class Linear(Held):
    """One layer of the MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b)


class Mlp(nn.Module):
    """`mlp_loss` as modules."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Linear, params["layers"]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return ((self.layers[-1](x) - y) ** 2).mean()


class Block(Held):
    """One layer of the GPT."""

    def __init__(self, layer: dict[str, Any], heads: int) -> None:
        super().__init__(layer)
        self.heads = heads

    def forward(self, h: Tensor) -> Tensor:
        layer = self.tree()
        h = h + gpt.attention(layer, gpt.normed(h, layer["ln1"]), heads=self.heads)
        return h + F.gelu(gpt.normed(h, layer["ln2"]) @ layer["up"]) @ layer["down"]


class Gpt(nn.Module):
    """`gpt.loss_fn` as modules; the parameters are registered in the order of their use."""

    def __init__(self, params: dict[str, Any], heads: int) -> None:
        super().__init__()
        self.tok, self.pos = (
            nn.Parameter(params["tok"].clone()),
            nn.Parameter(params["pos"].clone()),
        )
        self.layers = nn.ModuleList(Block(layer, heads) for layer in params["layers"])
        self.ln, self.head = (Held(params["ln"]), nn.Parameter(params["head"].clone()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.embedding(x, self.tok) + self.pos[: x.shape[1]]  # (B, T, C)
        for block in self.layers:
            h = block(h)
        return F.cross_entropy(
            (gpt.normed(h, self.ln.tree()) @ self.head).flatten(0, 1), y.flatten()
        )


def named(tree: Params, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The leaves of a tree with the names that a module would give them.

    Example:
        >>> [name for name, _ in named({"ln": {"w": torch.ones(1)}, "layers": [torch.ones(1)]})]
        ['ln.w', 'layers.0']
    """
    if isinstance(tree, Tensor):
        yield prefix, tree
        return
    for name, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from named(child, f"{prefix}.{name}" if prefix else str(name))


def trained(job: Job, x: Tensor, y: Tensor, steps: int) -> dict[str, Tensor]:
    """The parameters after some steps by torch alone, in one process: what every rival has to
    come to.

    Args:
        job: what to train.
        x: inputs.
        y: targets.
        steps: how many.
    """
    module = job.module(job.params)
    optimizer = job.torchs(module)
    for _ in range(steps):
        optimizer.zero_grad()
        module(x, y).backward()
        optimizer.step()
    return {name: w.detach() for name, w in module.named_parameters()}


SMALLEST = gpt.Config(vocab=16, context=8, width=16, heads=4, layers=2)
JOBS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: mlp(1024, 8, RANKS * 128),  # 34 MB of gradients
    "gpt": lambda: demo_gpt(gpt.Config(), RANKS * 16),  # 3.4 MB
    "gpt module, SGD": lambda: demo_gpt(gpt.Config(), RANKS * 16, optimizer=torch.optim.SGD),
    "gpt module, AdamW": lambda: demo_gpt(
        gpt.Config(), RANKS * 16, lr=1e-3, optimizer=torch.optim.AdamW
    ),
    "slow": lambda: mlp(1024, 8, RANKS * 1536),
    "mlp, quick": lambda: mlp(256, 4, RANKS * 16),
    "gpt, quick": lambda: demo_gpt(SMALLEST, RANKS * 4),
    "gpt module, SGD, quick": lambda: demo_gpt(SMALLEST, RANKS * 4, optimizer=torch.optim.SGD),
    "gpt module, AdamW, quick": lambda: demo_gpt(
        SMALLEST, RANKS * 4, lr=1e-3, optimizer=torch.optim.AdamW
    ),
    "slow, quick": lambda: mlp(256, 4, RANKS * 256),
}


def layer_bytes(job: Job) -> list[int]:
    """Bytes of the parameters of each layer of an MLP."""
    return [sum(x.nbytes for x in layer.values()) for layer in job.params["layers"]]
