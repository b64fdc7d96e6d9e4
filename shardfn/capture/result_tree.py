"""The results of a captured function, and the Program that returns them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import _tree
from ..errors import CaptureError
from ..types import CONSTANTS, TENSOR, Program
from .printing import program_text

PLACES = (DeviceMesh, ProcessGroup)  # of torch.distributed: results that are constants


OF_FAKES = "FakeTensor("


class Result(NamedTuple):
    """The tree of the results of a function, with TENSOR for each tensor."""

    leaves: list[Any]  # TENSOR for tensors
    treedef: _tree.TreeDef
    paths: list[str]
    gradients: tuple[str, ...] = ()  # the tensors whose gradients follow

    @classmethod
    def of(cls, out: Any) -> Result:
        """The tree of these results."""
        _tree.learn_registered(out)
        leaves, treedef = _tree.flatten(out)
        return cls(list(map(_mark_tensor, leaves)), treedef, _tree.paths(out))

    def beside(self, gradients: tuple[str, ...]) -> Result:
        """The tree of the value alone, of a result that is a value and gradients."""
        value = self.treedef.children()[0]
        count = len(self.leaves) - len(gradients)
        paths = [path.removeprefix("[0]") for path in self.paths[:count]]
        return Result(self.leaves[:count], value, paths, gradients)


def program_of(
    name: str, graph: torch.fx.GraphModule, in_paths: tuple[str, ...], out: Result
) -> Program:
    _refuse_results(out.leaves, out.paths, name)
    return Program(
        name=name,
        graph=graph,
        in_paths=in_paths,
        out_paths=(
            *("result" + path for path in _tensor_paths(out)),
            *(f"gradient of {path}" for path in out.gradients),
        ),
        out_leaves=tuple(out.leaves),
        out_tree=out.treedef,
        show=program_text,
    )


def _tensor_paths(out: Result) -> list[str]:
    pairs = zip(out.paths, out.leaves, strict=True)
    return [path for path, x in pairs if x is TENSOR]


def _refuse_results(leaves: list[Any], paths: list[str], name: str) -> None:
    _refuse_texts(leaves, paths, name)
    wrong = [
        (p, x)
        for p, x in zip(paths, leaves, strict=True)
        if (x is not TENSOR and not isinstance(x, (*CONSTANTS, *PLACES))) or _untold(x)
    ]
    if wrong:
        lines = [f"result{path} is a {type(x).__name__}" for path, x in wrong]
        raise CaptureError.of(
            name,
            *lines,
            needed="a tree of tensors and constants",
            fix="return tensors and constants; turn your own class into a NamedTuple or a dict",
            arg_path="result" + wrong[0][0],
        )


def _refuse_texts(leaves: list[Any], paths: list[str], name: str) -> None:
    """Refuse a text of a tensor, which Dynamo writes of the fake one: f"{x}"."""
    rows = zip(paths, leaves, strict=True)
    told = [(p, x if isinstance(x, str) else "") for p, x in rows]
    wrong = [p for p, text in told if OF_FAKES in p or OF_FAKES in text]
    if wrong:
        places = [f"result{_before_text(path)}" for path in wrong]
        raise CaptureError.of(
            name,
            *[f"{place} is text made from a tensor's value" for place in places],
            needed="results that are tensors: inside the function, their values are not known",
            fix="return the tensor, and write the text outside: f'{x}'",
            arg_path=places[0],
        )


def _before_text(path: str) -> str:
    """A path up to a key that is a text of a tensor."""
    before, text, _ = path.partition(OF_FAKES)
    return before.rpartition("[")[0] if text else path


def _untold(x: Any) -> bool:
    """Whether a result is a text of a mesh that Dynamo has evaluated on a stand-in (torch 2.13).
    f"{mesh}" works.
    """
    return isinstance(x, str) and "FakeScriptObject object at" in x


def _mark_tensor(x: Any) -> Any:
    """TENSOR for a tensor, and any other leaf as it is."""
    return TENSOR if isinstance(x, torch.Tensor) else x
