"""Closed-over tensors: which a gradient reaches, and the user's names of them."""

from __future__ import annotations

import torch

from shardfn.capture.closure.closed_over import names_of, reached_from, reaching


class Model:
    def __init__(self) -> None:
        self.layers = [{"w": torch.ones(2)}]


def test_the_leaves_that_a_gradient_reaches() -> None:
    v, w, u = (torch.ones(2, requires_grad=True) for _ in range(3))
    ends = reached_from([(v * 2 + w.detach()).sum(), torch.ones(1), u])
    assert ends == {id(v), id(u)}


def test_the_results_whose_gradient_reaches_a_leaf() -> None:
    v, w, u = (torch.ones(2, requires_grad=True) for _ in range(3))
    x = v.sin()
    results = [x * w, torch.ones(2), (x.cos() + w.detach()).sum(), u, w * 2, x]
    assert reaching(results) == {id(v): [0, 2, 5], id(w): [0, 4], id(u): [3]}


def test_a_long_chain_needs_no_recursion() -> None:
    w = x = torch.ones(1, requires_grad=True)
    for _ in range(3000):
        x = x + 1
    assert reached_from([x]) == {id(w)}


def test_a_tensor_is_named_as_python_writes_it() -> None:
    model, scale = Model(), torch.ones(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * scale * model.layers[0]["w"]

    wanted = [scale, model.layers[0]["w"], torch.ones(4, 5)]
    assert names_of(wanted, {"fn": fn}) == [
        "scale",
        "model.layers[0]['w']",
        "a tensor of shape (4, 5)",
    ]
