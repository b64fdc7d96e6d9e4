"""Models written with torch.nn alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .catalogue import BATCH, VOCAB, Model, cross_entropy, tokens


class Recurrent(nn.Module):
    """A language model: an embedding, a recurrent module, and logits."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.inner = kind(16, 24, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(x))[0])


class Translation(nn.Module):
    """nn.Transformer, sequence first, from words to words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.inner = nn.Transformer(32, 4, 1, 1, 48)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.embedding(x.t())
        return self.head(self.inner(words, words)).transpose(0, 1)


class Graph(nn.Module):
    """Two layers that add up what the neighbours of a node send."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)])

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer in self.layers:
            sent = torch.zeros_like(nodes).index_add(0, target, nodes[source])
            nodes = torch.tanh(layer(nodes + sent))
        return nodes


class Recommendation(nn.Module):
    """DLRM: sums of rows of tables, an MLP of numbers, and their inner products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.top = nn.Linear(8 + 6, 1)

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        bags = [table(rows[:, i]) for i, table in enumerate(self.tables)]
        every = torch.stack([dense, *bags], 1)
        products = every @ every.mT
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([dense, products[:, i, j]], 1)).squeeze(1)


def language(model: Any, x: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), x)


def of_nodes(model: Any, x: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> Any:
    return cross_entropy(model(x, e), y)


def graph() -> tuple[torch.Tensor, ...]:
    return torch.rand(12, 8), torch.randint(12, (2, 30)), torch.randint(3, (12,))


def clicked(model: Any, x: torch.Tensor, r: torch.Tensor, y: torch.Tensor) -> Any:
    return nn.functional.binary_cross_entropy_with_logits(model(x, r), y)


def clicks() -> tuple[torch.Tensor, ...]:
    rows = torch.randint(50, (BATCH, 3, 4))
    return torch.rand(BATCH, 5), rows, torch.rand(BATCH).round()


MODELS = (
    Model("LSTM", lambda: Recurrent(nn.LSTM), language, tokens),
    Model("GRU", lambda: Recurrent(nn.GRU), language, tokens),
    Model("nn.Transformer", Translation, language, tokens),
    Model("graph network", Graph, of_nodes, graph),
    Model("DLRM", Recommendation, clicked, clicks),
)
