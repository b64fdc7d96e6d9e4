"""Programs with calls of blocks, run op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardfn.compile.backends import donate
from shardfn.compile.donations import donations
from shardfn.compile.repeats import CALL, Kind, outline, split_last_calls
from shardfn.runtime.stages.compiling import donated_places
from shardfn.schedule import copied


class _Calling(torch.fx.Interpreter):
    """An interpreter of a program that calls blocks."""

    def __init__(self, graph: torch.fx.Graph, kinds: Mapping[int, Kind]) -> None:
        super().__init__(torch.fx.GraphModule(torch.nn.Module(), graph))
        self.kinds = kinds

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not CALL:
            return super().call_function(target, args, kwargs)
        read, written, number = args
        inside = _Calling(self.kinds[number].graph, {})
        return inside.run(*read, *written)


def outlined(lowered: Any) -> tuple[torch.fx.Graph, dict[int, Kind]]:
    """The program of a lowered function with calls of blocks, as it is compiled."""
    pairs = donations(lowered.program, donated_places(lowered.traced.placed))
    return outline(donate(copied(lowered.program.graph), pairs))


def copies(graph: torch.fx.Graph) -> list[int]:
    """How often a program calls each kind of block, the most first."""
    numbers = [node.args[2] for node in graph.nodes if node.target is CALL]
    return sorted((numbers.count(k) for k in set(numbers)), reverse=True)


def run_outlined(lowered: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of the program with calls on its inputs, some of which it writes to."""
    return run_calls(*outlined(lowered), inputs)


def run_calls(
    graph: torch.fx.Graph, kinds: Mapping[int, Kind], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results of a program with calls of these kinds on inputs, some of which it writes to,
    its last calls after it.
    """
    last = split_last_calls(graph)
    module: dict[str, Any] = {"call": lambda args: _Calling(graph, kinds).run(*args)}
    for k, kind in enumerate(kinds.values()):
        inside = _Calling(kind.graph, {})
        module[f"block_{k}"] = lambda args, inside=inside: inside.run(*args)
    if last is not None:
        exec(last.code(kinds), module)
    with torch.no_grad():
        return [*module["call"]([*inputs])]
