"""What follows a parameter: the state of an optimizer, and new values."""

from __future__ import annotations

from typing import Any

import torch

import shardfn as sf
from shardfn.partition.auto.parameter_groups import ParameterGroups


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["v"]) @ p["w"]).square().mean()


def momentum(p: Any, m: Any, x: torch.Tensor) -> Any:
    g = sf.grad(loss)(p, x)
    m = sf.tree_map(lambda a, b: 0.9 * a + b, m, g)
    return sf.tree_map(lambda a, b: a - 0.1 * b, p, m), m


def followed(fn: Any, *args: Any) -> dict[str, str | None]:
    """For each argument and result the parameter that it follows, by paths."""
    program = sf.jit(fn).trace(*args).program
    graph = program.graph.graph
    found = ParameterGroups(graph)
    paths = dict(zip(graph.find_nodes(op="placeholder"), program.in_paths, strict=True))
    (output,) = graph.find_nodes(op="output")
    rows = [*paths.items(), *zip(output.args[0], program.out_paths, strict=True)]
    return {path: paths.get(found.leader(node)) for node, path in rows}


# equal shapes, which say nothing of who follows whom
PARAMS = {"v": sf.ShapeDtype((4, 4)), "w": sf.ShapeDtype((4, 4))}
X = sf.ShapeDtype((4, 4))


def test_state_and_new_values_follow_their_parameter() -> None:
    found = followed(momentum, PARAMS, PARAMS, X)
    for name in "vw":
        own = f"p['{name}']"
        assert found[own] == found[f"m['{name}']"] == own
        results = [leader for path, leader in found.items() if path.endswith(f"['{name}']")]
        assert results == [own] * 4
    assert found["x"] is None


def test_without_gradients_nothing_follows() -> None:
    found = followed(lambda p, x: [p["v"] * x], PARAMS, X)
    assert set(found.values()) == {None}


def test_what_two_parameters_share_follows_none() -> None:
    def mixed(p: Any, m: torch.Tensor, x: torch.Tensor) -> Any:
        g = sf.grad(loss)(p, x)
        return g["v"] + g["w"] + m

    assert followed(mixed, PARAMS, X, X)["m"] is None
