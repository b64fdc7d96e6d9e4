"""What capture costs: processor time of the first capture of value and gradients, by node of the
captured program. `make bench-capture` fails above 2.0 ms a node.

    python -m bench.models.capture
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardfn as sf

from .hugging_face import causal, language

MOST = 2.0  # ms a node
LLAMA = {
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STAGES = ((16, 1), (32, 2), (64, 2), (128, 2))  # channels and stride of each
Inputs = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]


class Block(nn.Module):
    """Two convolutions of 3 x 3 with BatchNorm, and what they add to."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.beside = nn.Sequential()
        if before != after:
            self.beside.append(nn.Conv2d(before, after, 1, stride, bias=False))
            self.beside.append(nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inside(x) + self.beside(x))


def resnet() -> nn.Module:
    """ResNet-18 with an eighth of its channels."""
    first = STAGES[0][0]
    stem = (nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first))
    blocks: list[nn.Module] = []
    before = first
    for channels, stride in STAGES:
        blocks += [Block(before, channels, stride), Block(channels, channels, 1)]
        before = channels
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
    return nn.Sequential(*stem, nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks, *end)


def pictures() -> Inputs:
    return torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


def sorting(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def words() -> Inputs:
    return (torch.randint(101, (2, 8)),)


def llama(layers: int) -> Callable[[], nn.Module]:
    return causal("Llama", num_hidden_layers=layers, **LLAMA)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs], Loss]] = {
    "ResNet-18, 20 convolutions with BatchNorm": (resnet, pictures, sorting),
    "Llama of Hugging Face, 24 layers": (llama(24), words, language),
    "the same, 80 layers": (llama(80), words, language),
}


def captured(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs], loss: Loss
) -> tuple[float, int]:
    """(seconds of the processor, nodes of the program) of the first capture of a model."""
    fn, params, buffers = sf.functionalize(make().train())

    def of_params(params: Any, buffers: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, Any]:
        after: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            out, new = fn(params, buffers, *args, **kwargs)
            after.append(new)
            return out

        return loss(call, *inputs), after[0]

    step = sf.value_and_grad(of_params, has_aux=True)
    given = inputs()
    start = time.process_time()
    traced = step.trace(params, buffers, *given)
    seconds = time.process_time() - start
    return seconds, len(traced.program.graph.graph.nodes)


def main() -> None:
    """Print a line for each model, after a small one, for which torch imports what it needs."""
    torch.set_num_threads(1)
    captured(llama(1), words, language)
    slow = []
    for name, row in MODELS.items():
        seconds, nodes = captured(*row)
        each = 1e3 * seconds / nodes
        print(f"{name}: {seconds:.1f} s, {nodes} nodes, {each:.2f} ms a node")
        if each > MOST:
            slow.append(name)
    if slow:
        sys.exit(f"above {MOST} ms a node: {', '.join(slow)}")


if __name__ == "__main__":
    main()
