"""Programs that cannot be captured, one for each cause: each is refused for its own."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch.nn.utils import rnn
from torch.testing._utils import wrapper_set_seed

import shardfn as sf
from shardfn import P
from shardfn.capture.refusals import data_dependent

X = torch.arange(6.0, dtype=torch.float64)
GENERATOR = "the function reads or seeds a generator of random numbers"
CHANGES = "the function changes an object outside of itself: "
VALUE = "the function branches on a tensor's value"
COUNT = 0
SEEN: dict[str, Any] = {}
LOG: list[Any] = []
EMBEDDING = torch.nn.Embedding(3, 6, max_norm=0.5)
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
SEQUENTIAL = torch.nn.Sequential()
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


def hooks(x: Any) -> Any:
    SEQUENTIAL.register_forward_hook(lambda *_: None)
    return SEQUENTIAL(x)


def hooks_backward(x: Any) -> Any:
    SEQUENTIAL.register_full_backward_hook(lambda *_: None)
    return SEQUENTIAL(x)


def adds_to_a_shared_one(x: Any) -> Any:
    y = torch.zeros(6, dtype=x.dtype)
    y += x
    return y


def writes_to_an_out(x: Any) -> Any:
    y = torch.zeros_like(x)
    torch.add(x, 1, out=y)
    return y


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
    "a number of Python": (lambda x: x * random.random(), GENERATOR),
    "a choice of Python": (lambda x: x * random.choice([1, 2]), GENERATOR),
    "a seed of Python": (lambda x: x if random.seed(0) is None else 2 * x, GENERATOR),
    "a hook on a module": (hooks, "the function registers a hook on a module"),
    "a module's hook on its backward": (
        lambda x: sf.grad(lambda x: hooks_backward(x).sum())(x),
        "the function registers a hook on a module",
    ),
    "samples added to a shared tensor": (
        lambda x: sf.vmap(adds_to_a_shared_one)(torch.stack([x, x])),
        "under vmap, the function writes values that differ between samples to a tensor that "
        "all samples share",
    ),
    "an out= under vmap": (
        lambda x: sf.vmap(writes_to_an_out)(torch.stack([x, x])),
        "under vmap, the function writes to an out= tensor, or calls a view op that torch's vmap "
        "does not support",
    ),
    "max_norm": (
        lambda x: F.embedding(torch.tensor([0, 1]), x.reshape(2, 3), max_norm=0.5),
        "an embedding with max_norm rescales rows of its weight in place",
    ),
    "max_norm of a module": (
        lambda x: x + EMBEDDING(torch.tensor(1)),
        "an embedding with max_norm rescales rows of its weight in place",
    ),
    "a global": (counts, CHANGES + "COUNT"),
    "a list": (logs, CHANGES + "LOG"),
    "a branch": (lambda x: x if x.sum() > 0 else 2 * x, VALUE),
}
# what a function may store, but not under vmap
STORED = {
    "a hook": (lambda x: HOOKED(x), "SEEN['out']"),
    "a part of a module": (lambda x: NET(x), "NET.0.last"),
    "of what is closed over": (closed_over(), "inner.last"),
    "of the object itself": (HELD, "Holder.seen['x']"),
}
# each function whose result's shape depends on values, or that reads one -> a program
OF_VALUES: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 1)[0],
    "getitem": lambda x: x[x > 1],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "tensor_split": lambda x: x.tensor_split(x.long())[0],
    "one_hot": lambda x: torch.nn.functional.one_hot(x.long()),
    "_ctc_loss": lambda x: torch.ctc_loss(
        x.reshape(2, 1, 3), x[:1].long().reshape(1, 1), x[1:2].long(), x[1:2].long()
    ),
    "_pack_padded_sequence": lambda x: rnn.pack_padded_sequence(x[:, None], x[:1].long()).data,
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * x.tolist()[1],
    "Tensor": lambda x: torch.Tensor([x.sum(), x.mean()]),
    "equal": lambda x: x if torch.equal(x, x + 1) else 2 * x,
    "allclose": lambda x: x if torch.allclose(x, x + 1) else 2 * x,
}


class Packs(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return rnn.pack_padded_sequence(x[:, None], x[:1].long()).data


PACK = rnn.pack_padded_sequence(X[:, None, None], [6])
RECURRENT = torch.nn.GRU(1, 2, dtype=X.dtype)
# each file of torch whose code reads a value -> programs
CLUSTERS = torch.nn.AdaptiveLogSoftmaxWithLoss(6, 8, [2, 5], dtype=torch.float64)


class Clusters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CLUSTERS

    def forward(self, x: Any) -> Any:
        return self.inner(x[None], x[:1].long()).loss


OF_FILES: dict[str, list[Callable[[Any], Any]]] = {
    "torch/nn/utils/rnn.py": [
        lambda x: rnn.pad_packed_sequence(PACK)[0] + x[0],
        lambda x: rnn.unpad_sequence(x[:, None], x[:1].long())[0],
        Packs(),
    ],
    "nn/modules/rnn.py": [lambda x: RECURRENT(PACK)[0].data * x[0]],
    "nn/modules/adaptive.py": [
        Clusters(),
        lambda x: CLUSTERS.predict(x[None]),
        sf.grad(lambda x: CLUSTERS(x[None], x[:1].long()).loss),
    ],
    "torch/distributions/von_mises.py": [lambda x: D.VonMises(x, x + 1).sample()],
    "torch/distributions/wishart.py": [
        lambda x: D.Wishart(x[:1].sum() + 5, torch.eye(3, dtype=x.dtype)).sample()
    ],
}
OF_RANKS = {
    branches_on_its_step: VALUE,
    branches_beside_a_rank: VALUE,
    branches_on_a_rank: "the function branches or slices by the number of a rank",
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


@pytest.mark.parametrize("name", STORED)
def test_what_a_vmap_stores_is_refused_with_its_place(name: str) -> None:
    fn, place = STORED[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(sf.vmap(fn), backend="aten")(X)
    assert str(caught.value).splitlines()[0].endswith(f": {CHANGES}{place}")


def test_each_row_has_a_program() -> None:
    assert OF_VALUES.keys() == data_dependent.FUNCTIONS.keys()


@pytest.mark.parametrize("name", OF_VALUES)
def test_what_depends_on_values_is_refused_by_its_row(name: str) -> None:
    problem, said, fix = data_dependent.FUNCTIONS[name]
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(OF_VALUES[name], backend="aten")(X)
    first, *_, last = str(caught.value).splitlines()
    assert first == f"jit(<lambda>): {problem.format(what=said)}"
    assert last == f"  try: {fix}"


def test_each_file_has_programs() -> None:
    assert OF_FILES.keys() == data_dependent.FILES.keys()


@pytest.mark.parametrize("file", OF_FILES)
def test_what_torchs_own_code_reads_is_refused_by_its_file(file: str) -> None:
    problem, fix = data_dependent.FILES[file]
    for fn in OF_FILES[file]:
        with pytest.raises(sf.CaptureError) as caught:
            sf.jit(fn, backend="aten")(X)
        assert problem in str(caught.value) and caught.value.fix == fix
        if isinstance(fn, torch.nn.Module):
            pure, params, buffers = sf.functionalize(fn)
            with pytest.raises(sf.CaptureError) as caught:
                sf.jit(pure, backend="aten")(params, buffers, X)
            assert problem in str(caught.value) and caught.value.fix == fix


@pytest.mark.parametrize("read", [lambda x, m: x[m], lambda x, m: torch.where(m, x, 0)])
def test_a_mask_of_uint8_is_refused_by_its_dtype(read: Any) -> None:
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.uint8)
    of_sum = lambda x, m: read(x, m).sum()
    for call in (sf.jit(read, backend="aten"), sf.grad(of_sum)):
        with pytest.raises(sf.CaptureError, match=r"uint8 tensor as a mask[\s\S]*mask\.bool\(\)"):
            call(X, mask)
    with pytest.raises(IndexError, match="must be long, int, byte or bool"):  # torch's own
        sf.jit(lambda x: x[x], backend="aten")(X)


TABLE = {"w": [torch.ones(6, dtype=torch.float64)]}


def copied(x: Any) -> Any:
    return copy.deepcopy(TABLE)["w"][0] * x  # the line of the error


def written(x: Any) -> Any:
    return x * len(json.dumps([float(x.sum())]))  # the line of the error


@pytest.mark.parametrize("fn", [copied, written])
def test_an_error_in_a_module_of_python_has_the_users_line(fn: Any) -> None:
    line = fn.__code__.co_firstlineno + 1
    with pytest.raises(sf.CaptureError) as caught:
        sf.jit(fn, backend="aten")(X)
    assert f"at: {__file__}:{line}" in str(caught.value)


def test_clusters_of_classes_as_the_cause_says_are_torchs() -> None:
    x, target = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 3, 2, 7, 1])

    def loss(x: Any) -> Any:
        return -CLUSTERS.log_prob(x).gather(1, target[:, None]).squeeze(1).mean()

    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(CLUSTERS(leaf, target).loss, leaf)
    torch.testing.assert_close(sf.grad(loss)(x), slope)
    best = sf.jit(lambda x: CLUSTERS.log_prob(x).argmax(1), backend="aten")(x)
    torch.testing.assert_close(best, CLUSTERS.predict(x))
