"""Programs that cannot be captured, one for each cause: each is refused for its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._utils import wrapper_set_seed

import shardfn as sf
from shardfn import P

X = torch.arange(6.0, dtype=torch.float64)
GENERATOR = "it reads or seeds a generator of random numbers"
CHANGES = "it changes something outside of itself: "
VALUE = "it branches on a tensor's value"
COUNT = 0
SEEN: dict[str, Any] = {}
LOG: list[Any] = []
OF_NUMPY = np.random.default_rng(0)


class Keeps(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        self.last = x * 2
        return self.last


class Holder:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __call__(self, x: Any) -> Any:
        self.seen["x"] = x
        return x


NET, HELD = torch.nn.Sequential(Keeps()), Holder()
HOOKED = torch.nn.Identity()
HOOKED.register_forward_hook(lambda _, given, out: SEEN.__setitem__("out", out))


def counts(x: Any) -> Any:
    global COUNT  # noqa: PLW0603
    COUNT = x
    return x


def seeds(x: Any) -> Any:
    np.random.seed(0)
    return x + 1


def logs(x: Any) -> Any:
    LOG.append(x)
    return x


def closed_over() -> Callable[[Any], Any]:
    inner = Keeps()
    return lambda x: inner(x)


def forks(x: Any) -> Any:
    with torch.random.fork_rng():
        return x + torch.rand(())


def branches_on_its_step(x: Any) -> Any:
    rank = sf.axis_index("dp")
    return sf.scan(lambda c, t: (2 * c if t > 1 else c, c), x + rank, torch.arange(3))[0]


def branches_beside_a_rank(x: Any) -> Any:
    rank = sf.axis_index("dp")
    return x + rank if x.sum() > 0 else x


def branches_on_a_rank(x: Any) -> Any:
    rank = sf.axis_index("dp") + 1
    return x if rank > 1 else 2 * x


PROGRAMS = {
    "a generator": (lambda x: x.cauchy_(generator=torch.default_generator), GENERATOR),
    "torch's tests": (lambda x: wrapper_set_seed(torch.sin, x), GENERATOR),
    "fork_rng": (forks, GENERATOR),
    "a number of numpy": (lambda x: x * np.random.rand(), GENERATOR),
    "a branch on one": (lambda x: x if np.random.rand() > 0.5 else 2 * x, GENERATOR),
    "an index of numpy": (lambda x: x[np.random.randint(3)], GENERATOR),
    "an array of numpy": (lambda x: x + torch.from_numpy(np.random.randn(6)), GENERATOR),
    "a generator of numpy": (lambda x: x * OF_NUMPY.random(), GENERATOR),
    "a seed of numpy": (seeds, GENERATOR),
    "a global": (counts, CHANGES + "COUNT"),
    "a list": (logs, CHANGES + "LOG"),
    "a hook": (lambda x: HOOKED(x), CHANGES + "SEEN['out']"),
    "a part of a module": (lambda x: NET(x), CHANGES + "NET.0.last"),
    "of what is closed over": (closed_over(), CHANGES + "inner.last"),
    "of the object itself": (HELD, CHANGES + "Holder.seen['x']"),
    "a branch": (lambda x: x if x.sum() > 0 else 2 * x, VALUE),
}
OF_RANKS = {
    branches_on_its_step: VALUE,
    branches_beside_a_rank: VALUE,
    branches_on_a_rank: "it branches on the number of a rank, or slices by it",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_refused_for_its_own_cause(name: str) -> None:
    fn, cause = PROGRAMS[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {cause}")


@pytest.mark.parametrize("fn", OF_RANKS)
def test_what_is_not_the_number_of_a_rank_is_not_called_one(fn: Any) -> None:
    with sf.fake_world(2):
        mesh = sf.make_mesh((2,), ("dp",))
        mapped = sf.shard_map(fn, mesh=mesh, in_placements=P("dp"), out_placements=P("dp"))
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(mapped, backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {OF_RANKS[fn]}")
