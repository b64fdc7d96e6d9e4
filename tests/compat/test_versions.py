"""What one version of torch does otherwise than the others."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch

import shardfn as sf
from shardfn import P

SCALE = contextvars.ContextVar("scale", default=2.0)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
}


def test_a_context_variable_is_refused_by_name() -> None:
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(lambda x: x * SCALE.get(), backend="aten")(torch.ones(3))
    assert "the function reads a context variable" in str(caught.value)
    assert (
        caught.value.fix
        == "read the variable outside of the function, and pass the value as an argument"
    )


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_transposed_view_is_seen(name: str) -> None:
    view = VIEWS[name]

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = w.clone()
        view(y).mul_(x.sum())
        return y + x

    w, x = torch.randn(3, 3).double(), torch.randn(6, 3).double()
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        mapped = sf.shard_map(body, mesh, (P(), P("dp")), P("dp"), backend="aten")
        found = sf.full(mapped(w, x))
    torch.testing.assert_close(found, torch.cat([body(w, half) for half in x.chunk(2)]))
