"""What no file can hold is refused when it is saved, by name."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfn as sf
from shardfn.errors import ArtefactError, ShardError

X = torch.ones(3)
Pair = namedtuple("Pair", "a b")


@torch.library.custom_op("artefacts::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def compiled(fn: Any, *args: Any) -> Any:
    return sf.jit(fn, backend="aten").compile(*args)


@pytest.mark.parametrize(
    ("fn", "args", "said"),
    [
        (twice, (X,), "the op artefacts.twice.default, which a file cannot hold"),
        (lambda p: p.a + p.b, (Pair(X, X),), "a container of class Pair"),
        (lambda x: {(1, 2): x + 1}, (X,), "a key of type tuple"),
        (lambda x: x * 2, (X.clone().requires_grad_(),), "autograd records the call"),
    ],
)
def test_what_a_file_cannot_hold_is_named(fn: Any, args: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError) as caught:
        compiled(fn, *args).save(tmp_path / "step.sf")
    assert said in str(caught.value) and ", save: " in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    step = compiled(lambda x: x * 2, X)
    with pytest.raises(ArtefactError, match="cannot be written"):
        step.save(tmp_path / "none" / "step.sf")
    with pytest.raises(ShardError, match="save: path is 3, a int"):
        step.save(3)
